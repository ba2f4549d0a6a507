"""A draft service without models that plays a script, for tests of clients and gateways, with their fixtures.

A test module imports the fixtures that it uses by their functions' names, such as `service_fixture`.
"""

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from dynatree.client import AsyncClient, Client, Completion
from dynatree.v1 import draft_pb2, draft_pb2_grpc, tree_pb2


@dataclass(frozen=True)
class Fail:
    """A step that ends the RPC with an error."""

    code: grpc.StatusCode
    details: str = "as scripted"
    trailing: tuple[tuple[str, str], ...] = ()


class Hang:
    """A step that waits until the client or the deadline ends the RPC, longer than a test waits for that."""

    seconds = 200.0


def message(text: str, *token_ids: int, index: int = 0, log_probs: Sequence[float] = ()) -> draft_pb2.GenerateResponse:
    return draft_pb2.GenerateResponse(text=text, token_ids=token_ids, index=index, log_probs=log_probs)


def likeliest(*places: dict[int, float]) -> tree_pb2.TopLogProbs:
    """The likeliest tokens at some places, each with its log-probability."""
    return tree_pb2.TopLogProbs(
        token_ids=[token for place in places for token in place],
        log_probs=[log_prob for place in places for log_prob in place.values()],
    )


def scored() -> list[draft_pb2.GenerateResponse]:
    """Two messages of a completion with log-probabilities of its tokens and, in the first, of the prompt's tokens."""
    started = draft_pb2.Started(
        prompt_ids=[7, 8, 9],
        prompt_log_probs=[-0.25, -4.0],
        prompt_top_log_probs=likeliest({8: -0.25, 5: -2.0}, {6: -0.5, 8: -1.0}),
        prompt_text="Oh, he",
        prompt_text_offsets=[0, 2, 3],
    )
    first = message("Hé", 1, 2, log_probs=[-0.5, -1.5])
    first.started.CopyFrom(started)
    first.top_log_probs.CopyFrom(likeliest({1: -0.5, 4: -1.0}, {3: -1.0, 2: -1.5}))
    first.text_offsets[:] = [0, 1]
    second = message("llo", 3, log_probs=[-2.0])
    second.top_log_probs.CopyFrom(likeliest({4: -0.5, 6: -1.0}))
    second.text_offsets[:] = [2]
    return [first, second]


def traced(round_: int, index: int = 0) -> draft_pb2.GenerateResponse:
    """The trace of a round whose tree has one branch; no two of its fields are equal."""
    trace = draft_pb2.RoundTrace(
        round=round_,
        base_length=14,
        token_ids=[21, 22, 23],
        parents=[-1, 0, -1],
        probabilities=[0.5, 0.25, 0.125],
        texts=["a", "é", "�"],
        accepted_nodes=[0, 1],
        committed_ids=[21, 22, 29],
        committed_texts=["a", "é", "c"],
        parameters={"depth": 4.0, "threshold": 0.375},
        draft_seconds=0.75,
        verify_seconds=1.5,
    )
    return draft_pb2.GenerateResponse(trace=trace, index=index)


def last(reason: int = tree_pb2.FINISH_REASON_LENGTH, index: int = 0) -> draft_pb2.GenerateResponse:
    statistics = draft_pb2.GenerationStatistics(
        generated_tokens=3,
        rounds=2,
        draft_n=8,
        draft_n_accepted=2,
        acceptance_rate=0.25,
        tokens_per_round=1.0,
        mean_path_length=1.0,
        nodes_per_round=4.0,
        acceptance_by_depth=[0.5, 0.25],
        time_to_first_token_seconds=0.5,
        time_per_output_token_seconds=0.125,
        total_seconds=0.75,
        round_parts=[draft_pb2.RoundPart(name="wire", total_seconds=0.5, p50_seconds=0.25)],
        seed=2**64 - 1,
        committed_per_level=1.5,
        draft_seconds=0.375,
        wire_seconds=0.0625,
        verify_seconds=0.3125,
    )
    completion = draft_pb2.Completion(finish_reason=reason, prompt_tokens=4, statistics=statistics)
    return draft_pb2.GenerateResponse(completion=completion, index=index)


Step = draft_pb2.GenerateResponse | Fail | Hang


@dataclass
class FakeDraftService(draft_pb2_grpc.DraftServiceServicer):
    """Plays `script` for every request, and keeps the requests.

    `ended` is set when an RPC ends, and `abandoned` when an RPC with a `Hang` ends.
    """

    address: str
    script: list[Step] = field(default_factory=lambda: [message("Hé", 1), message("", 2), message("llo", 3), last()])
    requests: list[draft_pb2.GenerateRequest] = field(default_factory=list)
    info_failure: Fail | None = None
    chat_template: bool = True
    ended: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)

    def Generate(  # noqa: N802
        self, request: draft_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.GenerateResponse]:
        ended = threading.Event()
        context.add_callback(ended.set)
        context.add_callback(self.ended.set)
        if any(isinstance(step, Hang) for step in self.script):
            # Setting the event after the wait would fail: gRPC does not resume a generator whose RPC has ended.
            context.add_callback(self.abandoned.set)
        self.requests.append(request)
        for step in self.script:
            if isinstance(step, Fail):
                context.set_trailing_metadata(step.trailing)
                context.abort(step.code, step.details)
            elif isinstance(step, Hang):
                ended.wait(Hang.seconds)
            else:
                yield step

    def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: grpc.ServicerContext
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        if self.info_failure:
            context.abort(self.info_failure.code, self.info_failure.details)
        return draft_pb2.DraftServiceGetModelInfoResponse(
            draft=tree_pb2.ModelInfo(name="small", parameters=7, context_length=64),
            target=tree_pb2.ModelInfo(name="large", architecture="GPTNeoXForCausalLM", vocab_size=50_304),
            policies=["dynatree", "linear"],
            chat_template=self.chat_template,
        )


@contextmanager
def serving(folder: Path, name: str = "draft.sock") -> Iterator[FakeDraftService]:
    """Serve the fake service on a unix socket in `folder`."""
    service = FakeDraftService(address=f"unix:{folder}/{name}")
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server)
    server.add_insecure_port(service.address)
    server.start()
    try:
        yield service
    finally:
        server.stop(grace=None).wait()


@pytest.fixture(name="service")
def service_fixture(tmp_path: Path) -> Iterator[FakeDraftService]:
    with serving(tmp_path) as service:
        yield service


@pytest.fixture(name="client")
def client_fixture(service: FakeDraftService) -> Iterator[Client]:
    with Client(service.address) as client:
        yield client


def generate_async(service: FakeDraftService, **options: Any) -> Completion:
    async def run() -> Completion:
        async with AsyncClient(service.address) as client:
            return await client.generate("Once", **options)

    return asyncio.run(run())


if __name__ == "__main__":  # serve at a socket: print a line for each call, answer none, and run until killed
    with serving(Path(sys.argv[1]).parent, Path(sys.argv[1]).name) as silent:
        silent.script = [Hang()]
        for told in itertools.count():
            while len(silent.requests) <= told:
                time.sleep(0.01)
            print("called", flush=True)
