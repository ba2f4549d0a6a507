"""The engine: a loaded model, its KV cache, and the runner of its forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynatree.common.model_info import ModelInfo
from dynatree.engine.device import synchronize
from dynatree.engine.forward.layer_source import LayerSource
from dynatree.engine.forward.level_runner import KVMove, LevelRunner, LevelsWanted, SegmentRead
from dynatree.engine.forward.runner import Choosing, Decider, Runner
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_cache import KVCache


@dataclass(eq=False)
class Engine:
    """A loaded model that runs segments of any number of sessions in one forward pass; see `loading.load_engine`.

    Invariant: a token's logits are those that the model computes for the sequence of the KV slots visible in the
    token's mask, ordered by position. The other segments of the forward pass do not matter.

    Attributes:
        batch_invariant: Whether the logits and the stored keys and values have the same bits regardless of the other
            segments in the forward pass; otherwise they may differ by rounding.
        decider: Runs a forward pass and the decision after it on the device; None if the host decides.
        level_runner: Computes several levels of a draft's trees at once; None if each level is a forward pass.
        most_rows: Upper bound on the rows of one forward pass; more rows take several. None means no bound.
        source: Source of the layers that do not fit into memory; None if all layers fit.
        most_sessions: Sessions whose recurrent layers fit into memory; None means no bound.
    """

    model: PreTrainedModel
    runner: Runner
    kv_cache: KVCache
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo
    eos_token_ids: frozenset[int]
    batch_invariant: bool = False
    decider: Decider | None = None
    level_runner: LevelRunner | None = None
    most_rows: int | None = None
    source: LayerSource | None = None
    most_sessions: int | None = None

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Run one forward pass over all segments and store their keys and values in the KV cache.

        Returns:
            For each segment, the logits of the tokens that it keeps: `[kept, vocabulary]`, in the model's dtype.
        """
        for segment in segments:
            segment.kv.used = max(segment.kv.used, segment.stop)
        return self.runner.run(segments)

    @torch.inference_mode()
    def decide(
        self, segments: Sequence[Segment], choosings: Sequence[Choosing | None]
    ) -> tuple[list[Tensor], list[list[int] | None]] | None:
        """Call `Decider.decide`; return None if there is no decider."""
        if self.decider is None:
            return None
        for segment in segments:
            segment.kv.used = max(segment.kv.used, segment.stop)
        return self.decider.decide(segments, choosings)

    @torch.inference_mode()
    def read_levels(
        self, wanted: Sequence[LevelsWanted], levels: int, moves: Sequence[KVMove] = ()
    ) -> list[SegmentRead] | None:
        """Call `LevelRunner.read`; return None if there is no level runner."""
        if self.level_runner is None:
            return None
        read = self.level_runner.read(wanted, levels, moves)
        if read is not None:
            for each in wanted:
                used = each.segment.stop + self.level_runner.slots(levels)
                each.segment.kv.used = max(each.segment.kv.used, used)
        return read

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work, so that a clock read next is accurate."""
        synchronize(self.kv_cache.device)
