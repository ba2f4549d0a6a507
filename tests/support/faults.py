"""Faults in real processes: two verify services, two draft services, and a proxy on each connection between them.

The proxies see every message of a session, so that a fault happens exactly once, at a given place of one completion.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dynatree.client import Client, Completion
from dynatree.serving import healthcheck
from dynatree.v1 import verify_pb2
from tests.support.forked import Forked
from tests.support.grpc_proxy import VERIFY, GrpcProxy, ProxyLoop, forward_all

START_SECONDS = 60.0
DELAY_SECONDS = 0.3
QUEUED_SECONDS = 0.2  # time that a session is queued behind another one before a fault, and again after it
STREAM_ROUND = 2  # number of the request and the response of a stream at which faults happen; 0 opens the session

WHO = ("verify", "draft", "both", "network")
WHERE = ("open", "queue", "prefill", "tree sent", "answer lost", "between rounds", "last token")
HOW = {
    "verify": ("SIGKILL", "SIGSTOP", "SIGTERM"),
    "draft": ("SIGKILL", "SIGSTOP", "SIGTERM"),
    "both": ("SIGKILL", "SIGTERM"),
    "network": ("cut", "drop", "delay"),
}
# Places at which the fault also loses the message.
LOSES = ("open", "answer lost", "last token")
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 20, "maxItems": 30}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "gumbel": {"temperature": 0.8, "seed": 11},
    "residual": {"temperature": 0.8, "seed": 12, "scheme": "residual"},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {11: -4.0, 262: 3.0}},
    "stop strings": {"stop": ["the", "qqq"], "max_new_tokens": 80},
    "n = 2": {"temperature": 0.9, "seed": 13, "n": 2},
    "log-probabilities": {"top_log_probs": 3, "prompt_log_probs": True, "temperature": 0.6, "seed": 14},
    "grammar": {"json_schema": SCHEMA, "ignore_eos": False, "temperature": 0.8, "seed": 15, "top_log_probs": 2},
}
PROMPT = "It was a bright cold morning, and the captain"


@dataclass
class Process:
    """A service in its own process."""

    name: str
    arguments: list[str]
    address: str
    log: Path
    metrics: str | None = None
    ca: Path | None = None
    process: Forked | None = None
    ending: bool = False

    def start(self) -> None:
        """Start the process, without waiting until it serves."""
        arguments = [*self.arguments, "--listen", self.address, "--threads", "1", "--grace", "0.2"]
        if self.metrics:
            arguments += ["--metrics", self.metrics]
        self.process = Forked(arguments, self.log)

    def wait(self) -> None:
        """Wait until the service is healthy."""
        deadline = time.monotonic() + START_SECONDS
        credentials = None if self.ca is None else grpc.ssl_channel_credentials(self.ca.read_bytes())
        while (reason := healthcheck.failure(self.address, timeout=1.0, credentials=credentials)) is not None:
            assert time.monotonic() < deadline, f"{self.name}: {reason}\n{self.log.read_text()[-2000:]}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            self.ending = self.ending or number in (signal.SIGKILL, signal.SIGTERM)
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, number)

    def restore(self) -> None:
        """Resume the process if it was stopped, or restart it if it was ended, without waiting until it serves."""
        assert self.process is not None
        self.signal(signal.SIGCONT)
        if self.ending:
            self.process.wait(START_SECONDS)
            self.ending = False
            self.start()

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@dataclass
class Way:
    """The connection from a draft service to a verify service, through a proxy."""

    draft: Process
    verify: Process
    proxy: GrpcProxy
    dropping: bool = False


@dataclass
class Cluster:
    """Services and the connections between them; `client` has the addresses of all draft services."""

    verifies: list[Process]
    drafts: list[Process]
    ways: list[Way]
    client: Client
    loop: ProxyLoop

    def hold_session(self, verify: Process) -> Any:
        """Open a call that holds a session of a verify service until the call is cancelled."""

        def requests() -> Iterator[bytes]:
            opening = verify_pb2.OpenSession(prompt_ids=[5], max_new_tokens=3, draft=model)
            yield verify_pb2.VerifyRequest(open=opening).SerializeToString()
            over.wait(START_SECONDS)

        over = threading.Event()
        channel = grpc.insecure_channel(verify.address)
        asked = channel.unary_unary("/dynatree.v1.VerifyService/GetModelInfo")(b"")
        model = verify_pb2.VerifyServiceGetModelInfoResponse.FromString(asked).model
        call: Any = channel.stream_stream(VERIFY)(requests())
        call.add_callback(lambda: (over.set(), channel.close()))
        next(call)
        return call

    def restore(self) -> None:
        """Undo the fault: reset the proxies, and resume or restart the processes."""
        for way in self.ways:
            way.proxy.hook, way.dropping = forward_all, False
            self.loop.call(way.proxy.cut)
        for process in (*self.verifies, *self.drafts):
            process.restore()
        for process in (*self.verifies, *self.drafts):
            process.wait()


@dataclass
class Fault:
    """A fault of kind `how` that hits `who` at place `where` of the next completion; `at` is its time, None before."""

    who: str
    where: str
    how: str
    cluster: Cluster
    at: float | None = None
    _release: Callable[[], Any] = lambda: None

    def arm(self) -> None:
        """Install the proxies' hooks; "queue" needs verify services that take a single session."""
        held = [self.cluster.hold_session(verify) for verify in self.cluster.verifies] if self.where == "queue" else []
        self._release = lambda: [call.cancel() for call in held]
        for way in self.cluster.ways:
            way.proxy.hook = self._hook_of(way)

    def _hook_of(self, way: Way) -> Any:
        async def hook(method: str, is_request: bool, number: int, message: bytes) -> None:
            if way.dropping:
                await asyncio.Event().wait()
            if method != VERIFY or self.at is not None or not self._is_here(is_request, number, message):
                return
            self.at = time.monotonic()
            if self.where not in LOSES:
                loop = asyncio.get_running_loop()
                loop.call_later(QUEUED_SECONDS if self.where == "queue" else 0.005, self._strike, way)
                loop.call_later(2 * QUEUED_SECONDS, self._release)
                return
            self._strike(way)
            if self.how == "delay":
                await asyncio.sleep(DELAY_SECONDS)
            elif self.how != "SIGTERM":  # after SIGTERM, messages in transit still arrive
                await asyncio.Event().wait()

        return hook

    def _is_here(self, is_request: bool, number: int, message: bytes) -> bool:
        if self.where in ("open", "queue", "prefill"):
            return is_request and number == 0
        if self.where == "tree sent":
            return is_request and number == STREAM_ROUND
        if is_request:
            return False
        if self.where == "last token":
            response = verify_pb2.VerifyResponse.FromString(message)
            return bool(response.commit.finish_reason or response.opened.commit.finish_reason)
        return number == STREAM_ROUND

    def _strike(self, way: Way) -> None:
        suffering = {"verify": [way.verify], "draft": [way.draft], "both": [way.verify, way.draft]}.get(self.who, [])
        for process in suffering:
            process.signal(getattr(signal, self.how))
        if self.how in ("SIGKILL", "cut"):
            way.proxy.cut()
        way.dropping = self.how == "drop"


