from dynatree.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _tree_pb2.ModelInfo
    def __init__(self, model: _Optional[_Union[_tree_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("open", "tree")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    tree: _tree_pb2.TokenTree
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("prompt_ids", "max_new_tokens", "ignore_eos", "sampling", "draft", "stop_token_ids", "log_probs", "principal", "generated", "round", "top_log_probs", "prompt_log_probs", "grammar")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    ignore_eos: bool
    sampling: _tree_pb2.SamplingOptions
    draft: _tree_pb2.ModelInfo
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: bool
    principal: str
    generated: int
    round: int
    top_log_probs: int
    prompt_log_probs: bool
    grammar: _tree_pb2.Grammar
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., ignore_eos: bool = ..., sampling: _Optional[_Union[_tree_pb2.SamplingOptions, _Mapping]] = ..., draft: _Optional[_Union[_tree_pb2.ModelInfo, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., log_probs: bool = ..., principal: _Optional[str] = ..., generated: _Optional[int] = ..., round: _Optional[int] = ..., top_log_probs: _Optional[int] = ..., prompt_log_probs: bool = ..., grammar: _Optional[_Union[_tree_pb2.Grammar, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("opened", "commit")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    commit: Commit
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("max_tree_nodes", "commit", "target", "queue_seconds", "cached_tokens", "prompt_log_probs", "prompt_top_log_probs")
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    max_tree_nodes: int
    commit: Commit
    target: _tree_pb2.ModelInfo
    queue_seconds: float
    cached_tokens: int
    prompt_log_probs: _containers.RepeatedScalarFieldContainer[float]
    prompt_top_log_probs: _tree_pb2.TopLogProbs
    def __init__(self, max_tree_nodes: _Optional[int] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., target: _Optional[_Union[_tree_pb2.ModelInfo, _Mapping]] = ..., queue_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., prompt_log_probs: _Optional[_Iterable[float]] = ..., prompt_top_log_probs: _Optional[_Union[_tree_pb2.TopLogProbs, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("next_round", "base_length", "token_ids", "accepted_nodes", "acceptance", "timings", "finish_reason", "log_probs", "pass_statistics", "top_log_probs")
    NEXT_ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    PASS_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    next_round: int
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    acceptance: AcceptanceStatistics
    timings: VerifyTimings
    finish_reason: _tree_pb2.FinishReason
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    pass_statistics: PassStatistics
    top_log_probs: _tree_pb2.TopLogProbs
    def __init__(self, next_round: _Optional[int] = ..., base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., acceptance: _Optional[_Union[AcceptanceStatistics, _Mapping]] = ..., timings: _Optional[_Union[VerifyTimings, _Mapping]] = ..., finish_reason: _Optional[_Union[_tree_pb2.FinishReason, str]] = ..., log_probs: _Optional[_Iterable[float]] = ..., pass_statistics: _Optional[_Union[PassStatistics, _Mapping]] = ..., top_log_probs: _Optional[_Union[_tree_pb2.TopLogProbs, _Mapping]] = ...) -> None: ...

class PassStatistics(_message.Message):
    __slots__ = ("sessions", "rows", "row_price", "hold_seconds", "open_sessions", "kv_cache_usage")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    rows: int
    row_price: float
    hold_seconds: float
    open_sessions: int
    kv_cache_usage: float
    def __init__(self, sessions: _Optional[int] = ..., rows: _Optional[int] = ..., row_price: _Optional[float] = ..., hold_seconds: _Optional[float] = ..., open_sessions: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...

class AcceptanceStatistics(_message.Message):
    __slots__ = ("trimmed",)
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    trimmed: int
    def __init__(self, trimmed: _Optional[int] = ...) -> None: ...

class VerifyTimings(_message.Message):
    __slots__ = ("forward_seconds", "accept_seconds", "commit_seconds", "total_seconds", "attributed_seconds")
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    forward_seconds: float
    accept_seconds: float
    commit_seconds: float
    total_seconds: float
    attributed_seconds: float
    def __init__(self, forward_seconds: _Optional[float] = ..., accept_seconds: _Optional[float] = ..., commit_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., attributed_seconds: _Optional[float] = ...) -> None: ...
