"""Forward passes and KV cache copies that rank 0 starts and all ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynatree.engine.engine import Engine
from dynatree.engine.forward.eager import EagerRunner
from dynatree.engine.forward.level_runner import KVMove
from dynatree.engine.forward.not_finite import spoil
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.parallel.ranks import Ranks
from dynatree.engine.support.probe import Prefixes, plain_logits


@dataclass(frozen=True)
class Forward:
    """One forward pass."""

    segments: Sequence[Segment]


@dataclass(frozen=True)
class Copy:
    """One `KVCache.copy`."""

    source: KVRange
    destination: KVRange
    stop: int


@dataclass(frozen=True)
class Plain:
    """One call of `plain_logits`, by the model's own attention."""

    prefixes: Prefixes
    implementation: str


class ParallelRunner:
    """Implements `Runner` on rank 0: all ranks compute every forward pass."""

    def __init__(self, runner: EagerRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """See `Runner.run`.

        Raises:
            RankError: The ranks are no longer in step.
        """
        with self._ranks.in_step():
            self._ranks.say(Forward(segments))
            return _run(self._runner, self._ranks, segments)


class ParallelKVCache(KVCache):
    """The KV cache of rank 0: all ranks repeat its copies. Their KV caches hold the same slots of different heads."""

    def __init__(self, ranks: Ranks, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks

    def move(self, kv: KVRange, sources: Sequence[int], start: int) -> None:
        """See `KVCache.move`."""
        with self._ranks.in_step():
            self._ranks.say(KVMove(kv, list(sources), start))
            super().move(kv, sources, start)

    def copy(self, source: KVRange, destination: KVRange, stop: int) -> None:
        """See `KVCache.copy`."""
        with self._ranks.in_step():
            self._ranks.say(Copy(source, destination, stop))
            super().copy(source, destination, stop)


@torch.inference_mode()
def follow(engine: Engine, ranks: Ranks) -> None:
    """Execute the messages of rank 0 until rank 0 ends.

    Raises:
        RuntimeError: The execution of a message failed.
    """
    runner = engine.runner
    assert isinstance(runner, EagerRunner), "ranks run no program"
    while True:
        try:
            said = ranks.told()
        except RuntimeError:
            return
        if isinstance(said, Forward):
            _run(runner, ranks, said.segments)
        elif isinstance(said, KVMove):
            engine.kv_cache.move(said.kv, said.sources, said.start)
        elif isinstance(said, Copy):
            engine.kv_cache.copy(said.source, said.destination, said.stop)
        else:
            plain_logits(engine.model, said.prefixes, said.implementation)


def _run(runner: EagerRunner, ranks: Ranks, segments: Sequence[Segment]) -> list[Tensor]:
    """Run one forward pass on one rank; see `Runner.run`.

    Each rank has its own heads, so a token's keys and values may overflow on one rank only.
    """
    logits, faulty = runner.compute(segments)
    spoil(segments, logits, ranks.union(faulty, sum(len(segment.token_ids) for segment in segments)))
    return logits
