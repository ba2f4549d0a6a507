"""What both kinds of stream have in common: all but the waiting."""

import grpc

from dynatree.client._errors import DynaTreeError, RequestCancelledError, ServerError, error_from_rpc
from dynatree.client._types import Chunk, Completion
from dynatree.v1 import draft_pb2


class Accumulator:
    """What one stream has delivered so far. Invariant: it is the concatenation of the chunks that were returned."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._last: draft_pb2.Completion | None = None
        self._completion: Completion | None = None
        self._ended = False

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(self._text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far."""
        return tuple(self._token_ids)

    @property
    def completion(self) -> Completion:
        """The whole completion, once the stream is exhausted.

        Raises:
            RuntimeError: the stream was not read to its end.
        """
        if self._completion is None:
            raise RuntimeError("the stream has not been read to its end: there is no completion")
        return self._completion

    def _add(self, response: draft_pb2.GenerateResponse) -> Chunk | None:
        """Keep one message; its chunk, or None where it adds nothing."""
        chunk = Chunk.from_pb(response)
        self._text.append(chunk.text)
        self._token_ids.extend(chunk.token_ids)
        if response.HasField("completion"):
            self._last = response.completion
        return chunk if chunk.text or chunk.token_ids else None

    def _finish(self) -> None:
        """The server has ended the stream without an error."""
        self._ended = True
        if self._last is None:
            details = "the stream ended without a completion"
            raise ServerError(grpc.StatusCode.UNKNOWN, details, text=self.text, token_ids=self.token_ids)
        self._completion = Completion.from_pb(self._last, text=self.text, token_ids=self.token_ids)

    def _failed(self, error: grpc.RpcError) -> DynaTreeError:
        """The RPC has failed."""
        self._ended = True
        return error_from_rpc(error, self._address, text=self.text, token_ids=self.token_ids)

    def _client_closed(self) -> DynaTreeError:
        """The client was closed under the stream."""
        self._ended = True
        details = "the client was closed"
        return RequestCancelledError(grpc.StatusCode.CANCELLED, details, text=self.text, token_ids=self.token_ids)
