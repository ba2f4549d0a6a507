"""The number of prompt tokens read beside trees in a pass, so that no session stalls and no prompt starves."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.verify.pass_costs import PassCosts

STEP = 0.3  # weight of the latest pass in the running means
STRETCH = 2.0  # longest time of a pass that reads prompts, relative to the same pass without prompts
TREE_SHARE = 0.3  # share of such a pass's time for trees; roots and almost free nodes may exceed it
FREE_STRETCH = 1.15  # nodes are almost free up to this multiple of the time of a pass over the roots alone
LEAST_ROWS = 16  # fewest prompt rows in a pass that reads prompts, so that every prompt progresses


@dataclass
class PromptBudget:
    """Divides the time of a pass between trees and prompts.

    Attributes:
        costs: Cost model c(rows, sessions).
        max_rows: Maximum rows of a pass.
    """

    costs: PassCosts
    max_rows: int
    _usual: float = 0.0  # running mean of the seconds of passes without prompts, including the gap before each
    _factor: float = 1.0  # running mean of measured / modelled seconds of passes that read prompts

    def longest(self, rows: int, sessions: int, waiting: int, decoding: int) -> float:
        """Time limit of a pass that reads prompts, in seconds.

        If more prompts wait than sessions decode, the limit grows in proportion.

        Args:
            rows: Rows of the pass without prompts.
            sessions: Sessions of the pass without prompts.
            waiting: Number of prompts that are not fully read.
            decoding: Number of sessions whose prompts are fully read.
        """
        crowd = max(1.0, waiting / max(decoding, 1))
        return STRETCH * crowd * max(self._usual, self.costs.seconds(max(rows, 1), max(sessions, 1)))

    def tree_rows(self, longest: float, sessions: int) -> int:
        """Maximum rows of trees in a pass of `longest` seconds that reads prompts; prompts get most of its time."""
        share = max(TREE_SHARE * longest, FREE_STRETCH * self.costs.seconds(sessions, sessions))
        return max(self.costs.most_rows(share, self.max_rows, sessions), sessions)

    def prompt_rows(self, longest: float, rows: int, sessions: int) -> int:
        """Return the most prompt tokens that a pass of `longest` seconds may read; at least `LEAST_ROWS`.

        The pass also verifies `rows` tree rows of `sessions` sessions.
        """
        room = self.costs.most_rows(longest / self._factor, self.max_rows, sessions + 1) - rows
        return max(room, LEAST_ROWS)

    def observe(self, cycle: float) -> None:
        """Record the seconds of a pass that read no prompt, including the gap before it."""
        self._usual = cycle if not self._usual else self._usual + STEP * (cycle - self._usual)

    def observe_prompts(self, rows: int, sessions: int, seconds: float) -> None:
        """Record a pass that read prompts, whose tokens attend to long contexts and so cost more than a tree's."""
        factor = max(seconds / self.costs.seconds(rows, sessions), 1.0)
        self._factor += STEP * (factor - self._factor)
