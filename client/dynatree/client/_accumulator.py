"""What both kinds of stream have in common: all but the waiting."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import grpc

from dynatree.client._attempts import Attempts
from dynatree.client._errors import (
    DynaTreeError,
    RequestCancelledError,
    ServerError,
    code_of,
    error_from_rpc,
    is_quota,
    retry_after,
)
from dynatree.client._tracing import RequestSpan
from dynatree.client._types import FINISH_REASONS, Chunk, Completion, PromptTokens, top_log_probs_from_pb
from dynatree.v1 import draft_pb2


class Accumulator:
    """What one stream has delivered so far. Invariant: completion by completion, these are the chunks it returned."""

    def __init__(self, address: str, request: draft_pb2.GenerateRequest, attempts: Attempts) -> None:
        self._address = address
        self._request = request
        self._attempts = attempts
        self._n = max(1, request.n)  # completions to come; 0 is the server's to refuse
        self._chunks: defaultdict[int, list[Chunk]] = defaultdict(list)  # by the completion's index
        self._last: dict[int, draft_pb2.Completion] = {}  # likewise
        self._started: dict[int, draft_pb2.Started] = {}  # likewise
        self._resumed: defaultdict[int, list[float]] = defaultdict(list)  # likewise: seconds from loss to next message
        self._prompt = PromptTokens(tuple(request.token_ids.ids))
        self._completion: Completion | None = None
        self._span = RequestSpan()
        self._ended = False

    @property
    def text(self) -> str:
        """The text received so far; of several completions, one after the other."""
        return "".join(chunk.text for chunk in self._received())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far; of several completions, one after the other."""
        return tuple(token_id for chunk in self._received() for token_id in chunk.token_ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens; of a text they are known once the first chunk has come, and empty before."""
        return self._prompt.token_ids

    @property
    def prompt_log_probs(self) -> tuple[float, ...]:
        """The log-probability of each of `prompt_ids` from the second on, known once the first chunk has come.

        Empty before, and unless `prompt_log_probs` was asked for.
        """
        return self._prompt.log_probs

    @property
    def prompt_top_log_probs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each of `prompt_ids` from the second on the likeliest tokens in its place, as (token_id, log_prob).

        Known once the first chunk has come. Empty before, and unless `prompt_log_probs` and `top_log_probs` were asked
        for.
        """
        return self._prompt.top_log_probs

    @property
    def prompt_text(self) -> str:
        """The prompt's text as it was sent, or what its token ids or its chat decode to, special tokens included.

        Known once the first chunk has come. Empty before, and unless `prompt_text` was asked for.
        """
        return self._prompt.text

    @property
    def prompt_text_offsets(self) -> tuple[int, ...]:
        """Where each of `prompt_ids` begins in `prompt_text`, in characters; known and empty as that is."""
        return self._prompt.text_offsets

    @property
    def completion(self) -> Completion:
        """The whole completion, once the stream is exhausted; of several, the first, with its `alternatives`.

        Raises:
            RuntimeError: the stream was not read to its end.
        """
        if self._completion is None:
            raise RuntimeError("the stream has not been read to its end: there is no completion")
        return self._completion

    def _received(self) -> Iterator[Chunk]:
        for chunks in list(self._chunks.values()):
            yield from chunks

    def _add(self, response: draft_pb2.GenerateResponse) -> Chunk | None:
        """Keep one message; its chunk, or None where it adds nothing."""
        if response.index >= self._n:
            raise self._wrong(f"completion {response.index} was not asked for")
        if not response.HasField("queue_position"):  # to be told of a place is no progress
            lost = self._attempts.received()
            if lost is not None:
                self._resumed[response.index].append(lost)
        if response.HasField("completion"):
            self._last[response.index] = response.completion
        if response.HasField("started"):
            self._start_of(response.index, response.started)
        chunk = Chunk.from_pb(response)
        if chunk.queue_position is not None:
            return chunk
        if not (chunk.text or chunk.token_ids or chunk.trace):
            return None
        self._chunks[chunk.index].append(chunk)
        return chunk

    def _start_of(self, index: int, started: draft_pb2.Started) -> None:
        """Keep what the first message of a completion says; the request's first message tells of the prompt."""
        if not self._started:
            self._prompt = PromptTokens(
                tuple(started.prompt_ids) or self._prompt.token_ids,
                tuple(started.prompt_log_probs),
                top_log_probs_from_pb(started.prompt_top_log_probs, len(started.prompt_log_probs)),
                started.prompt_text,
                tuple(started.prompt_text_offsets),
            )
        self._started.setdefault(index, started)

    def _finish(self) -> None:
        """The server has ended the stream without an error."""
        self._ended = True
        if len(self._last) < self._n:
            raise self._wrong(f"the stream ended with {len(self._last)} of {self._n} completions")
        first, *others = [self._whole(index) for index in range(self._n)]
        self._span.end(len(self.token_ids))
        self._completion = replace(first, alternatives=tuple(others))

    def _whole(self, index: int) -> Completion:
        last = self._last[index]
        if last.finish_reason not in FINISH_REASONS:
            raise self._wrong(f"unknown finish reason {last.finish_reason}")
        last.statistics.resumes += len(self._resumed[index])
        last.statistics.resume_seconds += sum(self._resumed[index])
        prompt = self._prompt if index == 0 else PromptTokens(self._prompt.token_ids)
        return Completion.from_pb(last, index=index, chunks=self._chunks[index], prompt=prompt)

    @property
    def _is_whole(self) -> bool:
        """Whether everything has come, whatever the status of the call."""
        return len(self._last) == self._n

    def _pause(self, error: grpc.RpcError) -> float | None:
        """Seconds until the request is sent anew, after an attempt that failed; None where it has failed."""
        if self._chunks and not self._started:
            return None  # the server is older than resuming
        code = code_of(error)
        pause = self._attempts.after(code, retry_after(error), quota=is_quota(error))
        if pause is not None:
            self._span.resumed(code.name)
        return pause

    def _remaining(self) -> draft_pb2.GenerateRequest:
        """The request for what was not received, as another server gets it."""
        rest = draft_pb2.GenerateRequest()
        rest.CopyFrom(self._request)
        if not self._started:
            return rest
        rest.prompt_log_probs = rest.prompt_text = False  # they came with it
        started = next(iter(self._started.values()))
        if started.prompt_ids:
            rest.token_ids.ids[:] = started.prompt_ids
        if rest.sampling.temperature > 0:
            rest.sampling.seed = started.seed
        chunks = self._chunks.get(len(self._last), [])
        rest.resume.index = len(self._last)
        rest.resume.token_ids[:] = [token_id for chunk in chunks for token_id in chunk.token_ids]
        rest.resume.characters = sum(len(chunk.text) for chunk in chunks)
        mine = self._started.get(len(self._last), started)
        if mine.max_new_tokens:  # it ends where it would have ended, however long the context is elsewhere
            rest.max_new_tokens = mine.max_new_tokens
        rest.resume.target_fingerprint = mine.target_fingerprint
        rest.resume.round = max((chunk.trace.round + 1 for chunk in chunks if chunk.trace), default=0)
        return rest

    def _failed(self, error: grpc.RpcError) -> DynaTreeError:
        """The RPC has failed."""
        self._ended = True
        self._span.end(len(self.token_ids), error.code().name)
        return error_from_rpc(error, self._address, text=self.text, token_ids=self.token_ids)

    def _wrong(self, details: str) -> ServerError:
        """The server has not kept to the protocol."""
        self._ended = True
        self._span.end(len(self.token_ids), "UNKNOWN")
        return ServerError(grpc.StatusCode.UNKNOWN, details, text=self.text, token_ids=self.token_ids)

    def _client_closed(self) -> DynaTreeError:
        """The client was closed under the stream."""
        self._ended = True
        self._span.end(len(self.token_ids), "CANCELLED")
        details = "the client was closed"
        return RequestCancelledError(grpc.StatusCode.CANCELLED, details, text=self.text, token_ids=self.token_ids)
