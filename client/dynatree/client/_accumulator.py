"""The common part of the synchronous and the asynchronous stream: everything but the waiting."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import grpc

from dynatree.client._attempts import Attempts
from dynatree.client._completion import FINISH_REASONS, Chunk, Completion
from dynatree.client._errors import (
    DynaTreeError,
    RequestCancelledError,
    ServerError,
    code_of,
    error_from_rpc,
    is_quota,
    retry_after,
)
from dynatree.client._tokens import PromptTokens, top_log_probs_from_pb
from dynatree.client._tracing import RequestSpan
from dynatree.v1 import draft_pb2


class Accumulator:
    """The results of a stream so far. Invariant: for each completion, these are the chunks that the stream returned."""

    def __init__(self, address: str, request: draft_pb2.GenerateRequest, attempts: Attempts) -> None:
        self._address = address
        self._request = request
        self._attempts = attempts
        self._n = max(1, request.n)  # expected completions; the server refuses 0
        # By the completion's index.
        self._chunks: defaultdict[int, list[Chunk]] = defaultdict(list)
        self._last: dict[int, draft_pb2.Completion] = {}
        self._started: dict[int, draft_pb2.Started] = {}
        self._resumed: defaultdict[int, list[float]] = defaultdict(list)  # seconds from each loss to the next message
        self._prompt = PromptTokens(tuple(request.token_ids.ids))
        self._completion: Completion | None = None
        self._span = RequestSpan()
        self._ended = False

    @property
    def text(self) -> str:
        """The text received so far; if n > 1, the texts of the completions one after the other."""
        return "".join(chunk.text for chunk in self._received())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far; if n > 1, the tokens of the completions one after the other."""
        return tuple(token_id for chunk in self._received() for token_id in chunk.token_ids)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's tokens. If the prompt is a text or a chat, they are empty until the first chunk arrives."""
        return self._prompt.token_ids

    @property
    def prompt_log_probs(self) -> tuple[float, ...]:
        """The log-probability of each of `prompt_ids` from the second on.

        Empty until the first chunk arrives, and unless `prompt_log_probs` was requested.
        """
        return self._prompt.log_probs

    @property
    def prompt_top_log_probs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each of `prompt_ids` from the second on, the likeliest tokens at its position, as (token_id, log_prob).

        Empty until the first chunk arrives, and unless both `prompt_log_probs` and `top_log_probs` were requested.
        """
        return self._prompt.top_log_probs

    @property
    def prompt_text(self) -> str:
        """The prompt's text as it was sent, or decoded from its token ids or its chat, including special tokens.

        Empty until the first chunk arrives, and unless `prompt_text` was requested.
        """
        return self._prompt.text

    @property
    def prompt_text_offsets(self) -> tuple[int, ...]:
        """The offset of each of `prompt_ids` in `prompt_text`, in characters; empty whenever `prompt_text` is."""
        return self._prompt.text_offsets

    @property
    def completion(self) -> Completion:
        """The whole completion, once the stream is exhausted; if n > 1, the first one, with its `alternatives`.

        Raises:
            RuntimeError: the stream has not been read to its end.
        """
        if self._completion is None:
            raise RuntimeError("the stream has not been read to its end, so there is no completion yet")
        return self._completion

    def _received(self) -> Iterator[Chunk]:
        for chunks in list(self._chunks.values()):
            yield from chunks

    def _add(self, response: draft_pb2.GenerateResponse) -> Chunk | None:
        """Store one message, and return its chunk; None if it adds nothing."""
        if response.index >= self._n:
            raise self._wrong(f"completion {response.index} was not requested")
        if not response.HasField("queue_position"):  # a message about the queue is not progress
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
        """Store the first message of a completion; the first message of the request also describes the prompt."""
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
        """Assemble the completion after the server ended the stream without an error."""
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
        """Whether all completions have arrived, whatever the status of the call."""
        return len(self._last) == self._n

    def _pause(self, error: grpc.RpcError) -> float | None:
        """Return the seconds to wait before the request is sent again after a failed attempt; None to give up."""
        if self._chunks and not self._started:
            return None  # the server is too old to resume requests
        code = code_of(error)
        pause = self._attempts.after(code, retry_after(error), quota=is_quota(error))
        if pause is not None:
            self._span.resumed(code.name)
        return pause

    def _remaining(self) -> draft_pb2.GenerateRequest:
        """Build the request that asks another server for the rest."""
        rest = draft_pb2.GenerateRequest()
        rest.CopyFrom(self._request)
        if not self._started:
            return rest
        rest.prompt_log_probs = rest.prompt_text = False  # already received
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
        if mine.max_new_tokens:  # keep the original end, also where the other server's context is longer
            rest.max_new_tokens = mine.max_new_tokens
        rest.resume.target_fingerprint = mine.target_fingerprint
        rest.resume.round = max((chunk.trace.round + 1 for chunk in chunks if chunk.trace), default=0)
        return rest

    def _failed(self, error: grpc.RpcError) -> DynaTreeError:
        """End the stream, and return the error of a failed RPC."""
        self._ended = True
        self._span.end(len(self.token_ids), error.code().name)
        return error_from_rpc(error, self._address, text=self.text, token_ids=self.token_ids)

    def _wrong(self, details: str) -> ServerError:
        """End the stream, and return the error of a violated protocol."""
        self._ended = True
        self._span.end(len(self.token_ids), "UNKNOWN")
        return ServerError(grpc.StatusCode.UNKNOWN, details, text=self.text, token_ids=self.token_ids)

    def _client_closed(self) -> DynaTreeError:
        """End the stream, and return the error of a client that was closed meanwhile."""
        self._ended = True
        self._span.end(len(self.token_ids), "CANCELLED")
        details = "the client was closed"
        return RequestCancelledError(grpc.StatusCode.CANCELLED, details, text=self.text, token_ids=self.token_ids)
