"""Drafting ahead: while the verify service checks a tree, the draft model reads likely nodes of the next tree.

The next tree is rooted at some node of this session's trie: a leaf that was accepted, or a child that was not sent. The
draft model reads the likeliest of those nodes and their descendants. After a hit the next tree needs no forward pass
for them; after a miss the re-rooting of the commit forgets them. The committed tokens do not depend on drafting ahead.
(PEARL, Liu et al. 2025; Saguaro, Kumar et al. 2026, keep a cache of outcomes to the same end.)
"""

from __future__ import annotations

from dynatree.common.tree import ROOT
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies.best_first import BestFirst

NODES = 64  # likeliest nodes considered; those not read yet are read


class DraftingAhead:
    """Drafting ahead of one round, one forward pass at a time."""

    def __init__(self, drafter: Drafter, session: DraftSession, max_depth: int, breadth: int) -> None:
        self._drafter = drafter
        self._session = session
        self._breadth = breadth
        self._growth = BestFirst(NODES, max_depth)
        self._tree = drafter.new_tree(session, NODES, max_depth)
        self._level = [ROOT]
        self._stopped = False

    def stop(self) -> None:
        """Start no further forward pass; a running one finishes. Any thread may call this."""
        self._stopped = True

    def step(self) -> bool:
        """Read the likeliest unread nodes in one forward pass; False if there are none, no room, or after `stop`.

        A session of random draws has no such nodes, nor has a root that the policy chose not to read.
        """
        if self._stopped or self._session.draws or not self._tree.is_expanded(ROOT):
            return False
        while self._level and all(map(self._tree.is_expanded, self._level)):
            self._level = self._growth.grow(self._tree, self._level)
        if not self._level or not self._drafter.has_room(self._session, self._tree, self._level):
            return False
        self._drafter.expand(self._session, self._tree, self._level, self._breadth)
        return True
