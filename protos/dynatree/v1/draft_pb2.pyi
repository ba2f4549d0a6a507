from dynatree.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "special_tokens", "add_special_tokens", "token_strings")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    special_tokens: bool
    add_special_tokens: bool
    token_strings: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., special_tokens: bool = ..., add_special_tokens: bool = ..., token_strings: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_strings")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_strings: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetVocabularyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVocabularyResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DraftServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("draft", "target", "policies", "chat_template", "tool_format")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    draft: _tree_pb2.ModelInfo
    target: _tree_pb2.ModelInfo
    policies: _containers.RepeatedScalarFieldContainer[str]
    chat_template: bool
    tool_format: str
    def __init__(self, draft: _Optional[_Union[_tree_pb2.ModelInfo, _Mapping]] = ..., target: _Optional[_Union[_tree_pb2.ModelInfo, _Mapping]] = ..., policies: _Optional[_Iterable[str]] = ..., chat_template: bool = ..., tool_format: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "max_new_tokens", "sampling", "stop", "ignore_eos", "policy", "stop_token_ids", "log_probs", "n", "trace", "queue_position", "resume", "special_tokens", "top_log_probs", "prompt_log_probs", "prompt_text", "store", "grammar", "special_tokens_in_text")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_IN_TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    max_new_tokens: int
    sampling: _tree_pb2.SamplingOptions
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    policy: Policy
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: bool
    n: int
    trace: bool
    queue_position: bool
    resume: Resume
    special_tokens: bool
    top_log_probs: int
    prompt_log_probs: bool
    prompt_text: bool
    store: bool
    grammar: _tree_pb2.Grammar
    special_tokens_in_text: bool
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_tree_pb2.SamplingOptions, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: bool = ..., policy: _Optional[_Union[Policy, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., log_probs: bool = ..., n: _Optional[int] = ..., trace: bool = ..., queue_position: bool = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., special_tokens: bool = ..., top_log_probs: _Optional[int] = ..., prompt_log_probs: bool = ..., prompt_text: bool = ..., store: bool = ..., grammar: _Optional[_Union[_tree_pb2.Grammar, _Mapping]] = ..., special_tokens_in_text: bool = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "continue_final_message", "tools", "template_variables")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    continue_final_message: bool
    tools: str
    template_variables: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., continue_final_message: bool = ..., tools: _Optional[str] = ..., template_variables: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("index", "token_ids", "characters", "target_fingerprint", "round")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    characters: int
    target_fingerprint: str
    round: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., characters: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("name", "settings", "list_settings", "word_settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ListSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Numbers
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Numbers, _Mapping]] = ...) -> None: ...
    class WordSettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LIST_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    WORD_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _containers.ScalarMap[str, float]
    list_settings: _containers.MessageMap[str, Numbers]
    word_settings: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Mapping[str, float]] = ..., list_settings: _Optional[_Mapping[str, Numbers]] = ..., word_settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "completion", "log_probs", "index", "trace", "queue_position", "started", "top_log_probs", "text_offsets")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    completion: Completion
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    index: int
    trace: RoundTrace
    queue_position: int
    started: Started
    top_log_probs: _tree_pb2.TopLogProbs
    text_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ..., log_probs: _Optional[_Iterable[float]] = ..., index: _Optional[int] = ..., trace: _Optional[_Union[RoundTrace, _Mapping]] = ..., queue_position: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., top_log_probs: _Optional[_Union[_tree_pb2.TopLogProbs, _Mapping]] = ..., text_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("seed", "prompt_ids", "target_fingerprint", "prompt_log_probs", "prompt_top_log_probs", "max_new_tokens", "prompt_text", "prompt_text_offsets")
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    target_fingerprint: str
    prompt_log_probs: _containers.RepeatedScalarFieldContainer[float]
    prompt_top_log_probs: _tree_pb2.TopLogProbs
    max_new_tokens: int
    prompt_text: str
    prompt_text_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seed: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., target_fingerprint: _Optional[str] = ..., prompt_log_probs: _Optional[_Iterable[float]] = ..., prompt_top_log_probs: _Optional[_Union[_tree_pb2.TopLogProbs, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., prompt_text: _Optional[str] = ..., prompt_text_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundTrace(_message.Message):
    __slots__ = ("round", "base_length", "token_ids", "parents", "probabilities", "texts", "accepted_nodes", "committed_ids", "committed_texts", "parameters", "draft_seconds", "verify_seconds")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TEXTS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_texts: _containers.RepeatedScalarFieldContainer[str]
    parameters: _containers.ScalarMap[str, float]
    draft_seconds: float
    verify_seconds: float
    def __init__(self, round: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., committed_texts: _Optional[_Iterable[str]] = ..., parameters: _Optional[_Mapping[str, float]] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "statistics")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _tree_pb2.FinishReason
    prompt_tokens: int
    statistics: GenerationStatistics
    def __init__(self, finish_reason: _Optional[_Union[_tree_pb2.FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., statistics: _Optional[_Union[GenerationStatistics, _Mapping]] = ...) -> None: ...

class GenerationStatistics(_message.Message):
    __slots__ = ("generated_tokens", "rounds", "draft_n", "draft_n_accepted", "acceptance_rate", "tokens_per_round", "mean_path_length", "nodes_per_round", "acceptance_by_depth", "time_to_first_token_seconds", "time_per_output_token_seconds", "total_seconds", "round_parts", "seed", "committed_per_level", "draft_seconds", "wire_seconds", "verify_seconds", "queue_seconds", "sessions_per_pass", "rows_per_pass", "trimmed_n", "cached_tokens", "kv_cache_usage", "resumes", "resume_seconds")
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_N_FIELD_NUMBER: _ClassVar[int]
    DRAFT_N_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    MEAN_PATH_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_PARTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_PER_LEVEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    TRIMMED_N_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    RESUME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    generated_tokens: int
    rounds: int
    draft_n: int
    draft_n_accepted: int
    acceptance_rate: float
    tokens_per_round: float
    mean_path_length: float
    nodes_per_round: float
    acceptance_by_depth: _containers.RepeatedScalarFieldContainer[float]
    time_to_first_token_seconds: float
    time_per_output_token_seconds: float
    total_seconds: float
    round_parts: _containers.RepeatedCompositeFieldContainer[RoundPart]
    seed: int
    committed_per_level: float
    draft_seconds: float
    wire_seconds: float
    verify_seconds: float
    queue_seconds: float
    sessions_per_pass: float
    rows_per_pass: float
    trimmed_n: int
    cached_tokens: int
    kv_cache_usage: float
    resumes: int
    resume_seconds: float
    def __init__(self, generated_tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., draft_n: _Optional[int] = ..., draft_n_accepted: _Optional[int] = ..., acceptance_rate: _Optional[float] = ..., tokens_per_round: _Optional[float] = ..., mean_path_length: _Optional[float] = ..., nodes_per_round: _Optional[float] = ..., acceptance_by_depth: _Optional[_Iterable[float]] = ..., time_to_first_token_seconds: _Optional[float] = ..., time_per_output_token_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., round_parts: _Optional[_Iterable[_Union[RoundPart, _Mapping]]] = ..., seed: _Optional[int] = ..., committed_per_level: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., sessions_per_pass: _Optional[float] = ..., rows_per_pass: _Optional[float] = ..., trimmed_n: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., resumes: _Optional[int] = ..., resume_seconds: _Optional[float] = ...) -> None: ...

class RoundPart(_message.Message):
    __slots__ = ("name", "total_seconds", "p50_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    total_seconds: float
    p50_seconds: float
    def __init__(self, name: _Optional[str] = ..., total_seconds: _Optional[float] = ..., p50_seconds: _Optional[float] = ...) -> None: ...
