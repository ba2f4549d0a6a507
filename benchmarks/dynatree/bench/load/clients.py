"""Put a load on a draft service: requests from one event loop, timed at the client."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynatree.bench.decoding import Arrival, Output, Prompt, options_of
from dynatree.bench.load.loads import ClosedLoop, Load, OpenLoop, prompt_number
from dynatree.bench.methods import Case
from dynatree.bench.runs import RunSettings
from dynatree.client import AsyncClient, DynaTreeError
from dynatree.common.seeds import derived_seed


@dataclass(frozen=True)
class Reply:
    """The result of a request and its timing.

    `start` is the time at which the request was due, in seconds since the load began; `seconds` and an output's times
    count from then. `client` is None in an open loop.
    """

    prompt: int
    client: int | None
    start: float
    seconds: float
    result: Output | DynaTreeError


@dataclass(frozen=True)
class Service:
    """The address of a draft service, and the prompts to send to it."""

    address: str
    prompts: Sequence[Prompt]


async def drive(service: Service, case: Case, load: Load, repetition: int, settings: RunSettings) -> list[Reply]:
    """Make a load's requests; return their replies in the order in which they ended.

    Each load has its own principal, so that no earlier load has left a prompt in the prefix cache.

    Raises:
        DynaTreeError: No service answers at the address.
    """
    async with AsyncClient(service.address, principal=f"bench-load-{secrets.token_hex(8)}") as client:
        await client.model_info()  # establish the connection before the clock starts
        requests = _Requests(client, service.prompts, case, load, repetition, settings)
        if isinstance(load, ClosedLoop):
            await _closed(requests, load)
        else:
            await _open(requests, load, derived_seed(settings.seed, repetition))
        return requests.replies


async def _closed(requests: _Requests, load: ClosedLoop) -> None:
    async def client(number: int) -> None:
        for turn in range(load.rounds):
            await requests.make(turn * load.clients + number, number, requests.clock())

    async with asyncio.TaskGroup() as clients:
        for number in range(load.clients):
            clients.create_task(client(number))


async def _open(requests: _Requests, load: OpenLoop, seed: int) -> None:
    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(load.arrivals(seed)):
            await asyncio.sleep(due - requests.clock())
            group.create_task(requests.make(number, None, due))


@dataclass(frozen=True)
class _Requests:
    """The requests of one load."""

    client: AsyncClient
    prompts: Sequence[Prompt]
    case: Case
    load: Load
    repetition: int
    settings: RunSettings
    replies: list[Reply] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def clock(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self.began

    async def make(self, request: int, client: int | None, due: float) -> None:
        """Send a request and keep its reply; if it is sent late, the delay counts as waiting."""
        prompt = prompt_number(self.load, self.repetition, request, len(self.prompts))
        result: Output | DynaTreeError
        try:
            result = await self._complete(prompt, due)
        except DynaTreeError as error:
            result = error
        self.replies.append(Reply(prompt, client, due, self.clock() - due, result))

    async def _complete(self, prompt: int, due: float) -> Output:
        arrivals: list[Arrival] = []
        tokens = 0
        options = options_of(self.case, self.settings.max_new_tokens, self.settings.seed_of(prompt))
        async with self.client.stream(self.prompts[prompt], **options) as stream:
            async for chunk in stream:
                if chunk.token_ids:
                    tokens += len(chunk.token_ids)
                    arrivals.append((tokens, self.clock() - due))
        seconds = self.clock() - due
        return Output(stream.completion.token_ids, tuple(arrivals), seconds, stream.completion.stats)
