"""The target as the draft side knows it."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.common.model_info import ModelInfo, check_same_tokenizer
from dynatree.draft.control.round_costs import Costs


@dataclass(frozen=True)
class Target:
    """A target as the draft model drafts for it. A verify service that returns with another model gets a new `Target`.

    Attributes:
        info: The target model.
        vocab_size: Number of token ids that may be proposed: those that both models embed and the tokenizer has.
        costs: Measured costs of rounds with this target, and the track record of its sessions.
        ahead: Whether the draft model drafts ahead while the verify service works.
    """

    info: ModelInfo
    vocab_size: int
    costs: Costs
    ahead: bool

    @classmethod
    def of(cls, info: ModelInfo, draft: ModelInfo, known_ids: int, ahead: bool | None) -> Target:
        """Build the target `info` for a draft model whose tokenizer has the ids [0, `known_ids`).

        If `ahead` is None, the draft model drafts ahead if the target has another device or offloads layers.

        Raises:
            FailedPreconditionError: The target's tokenizer is not the draft's.
        """
        check_same_tokenizer(draft, info)
        return cls(
            info=info,
            vocab_size=min(known_ids, draft.vocab_size, info.vocab_size),
            costs=Costs(info.forward_costs, draft.forward_costs),
            ahead=draft.device_id != info.device_id or info.streamed_bytes > 0 if ahead is None else ahead,
        )
