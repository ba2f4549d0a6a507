"""The target as the draft side knows it."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.common.model_info import ModelInfo, check_same_tokenizer
from dynatree.draft.round_costs import Costs


@dataclass(frozen=True)
class Target:
    """A target that the draft model drafts for. A verify service that comes back with another one gets another.

    Attributes:
        info: The target model.
        vocab_size: Tokens that may be proposed: those that both models embed and the tokenizer has.
        costs: What rounds with this target are measured to cost, and what its sessions found drafting to be worth.
        ahead: Whether the draft model reads on while the verify service works.
    """

    info: ModelInfo
    vocab_size: int
    costs: Costs
    ahead: bool

    @classmethod
    def of(cls, info: ModelInfo, draft: ModelInfo, known_ids: int, ahead: bool | None) -> Target:
        """The target `info` for a draft model whose tokenizer has the ids [0, `known_ids`).

        `ahead` None: where the target has a device of its own, or waits for the disk.

        Raises:
            FailedPreconditionError: Its tokenizer is not the draft's.
        """
        check_same_tokenizer(draft, info)
        return cls(
            info=info,
            vocab_size=min(known_ids, draft.vocab_size, info.vocab_size),
            costs=Costs(info.forward_costs, draft.forward_costs),
            ahead=draft.device_id != info.device_id or info.streamed_bytes > 0 if ahead is None else ahead,
        )
