"""What both services hold to."""

MAX_TREE_NODES = 256  # of the largest tree, where the command line names no number
MOST_TREE_NODES = 2048  # that it may name
ALL_LAYERS = 2**20  # more than any model has
MAX_TEMPERATURE = 100.0
MAX_FIXED_ROWS = 4096  # of a forward
MAX_SESSIONS = 16  # completions at once, where the command line names no number; more wait in the queue
MAX_QUEUED = 256
MAX_STOP_TOKENS = 1024  # of one request
MAX_TOP_LOG_PROBS = 20  # likeliest tokens named beside each token
MAX_PROMPT_LOG_PROBS = 2**18  # of one request's prompt: a message of at most 4 MiB carries them
MAX_PRINCIPAL_LENGTH = 256  # characters
RESUME_SECONDS = 30.0  # that a completion whose verify service was lost waits for another one
IDLE_SECONDS = 300.0  # that a session waits for a peer which sends or reads nothing
