"""The engine: a loaded model, its KV arena, and the runner of its forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynatree.common.device import synchronize
from dynatree.common.engine.arena import KVArena
from dynatree.common.engine.reader import KVMove, LevelsWanted, Read, Reader
from dynatree.common.engine.runner import Choosing, Decider, Runner
from dynatree.common.engine.segment import Segment
from dynatree.common.engine.streaming.stream import Stream
from dynatree.common.model_info import ModelInfo


@dataclass(eq=False)
class Engine:
    """Runs segments of any number of sessions through a model in one forward; `loading.load_engine` makes one.

    Invariant: the logits of a token are those that the model gives for the sequence made of the slots which the token's
    mask shows, in the order of their positions, whatever else is in the forward.

    Attributes:
        batch_invariant: Whether those logits, and the keys and values that a forward stores, have the same bits
            whatever else is in the forward; otherwise they may differ by rounding.
        decider: What runs a forward with the decision after it, on the device; None where the host decides.
        reader: What reads several levels of a draft's trees at once; None where each is a forward.
        most_rows: Of one forward; more rows take several. None: any number is one.
        stream: Of the layers that do not fit into memory; None where all do.
    """

    model: PreTrainedModel
    runner: Runner
    arena: KVArena
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo
    eos_token_ids: frozenset[int]
    batch_invariant: bool = False
    decider: Decider | None = None
    reader: Reader | None = None
    most_rows: int | None = None
    stream: Stream | None = None

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """One forward over all segments; their keys and values are stored in the arena.

        Returns:
            For each segment the logits of the tokens that it keeps: `[kept, vocabulary]`, in the model's dtype.
        """
        for segment in segments:
            segment.kv.used = max(segment.kv.used, segment.stop)
        return self.runner.run(segments)

    @torch.inference_mode()
    def decide(
        self, segments: Sequence[Segment], choosings: Sequence[Choosing | None]
    ) -> tuple[list[Tensor], list[list[int] | None]] | None:
        """As `Decider.decide`; None where the device does not decide."""
        if self.decider is None:
            return None
        for segment in segments:
            segment.kv.used = max(segment.kv.used, segment.stop)
        return self.decider.decide(segments, choosings)

    @torch.inference_mode()
    def read_levels(
        self, wanted: Sequence[LevelsWanted], levels: int, moves: Sequence[KVMove] = ()
    ) -> list[Read] | None:
        """As `Reader.read`; None where there is no reader."""
        if self.reader is None:
            return None
        read = self.reader.read(wanted, levels, moves)
        if read is not None:
            for each in wanted:
                used = each.segment.stop + self.reader.slots(levels)
                each.segment.kv.used = max(each.segment.kv.used, used)
        return read

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it, so that a clock read next is true."""
        synchronize(self.arena.device)
