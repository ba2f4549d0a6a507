"""The client library of DynaTree; it needs only grpcio and protobuf.

    from dynatree.client import Client

    with Client("localhost:50051") as client:
        completion = client.generate("Once upon a time", max_new_tokens=64)
        print(completion.text, completion.finish_reason, completion.stats.acceptance_rate)
        for chunk in client.stream("Once upon a time", max_new_tokens=64):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods, for `await` and `async for`. All errors form one hierarchy:

    DynaTreeError
    ├── InvalidRequestError      change the request
    │   ├── ContextLengthError   the request does not fit the target's context
    │   └── GrammarError         the completion cannot follow the schema or grammar
    ├── AuthenticationError      show another token or certificate
    ├── ModelMismatchError       the draft and the target cannot work together
    ├── ServerBusyError          try again later
    ├── ServerUnavailableError   no server answers at the address
    ├── DeadlineExceededError    `timeout` has passed
    ├── RequestCancelledError    the server cancelled the request, or the client was closed
    └── ServerError              any other failure
"""

from dynatree.client._async_client import AsyncClient, AsyncCompletionStream
from dynatree.client._base import ClientSettings
from dynatree.client._client import Client, CompletionStream
from dynatree.client._completion import Chunk, Completion, FinishReason, RoundTrace
from dynatree.client._errors import (
    AuthenticationError,
    ContextLengthError,
    DeadlineExceededError,
    DynaTreeError,
    GrammarError,
    InvalidRequestError,
    ModelMismatchError,
    RequestCancelledError,
    ServerBusyError,
    ServerError,
    ServerUnavailableError,
)
from dynatree.client._request import GenerateOptions, Message, PolicySettings, Prompt, SamplingScheme
from dynatree.client._service_info import ModelInfo, ServiceInfo
from dynatree.client._statistics import RoundPart, Statistics
from dynatree.client._tokens import Tokens

__all__ = [
    "AsyncClient",
    "AsyncCompletionStream",
    "AuthenticationError",
    "Chunk",
    "Client",
    "ClientSettings",
    "Completion",
    "CompletionStream",
    "ContextLengthError",
    "DeadlineExceededError",
    "DynaTreeError",
    "FinishReason",
    "GenerateOptions",
    "GrammarError",
    "InvalidRequestError",
    "Message",
    "ModelInfo",
    "ModelMismatchError",
    "PolicySettings",
    "Prompt",
    "RequestCancelledError",
    "RoundPart",
    "RoundTrace",
    "SamplingScheme",
    "ServerBusyError",
    "ServerError",
    "ServerUnavailableError",
    "ServiceInfo",
    "Statistics",
    "Tokens",
]
