"""Tests that waiting threads do not take cores from working threads."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch

from dynatree.engine.model_thread import ModelThread
from dynatree.engine.shared_cores import HalfTheThreads, SharedCores

# Prints the CPU milliseconds of a pause of 10 ms after a forward pass, by the number of processes on the cores.
PAUSES = """
import time, torch
from contextlib import ExitStack
from dynatree.engine.shared_cores import SharedCores, ShortWaits
torch.set_num_threads({threads})
numbers, cores = torch.ones(1 << 18), SharedCores(ShortWaits())

def pause():
    numbers.add_(1)
    before = time.process_time()
    time.sleep(0.01)
    return time.process_time() - before

def pauses():
    time.sleep(0.1)
    return sorted(pause() for _ in range(30))[15] * 1e3

with ExitStack() as stack:
    stack.enter_context(cores.shared())
    alone = pauses()
    with cores.shared():
        shared = pauses()
    print(alone, shared, pauses())
"""


class Noted:
    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def end(self):
        self.calls.append("end")


def test_two_share_and_one_does_not():
    noted = Noted()
    cores = SharedCores(noted)
    with cores.shared():
        assert noted.calls == []
        with cores.shared(), cores.shared():
            assert noted.calls == ["begin"]
        assert noted.calls == ["begin", "end"]
    assert noted.calls == ["begin", "end"]


def test_half_of_the_threads_while_cores_are_shared():
    async def scenario():
        thread = ModelThread("model")
        await thread.run(torch.set_num_threads, 6)
        halved = HalfTheThreads(thread)
        numbers = []
        for call in (halved.begin, halved.end):
            call()
            numbers.append(await thread.run(torch.get_num_threads))
        thread.shutdown()
        return numbers

    threads = torch.get_num_threads()
    try:
        assert asyncio.run(scenario()) == [3, 6]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: OpenMP has no threads that wait")
def test_threads_sleep_at_once_while_others_share_the_cores():
    """The pip wheels of torch contain libgomp."""
    script = PAUSES.format(threads=len(os.sched_getaffinity(0)))
    environment = os.environ | {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "30000000"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    alone, shared, alone_again = map(float, run.stdout.split())
    assert shared < 1 < min(alone, alone_again)
