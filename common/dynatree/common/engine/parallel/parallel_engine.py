"""What rank 0 computes, all ranks compute: forwards, and copies within the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.engine import Engine
from dynatree.common.engine.parallel.ranks import Ranks
from dynatree.common.engine.probe import Prefixes, plain_logits
from dynatree.common.engine.reader import KVMove
from dynatree.common.engine.runner import Runner
from dynatree.common.engine.segment import Segment
from dynatree.common.kv_range import KVRange


@dataclass(frozen=True)
class Forward:
    """One forward."""

    segments: Sequence[Segment]


@dataclass(frozen=True)
class Copy:
    """One `KVArena.copy`."""

    source: KVRange
    target: KVRange
    stop: int


@dataclass(frozen=True)
class Plain:
    """`plain_logits`, by the model's own attention."""

    prefixes: Prefixes
    implementation: str


class ParallelRunner:
    """Implements `Runner` on rank 0: every forward is everybody's."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks

    def run(self, segments: Sequence[Segment]) -> list[Tensor]:
        """As `Runner.run`.

        Raises:
            RankError: The ranks are no longer in step.
        """
        with self._ranks.in_step():
            self._ranks.say(Forward(segments))
            return self._runner.run(segments)


class ParallelArena(KVArena):
    """An arena of rank 0: what is copied in it, all copy in theirs. They hold the same slots of other heads."""

    def __init__(self, ranks: Ranks, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks

    def move(self, kv: KVRange, sources: Sequence[int], start: int) -> None:
        """As `KVArena.move`."""
        with self._ranks.in_step():
            self._ranks.say(KVMove(kv, list(sources), start))
            super().move(kv, sources, start)

    def copy(self, source: KVRange, target: KVRange, stop: int) -> None:
        """As `KVArena.copy`."""
        with self._ranks.in_step():
            self._ranks.say(Copy(source, target, stop))
            super().copy(source, target, stop)


@torch.inference_mode()
def follow(engine: Engine, ranks: Ranks) -> None:
    """Do what rank 0 says, until it is gone.

    Raises:
        RuntimeError: It could not be done.
    """
    while True:
        try:
            said = ranks.told()
        except RuntimeError:
            return
        if isinstance(said, Forward):
            engine.runner.run(said.segments)
        elif isinstance(said, KVMove):
            engine.arena.move(said.kv, said.sources, said.start)
        elif isinstance(said, Copy):
            engine.arena.copy(said.source, said.target, said.stop)
        else:
            plain_logits(engine.model, said.prefixes, said.implementation)
