"""Functions over fixed buffers, captured as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_WARM_UPS = 2  # calls before a capture, in which kernels are compiled and algorithms selected


class GraphPool:
    """The memory and the capture stream that graphs share if they never run at the same time.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Replayed(Generic[T]):
    """A function that runs repeatedly over the same buffers, by a captured graph if there is a pool.

    A captured function is not kept: it often belongs to the owner of this object, and such a cycle would hold the
    graph's memory until the garbage collector runs. So the owner keeps the buffers that the function used.

    Args:
        function: The function; it must not wait for the device or allocate depending on contents. The next call
            overwrites its result.
        pool: Pool of the graph; None means that no graph is captured and each call runs the function.
    """

    def __init__(self, function: Callable[[], T], pool: GraphPool | None) -> None:
        self._function = function if pool is None else None
        if pool is not None:
            self._capture(function, pool)

    def _capture(self, function: Callable[[], T], pool: GraphPool) -> None:
        with torch.cuda.device(pool.device), _no_collection():
            pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
            with torch.cuda.stream(pool.stream):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream(pool.device).wait_stream(pool.stream)
            self._graph = torch.cuda.CUDAGraph()
            # another thread may run another model during the capture
            with torch.cuda.graph(self._graph, pool=pool.memory, stream=pool.stream, capture_error_mode="thread_local"):
                self._result = function()

    def __call__(self) -> T:
        """Run the function over the current contents of the buffers."""
        if self._function is not None:
            return self._function()
        self._graph.replay()
        return self._result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage within the context: it may hold a graph, whose end would make the capture fail.

    torch collects none before a capture since 2.9. See its pull request 161037.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def graph_pool(device: torch.device) -> GraphPool | None:
    """Return a pool for a device's graphs, or None if the device has no graphs."""
    return GraphPool(device) if device.type == "cuda" else None