def free_address() -> str:
    """An address of this machine with a free port."""
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


@contextmanager
def running_cluster(
    folder: Path,
    *,
    replicas: int = 2,
    verify_arguments: Sequence[str] = (),
    draft_arguments: Sequence[str] = (),
    metrics: bool = False,
) -> Iterator[Cluster]:
    """Run `replicas` verify services and as many draft services of the embedded pair.

    They keep no history, so a repeated completion has as many rounds as the first.
    """
    loop = ProxyLoop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        verifies = [
            Process(
                f"verify {name}",
                ["verify", "--target-model", "embedded", *verify_arguments],
                f"unix:{folder}/verify-{name}.sock",
                folder / f"verify-{name}.log",
            )
            for name in "ab"[:replicas]
        ]
        drafts, ways = [], []
        for name in "12"[:replicas]:
            proxies = [
                stack.enter_context(loop.proxy(f"unix:{folder}/way-{name}-{number}.sock", verify.address))
                for number, verify in enumerate(verifies)
            ]
            addresses = ",".join(proxy.address for proxy in proxies)
            draft = Process(
                f"draft {name}",
                [
                    "draft",
                    "--draft-model",
                    "embedded",
                    "--verify",
                    addresses,
                    "--history-tokens",
                    "0",
                    *draft_arguments,
                ],
                f"unix:{folder}/draft-{name}.sock",
                folder / f"draft-{name}.log",
            )
            drafts.append(draft)
            ways += [Way(draft, verify, proxy) for verify, proxy in zip(verifies, proxies, strict=True)]
        for process in (*verifies, *drafts):
            process.metrics = free_address() if metrics else None
            stack.callback(process.end)
            process.start()
        for process in (*verifies, *drafts):
            process.wait()
        client = stack.enter_context(Client(",".join(draft.address for draft in drafts), timeout=60.0))
        yield Cluster(verifies, drafts, ways, client, loop)


def complete(client: Client, name: str) -> Completion:
    """Complete `PROMPT` with the options of that name in `OPTIONS`."""
    return client.generate(PROMPT, **({"max_new_tokens": 24, "ignore_eos": True} | OPTIONS[name]))


def outcome(completion: Completion) -> list[tuple[Any, ...]]:
    """The parts of a completion that must not depend on a fault."""
    return [
        (
            each.text,
            each.token_ids,
            each.finish_reason,
            each.log_probs,
            each.top_log_probs,
            each.prompt_ids,
            each.prompt_log_probs,
            each.prompt_top_log_probs,
        )
        for each in (completion, *completion.alternatives)
    ]


def combinations() -> list[tuple[str, str, str, str]]:
    """Every meaningful combination of who, where, how and options."""
    return [
        (who, where, how, name)
        for who in WHO
        for where in WHERE
        for how in HOW[who]
        for name in OPTIONS
        if (where, name) != ("last token", "stop strings")  # the target does not see stop strings
    ]
