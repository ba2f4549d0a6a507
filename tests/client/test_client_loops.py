"""Tests that `AsyncClient` in several event loops of one process prints nothing on stderr, however the loops end."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator

import pytest

from dynatree.client._grpc_loop import AHEAD, FromGrpcLoop
from tests.support import client_loops
from tests.support.fake_draft_service import FakeDraftService, Hang, message, service_fixture  # noqa: F401


@pytest.mark.parametrize("name", client_loops.USES)
def test_event_loops_leave_nothing_behind(service: FakeDraftService, name: str) -> None:
    service.script = [message("a", 1), Hang()]

    done = subprocess.run(
        [sys.executable, "-W", "default", client_loops.__file__, name, service.address],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Numbers:
    """Yields 0, then 1, 2, ... once `go` is set, on gRPC's loop; counts the numbers that were requested."""

    def __init__(self) -> None:
        self.asked = 0
        self.go, self.ended = threading.Event(), threading.Event()

    async def __call__(self) -> AsyncGenerator[int]:
        try:
            while True:
                self.asked += 1
                yield self.asked - 1
                await asyncio.to_thread(self.go.wait, 5)
        finally:
            self.ended.set()


def test_a_slow_reader_is_not_overrun() -> None:
    async def run() -> None:
        numbers = Numbers()
        numbers.go.set()
        read = FromGrpcLoop(numbers)
        for expected in range(3 * AHEAD):
            assert await anext(read) == expected
            assert numbers.asked <= expected + 1 + AHEAD + 1
        read.cancel()
        assert await asyncio.to_thread(numbers.ended.wait, 5)
        with pytest.raises(asyncio.CancelledError):
            async for _ in read:
                pass

    asyncio.run(run())


def test_what_nobody_can_read_any_more_ends() -> None:
    numbers = Numbers()

    async def begin() -> None:
        assert await anext(FromGrpcLoop(numbers)) == 0

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    numbers.go.set()
    assert numbers.ended.wait(60)
