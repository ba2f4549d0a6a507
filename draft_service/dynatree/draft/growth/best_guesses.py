"""Check of the draft model's use for this target: how often its best guess is the target's token."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynatree.common.sampling import Scheme
from dynatree.draft.growth.draft_session import DraftSession

log = logging.getLogger(__name__)

PLACES = 50  # positions that decide; the default policy pauses a poor draft, so more would take a dozen completions
LEAST_SHARE = 0.05  # share of right guesses; the bundled pair has 0.24 to 0.77, by text, greedy and at temperature 1


class BestGuesses:
    """Counts right guesses over all sessions of a draft service, and warns once if the draft model is rarely right.

    A position counts if the draft model has read the tokens before it. So n-gram guesses do not count, nor do rounds
    without the draft model. Sessions with independent noise or random draws do not count, since there even a good draft
    is often wrong.
    """

    def __init__(self) -> None:
        self._places = 0
        self._right = 0

    def observe(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Take in the target's next committed tokens, before the session takes them in."""
        coupled = session.sampling.greedy or session.sampling.scheme is Scheme.GUMBEL
        if self._places >= PLACES or session.draws or not coupled:
            return
        node = session.root
        for token in token_ids:
            if not node.proposals:
                break
            self._places += 1
            self._right += node.proposals[0].token == token
            if token not in node.children:
                break
            node = node.children[token]
        if self._places >= PLACES and self._right < LEAST_SHARE * self._places:
            log.warning(
                "the draft model's best guess was the target's token at %d of %d positions, so drafting with it gains "
                "nothing; use another draft model, or the policy ngram, which needs none",
                self._right,
                self._places,
            )
