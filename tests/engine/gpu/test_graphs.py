"""Tests the capture of graphs without a GPU: torch.cuda is replaced, and its graphs replay nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynatree.engine.gpu.graphs import GraphPool, Replayed


class _Cyclic:
    """Is freed by the garbage collector only."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(name="capturing")
def capturing_fixture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace torch.cuda; return a list with True while a graph is captured."""
    capturing: list[bool] = []

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        capturing.append(True)
        yield
        capturing.clear()

    stream = SimpleNamespace(wait_stream=lambda _: None)
    replaced = {
        "graph_pool_handle": lambda: None,
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": graph,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return capturing


def test_no_garbage_is_collected_while_a_graph_is_captured(capturing: list[bool]) -> None:
    """Garbage may hold another graph, which must not end during a capture."""
    ended: list[bool] = []

    def function() -> int:
        for _ in range(10):
            weakref.finalize(_Cyclic(), lambda: ended.append(bool(capturing)))
        return 7

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        replayed = Replayed(function, GraphPool(torch.device("cuda")))
    finally:
        gc.set_threshold(*threshold)
    assert True not in ended
    assert replayed() == 7
    assert gc.isenabled()
    gc.collect()
    assert len(ended) == 30, "it is collected later"


def test_a_capture_that_fails_leaves_the_garbage_collector_on(capturing: list[bool]) -> None:
    with pytest.raises(ZeroDivisionError):
        Replayed(lambda: 1 / 0, GraphPool(torch.device("cuda")))
    assert gc.isenabled()


def test_the_owner_of_a_captured_function_is_freed_at_once(capturing: list[bool]) -> None:
    class Owner:
        def __init__(self) -> None:
            self.run = Replayed(self.function, GraphPool(torch.device("cuda")))

        def function(self) -> int:
            return 3

    owner = Owner()
    freed = weakref.ref(owner)
    assert owner.run() == 3
    gc.disable()
    try:
        del owner
        assert freed() is None
    finally:
        gc.enable()


def test_without_a_pool_each_call_runs_the_function() -> None:
    numbers = iter(range(3))
    replayed = Replayed(lambda: next(numbers), None)
    assert [replayed(), replayed()] == [0, 1]
