"""A draft model's logits and proposals in the tokens of a target with another tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dynatree.common.sampling import Sampling
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.text.translation import NONE, Translation


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The tokens that both models have, on the device of the draft's logits.

    Attributes:
        translation: The correspondence of tokens.
        places: The draft's token of each token of the target, 0 if it has none: int64 `[target tokens]`.
        unknown: 0 for tokens of the target that the draft has, else -inf: float32 `[target tokens]`.
    """

    translation: Translation
    places: Tensor
    unknown: Tensor

    @classmethod
    def of(cls, translation: Translation, device: torch.device) -> Self:
        """Copy the correspondence to a device."""
        ids = torch.tensor(translation.draft_ids, dtype=torch.int64, device=device)
        unknown = torch.zeros(len(ids), device=device).masked_fill(ids == NONE, -math.inf)
        return cls(translation, ids.clamp(min=0), unknown)

    def gathered(self, logits: Tensor) -> Tensor:
        """Gather float32 logits `[rows, draft's vocabulary]` as `[rows, target tokens]`; -inf for unknown tokens."""
        return logits.index_select(-1, self.places) + self.unknown

    def logits(self, logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Gather the draft's logits for the target's tokens.

        Args:
            logits: The draft's logits, float32 `[rows, draft's vocabulary]`.
            sampling: Sampling options of the draft's distribution.

        Returns:
            The logits `[rows, target tokens]`, -inf for tokens that the draft does not have; and the log-probability
            that the draft's next token is one of the others, `[rows, 1]`.
        """
        found = self.gathered(logits)
        highest = logits.amax(-1, keepdim=True)
        temperature = 1.0 if sampling.greedy else sampling.temperature
        of_all, of_found = (((each - highest) / temperature).logsumexp(-1, keepdim=True) for each in (logits, found))
        return found, of_found - of_all

    def restrict(self, tree: GrowingTree, nodes: Sequence[int]) -> None:
        """Leave the proposals that both models have, and none below a token that the draft cannot read."""
        known = self.translation.draft_id
        for index in nodes:
            node = tree.node(index)
            readable = all(known(above.token) != NONE for above in tree.path(index))
            node.proposals = tuple(each for each in node.proposals or () if readable and known(each.token) != NONE)
