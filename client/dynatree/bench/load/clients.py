"""A load on a draft service: its requests in one event loop, timed where they are made."""

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
    """What became of a request, after so many seconds.

    `start` is when it was due, in seconds since the load began; `seconds` and an output's times are since then.
    `client` is None in an open loop.
    """

    prompt: int
    client: int | None
    start: float
    seconds: float
    result: Output | DynaTreeError


@dataclass(frozen=True)
class Service:
    """A draft service by its address, and the prompts that it gets."""

    address: str
    prompts: Sequence[Prompt]


async def drive(service: Service, case: Case, load: Load, repetition: int, settings: RunSettings) -> list[Reply]:
    """Make a load's requests; their replies, in the order in which they ended.

    Each load has a principal of its own, so that no prompt was cached for it by a load before.

    Raises:
        DynaTreeError: Nobody answers at the address.
    """
    async with AsyncClient(service.address, principal=f"bench-load-{secrets.token_hex(8)}") as client:
        await client.model_info()  # the connection stands before the clock starts
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
        """Send one, and keep its reply. A request that is sent late was waiting already."""
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
