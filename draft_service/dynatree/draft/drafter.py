"""The drafter: grows a session's tree with one draft forward a level, and re-roots it after each commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from dynatree.common.errors import ServiceBusyError
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT
from dynatree.draft.draft_session import DraftSession
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies import Policy
from dynatree.draft.round import Growth


class DraftModel(Protocol):
    """What reads tokens and says what may follow them: the draft model behind its KV arena, or a recording of it.

    Attributes:
        context_length: The longest sequence it can read, in tokens.
    """

    context_length: int

    def allocate(self) -> int | None:
        """A free arena row, or None when every row is owned."""

    def free(self, kv_row: int) -> None:
        """Give an arena row back."""

    def move(self, kv_row: int, slots: Sequence[int], start: int) -> None:
        """Copy the slots, in that order, to slots `start` onwards."""

    def expand(self, session: DraftSession, tree: GrowingTree, nodes: Sequence[int], breadth: int) -> float:
        """Read nodes, parents first, in one forward, and set their proposals; returns its seconds.

        Unread committed tokens are read with the root. What is read takes the slots from `session.num_used` on.
        """


class Drafter:
    """Opens, grows, commits and closes sessions on the draft model. Not thread-safe: one thread calls it.

    Args:
        model: The draft model; its arena needs `2 * max_tree_nodes` speculative slots a session.
        max_tree_nodes: The largest tree of any policy.
    """

    def __init__(self, model: DraftModel, max_tree_nodes: int) -> None:
        self._model = model
        self._max_tree_nodes = max_tree_nodes

    def open(self, prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int) -> DraftSession:
        """Take a free arena row; nothing is read yet. `vocab_size` bounds the tokens that may be proposed.

        Raises:
            ServiceBusyError: Every session is in use.
        """
        kv_row = self._model.allocate()
        if kv_row is None:
            raise ServiceBusyError("every session of the draft service is in use; try again later")
        return DraftSession(kv_row, list(prompt_ids), sampling, vocab_size)

    def close(self, session: DraftSession) -> None:
        """Free the session's arena row."""
        self._model.free(session.kv_row)

    def read(self, session: DraftSession, policy: Policy) -> None:
        """Read the committed tokens that are not cached yet: the prompt, while the target reads it too."""
        if policy.breadth and session.num_cached < len(session.committed) <= self._model.context_length:
            self.expand(session, self.new_tree(session, 0, 0), [ROOT], policy.breadth)

    def grow(self, session: DraftSession, policy: Policy, max_depth: int, max_nodes: int) -> Growth:
        """Grow a tree below the last committed token, at most `max_depth` deep and of at most `max_nodes` nodes.

        One draft forward for each level that has nodes which the draft model has not read yet. What it has read, in
        this round or before the last re-rooting, costs nothing, and the tree is the same either way.
        """
        started = time.perf_counter()
        forwards = []
        max_depth = min(max_depth, self.reach(session))
        tree = self.new_tree(session, max_nodes, max_depth)
        level = policy.start(tree) if max_depth > 0 else []
        while level and self.has_room(session, tree, level):
            if seconds := self.expand(session, tree, level, policy.breadth):
                forwards.append(seconds)
            level = [node for node in policy.grow(tree, level) if tree.depth(node) < max_depth]
        frozen = tree.freeze(policy.select(tree))
        return Growth(frozen, time.perf_counter() - started, sum(forwards), draft_forwards=len(forwards))

    def commit(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Append committed tokens: slots on their path join the cached prefix, those below stay, others go."""
        start = session.num_cached
        self._model.move(session.kv_row, session.commit(token_ids, most_kept=self._max_tree_nodes), start)

    def reach(self, session: DraftSession) -> int:
        """The deepest node that the draft model can propose; 0 or less where it has no context left."""
        # a node at depth d is proposed by a token at position committed + d - 2, which the draft must still embed
        return self._model.context_length + 1 - len(session.committed)

    def new_tree(self, session: DraftSession, max_nodes: int, max_depth: int) -> GrowingTree:
        """An empty tree below the session's root."""
        return GrowingTree(
            session.root,
            session.committed,
            max_nodes=min(max_nodes, self._max_tree_nodes),
            max_depth=max_depth,
            sampled=session.sampling.residual,
        )

    def has_room(self, session: DraftSession, tree: GrowingTree, level: Sequence[int]) -> bool:
        """Whether the session's arena row has slots for a level's unread nodes."""
        unread = sum(not tree.is_expanded(node) for node in level if node != ROOT)
        return session.speculative_slots + unread <= 2 * self._max_tree_nodes

    def expand(self, session: DraftSession, tree: GrowingTree, level: Sequence[int], breadth: int) -> float:
        """Read the nodes of a level that have no proposals yet, in one forward; returns its seconds."""
        unread = [node for node in level if not tree.is_expanded(node)]
        if not unread:
            return 0.0
        start = session.num_used + len(session.committed) - session.num_cached if ROOT in unread else session.num_used
        seconds = self._model.expand(session, tree, unread, breadth)
        session.num_cached = len(session.committed)
        below = [node for node in unread if node != ROOT]
        for slot, node in enumerate(below, start=start):
            tree.node(node).slot = slot
        session.num_used = start + len(below)
        return seconds
