"""Every way to stop a stream or to close a client early."""

import asyncio
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from dynatree.client import AsyncClient, Client, DynaTreeError, RequestCancelledError, ServerUnavailableError
from tests.support.fake_draft_service import (  # noqa: F401 - fixtures
    FakeDraftService,
    Hang,
    client_fixture,
    last,
    message,
    service_fixture,
)
from tests.support.paths import ROOT
from tests.support.processes import wait_until


def test_close_cancels_on_the_server(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    stream = client.stream("Once")
    assert next(stream).text == "Hé"
    stream.close()
    assert service.abandoned.wait(60)
    assert list(stream) == []
    assert stream.text == "Hé"


@pytest.mark.parametrize("managed", [True, False], ids=["with", "dropped"])
def test_leaving_the_loop_cancels_on_the_server(client: Client, service: FakeDraftService, managed: bool) -> None:
    service.script = [message("Hé", 1), Hang()]
    if managed:
        with client.stream("Once") as stream:
            next(stream)
    else:
        for _ in client.stream("Once"):
            break
    assert service.abandoned.wait(60)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_streams_that_are_left_early_take_no_memory(client: Client, service: FakeDraftService, how: str) -> None:
    """A call stays in its channel, with some 12 KB, until its last message is read."""
    service.script = [message("Hé", 1), Hang()]

    def leave(count: int) -> float:
        for _ in range(count):
            stream = client.stream("Once")
            next(stream)
            if how == "closed":
                stream.close()
            del stream
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    before = leave(300)
    assert leave(900) - before < 4.0  # MB


def test_a_client_that_is_closed_has_no_connection_whatever_was_lost(tmp_path: Path) -> None:
    """A call keeps its channel's connections until its last message is read."""
    path = tmp_path / "draft.sock"
    before = _sockets()
    with ThreadPoolExecutor(4) as pool, Client(f"unix:{path}", resume=False) as client:
        with silent_service(path) as output:
            client.model_info(timeout=60.0)
            waiting = [pool.submit(client.generate, "Once") for _ in range(4)]
            assert [output.readline() for _ in waiting] == ["called\n"] * 4
        assert {type(each.exception(60.0)) for each in waiting} == {ServerUnavailableError}
        with silent_service(path):
            wait_until(lambda: _is_known(client))
            client.close()
            wait_until(lambda: _sockets() <= before)


@contextmanager
def silent_service(path: Path) -> Iterator[IO[str]]:
    """A process that listens on a socket, reports calls and answers none; it is killed at the end."""
    command = [sys.executable, ROOT / "tests" / "support" / "fake_draft_service.py", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def _is_known(client: Client) -> bool:
    try:
        client.model_info(timeout=1.0)
    except DynaTreeError:
        return False
    return True


def _sockets() -> int:
    """Return the number of sockets of this process; other threads may close files while it counts."""
    count = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return count


def test_close_from_another_thread_ends_the_loop(client: Client, service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    stream = client.stream("Once")
    assert next(stream).text == "Hé"
    timer = threading.Timer(0.2, stream.close)
    timer.start()
    assert list(stream) == []
    timer.join()


@pytest.mark.long
def test_an_interrupt_anywhere_leaves_a_client_that_answers_and_closes(service: FakeDraftService) -> None:
    program = ROOT / "tests" / "support" / "interrupt_everywhere.py"
    result = subprocess.run([sys.executable, program, service.address], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 100


def test_closing_the_client_ends_its_streams_with_an_error(service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    client = Client(service.address)
    stream = client.stream("Once")
    next(stream)
    client.close()
    with pytest.raises(RequestCancelledError) as caught:
        next(stream)
    assert caught.value.text == "Hé"


def test_closing_the_async_client_ends_its_streams_with_an_error(service: FakeDraftService) -> None:
    async def run() -> None:
        client = AsyncClient(service.address)
        stream = client.stream("Once")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(RequestCancelledError) as caught:
            await waiting
        assert caught.value.text == "Hé"

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


@pytest.mark.parametrize("managed", [True, False], ids=["async with", "aclosing"])
def test_leaving_the_async_loop_cancels_on_the_server(service: FakeDraftService, managed: bool) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream = client.stream("Once")
            async with stream if managed else aclosing(stream):
                async for _ in stream:
                    break
            assert await asyncio.to_thread(service.abandoned.wait, 60)
            assert [chunk async for chunk in stream] == []
            assert stream.text == "Hé"

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_aclose_from_another_task_ends_the_loop(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream, texts, closing = client.stream("Once"), [], []
            async for chunk in stream:
                texts.append(chunk.text)
                closing.append(asyncio.ensure_future(stream.aclose()))
            assert texts == ["Hé"]
            await closing[0]

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_cancelling_the_task_cancels_on_the_server(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            task = asyncio.create_task(client.generate("Once"))
            await arrival(service)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(service.abandoned.wait, 60)

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


def test_a_timeout_of_one_chunk_cancels_on_the_server(service: FakeDraftService) -> None:
    """The program still has the stream."""

    async def run() -> None:
        async with AsyncClient(service.address) as client:
            stream = client.stream("Once")
            await anext(stream)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await anext(stream)
            assert await asyncio.to_thread(service.abandoned.wait, 60)
            assert stream.text == "Hé"

    service.script = [message("Hé", 1), Hang()]
    asyncio.run(run())


async def arrival(service: FakeDraftService) -> None:
    """Wait until a request has reached the service."""
    while not service.requests:
        await asyncio.sleep(0.01)


def test_asyncio_timeout_is_a_timeout(service: FakeDraftService) -> None:
    async def let_pass(limit: asyncio.Timeout) -> None:
        await arrival(service)
        limit.reschedule(0)

    async def generate(client: AsyncClient) -> None:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            group.create_task(let_pass(limit))
            await client.generate("Once")

    async def run() -> None:
        async with AsyncClient(service.address) as client:
            with pytest.raises(TimeoutError):
                await generate(client)

    service.script = [Hang()]
    asyncio.run(run())
    assert service.abandoned.wait(60)


def test_a_closed_client_says_so(service: FakeDraftService) -> None:
    async def run() -> None:
        async with AsyncClient(service.address) as client:
            pass
        await client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            await client.model_info()

    with Client(service.address) as client:
        pass
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("Once")
    asyncio.run(run())
