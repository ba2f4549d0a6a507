"""Limits shared by both services."""

MAX_TREE_NODES = 256  # default size limit of a tree
MOST_TREE_NODES = 2048  # highest size limit that the command line accepts
ALL_LAYERS = 2**20  # stands for "all": more layers than any model has
MAX_TEMPERATURE = 100.0
MAX_FIXED_ROWS = 4096  # largest fixed row count of a forward pass
MAX_SESSIONS = 16  # default number of concurrent completions; further requests wait in the queue
MAX_QUEUED = 256
MAX_STOP_TOKENS = 1024  # per request
MAX_GRAMMAR_BYTES = 2**17  # text of a request's grammar
MAX_GRAMMARS = 64  # compiled grammars that a service keeps
MAX_TOP_LOG_PROBS = 20  # likeliest tokens reported at each position
MAX_PROMPT_LOG_PROBS = 2**18  # per request, so that one message of at most 4 MiB carries them
HISTORY_TOKENS = 1_000_000  # default number of tokens of finished completions that a draft service keeps
MOST_HISTORY_TOKENS = 10**9  # highest number that the command line accepts; positions have 32 bits
MAX_PRINCIPAL_LENGTH = 256  # characters
RESUME_SECONDS = 30.0  # how long a completion waits for a new verify service after losing its own
IDLE_SECONDS = 300.0  # how long a session waits for a peer that sends or reads nothing
RECORD_BYTES = 2**30  # default bound on the recorded completions
