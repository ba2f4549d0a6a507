"""Forwards of a few padded sizes, which a CUDA graph can replay: only their contents change.

Attention needs no mask over the whole context. One vector says which slots are in use, and a small matrix says which
slots of the tail, the last slots in use, each token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.flat_forward import FlatForward
from dynatree.common.engine.runner import Runner
from dynatree.common.engine.segment import Segment
from dynatree.common.kv_range import KVRange

MAX_ROWS = 256  # tokens; longer segments are prompts, which are read once
CONTEXT_STEP = 256  # slots
MAX_SHAPES = 128  # each has buffers, and on a GPU a graph


@dataclass(frozen=True)
class StaticShape:
    """The sizes that a graph is captured for, rounded up.

    Attributes:
        kv_start: The first slot of the session's range.
        kv_size: Slots of the range.
        tokens: Of the segment.
        tail: Slots that the segment's mask covers.
        context: Slots that attention reads.
    """

    kv_start: int
    kv_size: int
    tokens: int
    tail: int
    context: int

    @classmethod
    def of(cls, segment: Segment) -> StaticShape | None:
        """The shape that a segment fits into; None where it is a prompt or leaves no slot for padding."""
        tokens, kv = len(segment.token_ids), segment.kv
        if tokens > MAX_ROWS or segment.stop >= kv.size or segment.start == 0:
            return None
        context = min(-(-segment.stop // CONTEXT_STEP) * CONTEXT_STEP, kv.size)
        return cls(kv.start, kv.size, _power_of_two(tokens), _power_of_two(_tail(segment)), context)


class StaticBatch:
    """One segment, padded to a shape; implements `Attending`.

    Padding repeats the segment's last token. Its keys and values go to the range's last slot, which no token sees.
    """

    def __init__(self, shape: StaticShape, arena: KVArena) -> None:
        dtype, device = arena.dtype, arena.device
        self.shape = shape
        self._arena = arena
        self._kv = KVRange(shape.kv_start, shape.kv_size)
        self.token_ids = torch.zeros(1, shape.tokens, dtype=torch.long, device=device)
        self.positions = torch.zeros(1, shape.tokens, dtype=torch.long, device=device)
        self._slots = torch.zeros(shape.tokens, dtype=torch.long, device=device)
        self._in_use = torch.zeros(shape.context, dtype=dtype, device=device)  # 0 for a slot in use, -inf for others
        self._tail_slots = torch.zeros(shape.tail, dtype=torch.long, device=device)
        self._tail_bias = torch.zeros(shape.tokens, shape.tail, dtype=dtype, device=device)

    def fill(self, segment: Segment) -> None:
        """Set the contents by a few small copies to the device; the buffers stay where captured graphs read them."""
        tokens, tail = len(segment.token_ids), _tail(segment)
        padding = self.shape.tokens - tokens
        self.token_ids.copy_(_row([*segment.token_ids, *[segment.token_ids[-1]] * padding])[None])
        self.positions.copy_(_row([*segment.positions, *[segment.positions[-1]] * padding])[None])
        self._slots.copy_(_row([*range(segment.start, segment.stop), *[self._kv.size - 1] * padding]))
        self._in_use.fill_(float("-inf"))
        self._in_use[: segment.stop] = 0.0
        # the tail's padding adds 0 to the bias of slot 0
        self._tail_slots.copy_(_row([*range(segment.stop - tail, segment.stop), *[0] * (self.shape.tail - tail)]))
        # [tokens, tail]
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril() if segment.mask is None else segment.mask
        bias = torch.zeros(self.shape.tokens, self.shape.tail, dtype=self._tail_bias.dtype)
        bias[:tokens, :tail].masked_fill_(~visible, float("-inf"))
        self._tail_bias.copy_(bias)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store the new keys and values, then attend; as `Attending.attend`."""
        self._arena.put(layer, self._kv, self._slots, key, value)
        keys, values = self._arena.read(layer, self._kv, self.shape.context)  # [kv_heads, context, head_dim]
        heads, tokens, dim = query.shape
        scale = dim**-0.5 if scale is None else scale  # of the queries, so that no score is too large for float16
        # heads that share a key, one below the other: [kv_heads, heads / kv_heads * tokens, head_dim]
        groups = (query * scale).reshape(keys.shape[0], -1, dim)
        scores = (groups @ keys.transpose(1, 2)).view(heads, tokens, -1).float() + self._in_use
        scores.index_add_(2, self._tail_slots, self._tail_bias.float().expand(heads, -1, -1))
        weights = scores.softmax(-1).to(values.dtype).view(keys.shape[0], -1, self.shape.context)
        return (weights @ values).view(heads, tokens, dim).transpose(0, 1)


class StaticRunner:
    """Replays the model's forward over one segment at a time; each shape is captured when it first occurs.

    The `MAX_SHAPES` shapes that were used last are kept. They share one memory pool: a replay may overwrite the logits
    of any other. On a GPU a forward is captured as a CUDA graph; on a CPU it is called.

    Args:
        forward: The model's forward.
        arena: Where keys and values are stored.
        otherwise: Runs what no static shape takes: prompts, and several segments at once.
    """

    def __init__(self, forward: FlatForward, arena: KVArena, otherwise: Runner) -> None:
        self._forward = forward
        self._arena = arena
        self._otherwise = otherwise
        self._captured: dict[StaticShape, tuple[StaticBatch, Callable[[], Tensor]]] = {}  # last used last
        self._pool = torch.cuda.graph_pool_handle() if arena.device.type == "cuda" else None

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """As `Runner.run`."""
        shape = StaticShape.of(segments[0]) if len(segments) == 1 else None
        if shape is None:
            return self._otherwise.run(segments)
        logits, keep = self._replay(shape, segments[0]), segments[0].keep
        return [logits.clone() if keep is None else logits[list(keep)]]  # both copy

    def _replay(self, shape: StaticShape, segment: Segment) -> Tensor:
        """The logits of a segment's tokens `[tokens, vocabulary]`; the next replay overwrites them."""
        captured = self._captured.pop(shape, None)
        if captured is None:
            while len(self._captured) >= MAX_SHAPES:
                del self._captured[next(iter(self._captured))]
            batch = StaticBatch(shape, self._arena)
            batch.fill(segment)
            captured = batch, self._capture(batch)
        self._captured[shape] = captured
        batch, replay = captured
        batch.fill(segment)
        return replay()[: len(segment.token_ids)]

    def _capture(self, batch: StaticBatch) -> Callable[[], Tensor]:
        """A call that computes the logits of a batch's contents `[shape.tokens, vocabulary]`."""
        device = self._arena.device
        if device.type != "cuda":
            return lambda: self._forward(batch.token_ids, batch.positions, batch)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # kernels choose their algorithms in a forward that is not captured
            self._forward(batch.token_ids, batch.positions, batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(batch.token_ids, batch.positions, batch)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def _tail(segment: Segment) -> int:
    """Slots that the segment's mask covers."""
    return len(segment.token_ids) if segment.mask is None else segment.mask.shape[1]


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _row(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
