"""Functions of fixed buffers, captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import torch

T = TypeVar("T")
GraphPool: TypeAlias = Any  # torch's handle

_WARM_UPS = 2  # calls before a capture: kernels are compiled, and choose their algorithms


class Replayed(Generic[T]):
    """A function that is computed again and again over the same buffers, by a graph where there is one.

    Args:
        function: What computes; it must neither wait for the device nor allocate by content. What it returns is
            overwritten by the next call.
        device: That computes it.
        pool: A memory pool that it shares with others which never run at the same time; None: no graph is captured.
    """

    def __init__(self, function: Callable[[], T], device: torch.device, pool: GraphPool | None) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool is not None:
            self._capture(device, pool)

    def _capture(self, device: torch.device, pool: GraphPool) -> None:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._function()
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # another thread may run another model meanwhile
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._result = self._function()

    def __call__(self) -> T:
        """Compute it over what the buffers hold now."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result


def graph_pool(device: torch.device) -> GraphPool | None:
    """A memory pool for graphs; None where the device has no graphs."""
    if device.type != "cuda":
        return None
    pool: GraphPool = torch.cuda.graph_pool_handle()
    return pool
