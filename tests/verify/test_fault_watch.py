"""Tests trials of the device that raise an error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from dynatree.common.errors import DeviceFailedError, NotFiniteError
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.verify.fault_watch import MOST_FAULTS, FaultWatch
from dynatree.verify.verifier import Result, Verifier

FAULTS: list[Result] = [NotFiniteError()] * MOST_FAULTS


def judged(error: Exception) -> Sequence[Result]:
    """Judge as many faults as lead to a trial, which raises `error`."""

    async def trial() -> bool:
        raise error

    async def work() -> Sequence[Result]:
        return await FaultWatch(lambda _: None, trial).judged(FAULTS)

    return asyncio.run(work())


def test_a_device_whose_trial_raises_an_error_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    results = judged(MemoryError("no room for a trial"))
    assert [type(each) for each in results] == [DeviceFailedError] * MOST_FAULTS
    assert "no room for a trial" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), DeviceFailedError("lost")])
def test_a_trial_that_finds_the_device_lost_says_so_itself(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        judged(error)


def test_a_trial_that_raises_an_error_keeps_no_slot() -> None:
    def forward(segments: Any) -> NoReturn:
        raise MemoryError("no room for a trial")

    kv_cache = KVCache(KVShape(layers=1, kv_heads=1, head_dim=1), 4, torch.float32, torch.device("cpu"))
    engine: Any = SimpleNamespace(kv_cache=kv_cache, forward=forward)
    with pytest.raises(MemoryError):
        Verifier(engine, 8).is_sound()
    assert kv_cache.free_slots == 4
