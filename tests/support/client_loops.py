"""Uses of `AsyncClient` that leave event loops behind: `python tests/support/client_loops.py NAME ADDRESS`.

The address is that of a draft service that sends a message and then hangs. Any output means that a test failed.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from dynatree.client import AsyncClient, AsyncCompletionStream

LOOPS = 5
address = ""
left: list[object] = []  # objects kept alive until the process ends


class MidStreamError(Exception):
    """A failure of the user's own code."""


async def begun(client: AsyncClient) -> AsyncCompletionStream:
    """A stream whose first chunk has arrived and whose second never does."""
    stream = client.stream("Once")
    assert (await anext(stream)).text == "a"
    return stream


def in_loops(use: Callable[[], object]) -> None:
    for _ in range(LOOPS):
        use()


async def closed() -> None:
    async with AsyncClient(address) as client:
        assert (await client.model_info()).target.name
        async with await begun(client):
            pass


async def unclosed() -> None:
    client = AsyncClient(address)
    assert (await client.model_info()).target.name
    await begun(client)


async def fails(client: AsyncClient) -> None:
    async for _ in client.stream("Once"):
        raise MidStreamError


async def fails_in_a_client() -> None:
    async with AsyncClient(address) as client:
        await fails(client)


async def fails_without_closing() -> None:
    await fails(AsyncClient(address))


async def cancelled() -> None:
    async with AsyncClient(address) as client, await begun(client) as stream:
        left.append(asyncio.gather(anext(stream), client.generate("Once"), return_exceptions=True))
        await asyncio.sleep(0)
        raise MidStreamError


def run(main: Callable[[], object]) -> None:
    with suppress(MidStreamError):
        asyncio.run(main())  # type: ignore[arg-type]


def closed_loop_under_a_waiting_task() -> None:
    """Close an event loop under a waiting task, without the clean-up of `asyncio.run`."""
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begun(AsyncClient(address)))
    waiting = loop.create_task(stream.__anext__())
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would rightly warn about this task
    loop.close()
    del stream, waiting
    gc.collect()


def one_client() -> None:
    """Use one client in several loops, one after the other and at the same time."""
    client = AsyncClient(address)

    async def use() -> None:
        assert (await client.model_info()).target.name
        await begun(client)

    in_loops(lambda: run(use))
    in_threads(use)
    asyncio.run(client.close())


def in_threads(main: Callable[[], object]) -> None:
    threads = [threading.Thread(target=in_loops, args=[lambda: run(main)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_at_the_end() -> None:
    """End the process with an open client and a stream that is being read."""

    async def use() -> None:
        client = AsyncClient(address)
        left.extend([client, await begun(client)])

    asyncio.run(use())


USES: dict[str, Callable[[], object]] = {
    "closed": lambda: in_loops(lambda: run(closed)),
    "unclosed": lambda: in_loops(lambda: run(unclosed)),
    "fails in a client": lambda: in_loops(lambda: run(fails_in_a_client)),
    "fails without closing": lambda: in_loops(lambda: run(fails_without_closing)),
    "cancelled": lambda: in_loops(lambda: run(cancelled)),
    "threads": lambda: in_threads(fails_in_a_client),
    "threads, unclosed": lambda: in_threads(unclosed),
    "a closed loop under a waiting task": closed_loop_under_a_waiting_task,
    "one client": one_client,
    "open at the end": open_at_the_end,
}

if __name__ == "__main__":
    address = sys.argv[2]
    USES[sys.argv[1]]()
