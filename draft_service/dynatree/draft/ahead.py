"""Drafting ahead: while the verify service checks a tree, the draft reads what the next tree is likely to hold.

Whatever tree was sent, the next one hangs below some node of this session's trie: a leaf that was accepted, or a child
that was not sent. The likeliest of those are read, and what comes below them. A hit finds its nodes read and needs no
forward for them; after a miss they are forgotten by the re-rooting that every commit does. Which tokens are committed
does not depend on it. (PEARL, Liu et al. 2025; Saguaro, Kumar et al. 2026, keep a cache of outcomes to the same end.)
"""

from __future__ import annotations

from dynatree.common.tree import ROOT
from dynatree.draft.draft_session import DraftSession
from dynatree.draft.drafter import Drafter
from dynatree.draft.policies.best_first import BestFirst

NODES = 64  # the likeliest, of which those that are not read yet are


class DraftingAhead:
    """One round's reading ahead, a forward at a time."""

    def __init__(self, drafter: Drafter, session: DraftSession, max_depth: int, breadth: int) -> None:
        self._drafter = drafter
        self._session = session
        self._breadth = breadth
        self._growth = BestFirst(NODES, max_depth)
        self._tree = drafter.new_tree(session, NODES, max_depth)
        self._level = [ROOT]
        self._stopped = False

    def stop(self) -> None:
        """Do nothing more; a forward that runs goes on to its end. Any thread may call it."""
        self._stopped = True

    def step(self) -> bool:
        """Read the likeliest nodes that are not read yet, in one forward; False if there are none, no room, or stopped.

        Of draws, and below a root that the policy chose not to read, there are none.
        """
        if self._stopped or self._session.draws or not self._tree.is_expanded(ROOT):
            return False
        while self._level and all(map(self._tree.is_expanded, self._level)):
            self._level = self._growth.grow(self._tree, self._level)
        if not self._level or not self._drafter.has_room(self._session, self._tree, self._level):
            return False
        self._drafter.expand(self._session, self._tree, self._level, self._breadth)
        return True
