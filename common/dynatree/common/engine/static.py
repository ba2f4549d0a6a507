"""Forwards of static shape, which a CUDA graph can replay: a few padded sizes, of which only the contents change.

Attention needs no mask over the context: one vector says which slots are there at all, and a small matrix which of the
tail, the speculative slots, each token sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.attention import Segment

MAX_ROWS = 256  # longer segments are prompts, which are read once
CONTEXT_STEP = 256
MOST_SHAPES = 128  # each has buffers, and on a GPU a graph


@dataclass(frozen=True)
class StaticShape:
    """What a graph is captured for: an arena row, and tokens, tail and context slots, rounded up."""

    row: int
    tokens: int
    tail: int
    context: int

    @classmethod
    def of(cls, segment: Segment, capacity: int) -> StaticShape | None:
        """The shape that a segment fits into; None where it is a prompt or leaves no slot for padding."""
        tokens = len(segment.token_ids)
        if tokens > MAX_ROWS or segment.stop >= capacity or segment.start == 0:
            return None
        context = min(-(-segment.stop // CONTEXT_STEP) * CONTEXT_STEP, capacity)
        return cls(segment.row, _power_of_two(tokens), _power_of_two(_tail(segment)), context)


class StaticBatch:
    """One segment, padded to a shape; stands in for `Batch` in the attention function.

    Padding repeats the last token and is stored in the arena row's last slot, which nothing sees.
    """

    def __init__(self, shape: StaticShape, arena: KVArena, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self._arena = arena
        self.token_ids = torch.zeros(1, shape.tokens, dtype=torch.long, device=device)
        self.positions = torch.zeros(1, shape.tokens, dtype=torch.long, device=device)
        self._slots = torch.zeros(shape.tokens, dtype=torch.long, device=device)
        self._present = torch.zeros(shape.context, dtype=dtype, device=device)
        self._tail_slots = torch.zeros(shape.tail, dtype=torch.long, device=device)
        self._tail_bias = torch.zeros(shape.tokens, shape.tail, dtype=dtype, device=device)

    def fill(self, segment: Segment) -> None:
        """Set the contents: a few small copies to the device."""
        tokens, tail = len(segment.token_ids), _tail(segment)
        padding = self.shape.tokens - tokens
        self.token_ids.copy_(_row([*segment.token_ids, *[segment.token_ids[-1]] * padding])[None])
        self.positions.copy_(_row([*segment.positions, *[segment.positions[-1]] * padding])[None])
        self._slots.copy_(_row([*range(segment.start, segment.stop), *[self._arena.capacity - 1] * padding]))
        self._present.fill_(float("-inf"))
        self._present[: segment.stop] = 0.0
        # padding of the tail points at the first slot of the sequence, whose bias it leaves as it is
        self._tail_slots.copy_(_row([*range(segment.stop - tail, segment.stop), *[0] * (self.shape.tail - tail)]))
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril() if segment.mask is None else segment.mask
        bias = torch.zeros(self.shape.tokens, self.shape.tail, dtype=self._tail_bias.dtype)
        bias[:tokens, :tail].masked_fill_(~visible, float("-inf"))
        self._tail_bias.copy_(bias)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend: query `[heads, n, dim]` to output `[n, heads, dim]`."""
        self._arena.put(layer, self.shape.row, self._slots, key, value)
        keys, values = self._arena.read(layer, self.shape.row, self.shape.context)
        heads, tokens, dim = query.shape
        scale = dim**-0.5 if scale is None else scale  # of the queries, so that no score is too large for float16
        groups = (query * scale).reshape(keys.shape[0], -1, dim)  # the heads that share a key, one below the other
        scores = (groups @ keys.transpose(1, 2)).view(heads, tokens, -1).float() + self._present
        scores.index_add_(2, self._tail_slots, self._tail_bias.float().expand(heads, -1, -1))
        weights = scores.softmax(-1).to(values.dtype).view(keys.shape[0], -1, self.shape.context)
        return (weights @ values).view(heads, tokens, dim).transpose(0, 1)


class StaticForwards:
    """Replays a model's forward for each shape that occurs; a shape is captured when it first does.

    The `MOST_SHAPES` that were used last are kept. They share one memory pool: a replay may overwrite the logits of any
    other.

    Args:
        forward: The model's forward over a static batch: logits `[tokens, vocabulary]`.
        device: On a GPU forwards are captured as CUDA graphs; on a CPU they are called.
    """

    def __init__(
        self, forward: Callable[[StaticBatch], Tensor], arena: KVArena, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._forward = forward
        self._arena = arena
        self._dtype = dtype
        self._device = device
        self._captured: dict[StaticShape, tuple[StaticBatch, Callable[[], Tensor]]] = {}  # last used last
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, shape: StaticShape, segment: Segment) -> Tensor:
        """The logits of a segment's tokens `[tokens, vocabulary]`; the next run overwrites them."""
        captured = self._captured.pop(shape, None)
        if captured is None:
            while len(self._captured) >= MOST_SHAPES:
                del self._captured[next(iter(self._captured))]
            batch = StaticBatch(shape, self._arena, self._dtype, self._device)
            batch.fill(segment)
            captured = batch, self._capture(batch)
        self._captured[shape] = captured
        batch, replay = captured
        batch.fill(segment)
        return replay()[: len(segment.token_ids)]

    def _capture(self, batch: StaticBatch) -> Callable[[], Tensor]:
        if self._device.type != "cuda":
            return lambda: self._forward(batch)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # kernels choose their algorithms in a forward that is not captured
            self._forward(batch)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(batch)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def _tail(segment: Segment) -> int:
    return len(segment.token_ids) if segment.mask is None else segment.mask.shape[1]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _row(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
