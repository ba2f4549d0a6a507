"""How much of prompts a pass may read beside trees, so that nobody's stream stops and no prompt waits for ever."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.verify.pass_costs import PassCosts

STEP = 0.3  # weight of one pass in what passes usually take
STRETCH = 2.0  # a pass that reads prompts may take so many times as long as it would without them
TREE_SHARE = 0.3  # of such a pass's time that trees may take, but for their roots and what hardly costs more
FREE_STRETCH = 1.15  # of a pass over the roots alone: nodes within it hardly cost anything
LEAST_ROWS = 16  # of prompts in a pass that reads any: less would take for ever


@dataclass
class PromptBudget:
    """Shares the time of a pass between trees and prompts.

    Attributes:
        costs: c(rows, sessions).
        max_rows: Of a pass.
    """

    costs: PassCosts
    max_rows: int
    _usual: float = 0.0  # seconds of passes of late that read no prompt, with the gap before each
    _factor: float = 1.0  # seconds of passes that read prompts / what the curve says

    def longest(self, rows: int, sessions: int, waiting: int, streaming: int) -> float:
        """Seconds that a pass may take that reads prompts.

        Where more prompts wait than sessions stream, the few may be held up for longer, in proportion.

        Args:
            rows: That it would have without prompts.
            sessions: That it would have without prompts.
            waiting: Prompts that are not read.
            streaming: Sessions whose prompts are.
        """
        crowd = max(1.0, waiting / max(streaming, 1))
        return STRETCH * crowd * max(self._usual, self.costs.seconds(max(rows, 1), max(sessions, 1)))

    def tree_rows(self, longest: float, sessions: int) -> int:
        """The most rows of trees in a pass of `longest` seconds that reads prompts, which get the larger part of it."""
        share = max(TREE_SHARE * longest, FREE_STRETCH * self.costs.seconds(sessions, sessions))
        return max(self.costs.most_rows(share, self.max_rows, sessions), sessions)

    def prompt_rows(self, longest: float, rows: int, sessions: int) -> int:
        """Tokens of prompts in a pass of `longest` seconds beside so many rows of trees, of so many sessions."""
        room = self.costs.most_rows(longest / self._factor, self.max_rows, sessions + 1) - rows
        return max(room, LEAST_ROWS)

    def observe(self, cycle: float) -> None:
        """Take in the seconds of a pass that read no prompt, with the gap before it."""
        self._usual = cycle if not self._usual else self._usual + STEP * (cycle - self._usual)

    def observe_prompts(self, rows: int, sessions: int, seconds: float) -> None:
        """Take in a pass that read prompts: their tokens see long contexts, so they cost more than a tree's."""
        factor = max(seconds / self.costs.seconds(rows, sessions), 1.0)
        self._factor += STEP * (factor - self._factor)
