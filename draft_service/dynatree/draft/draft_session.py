"""What the draft model knows of one session, and how a commit changes it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from dynatree.common.kv_range import KVRange
from dynatree.common.sampling import Sampling
from dynatree.draft.drawing import DEFAULT_DRAWING, Drawing
from dynatree.draft.growing_tree import TrieNode


@dataclass(eq=False)
class DraftSession:
    """The committed tokens, the slots of the KV arena that hold them, and the trie of what was read below them.

    Invariant: slots 0 to `num_cached` of the arena's range `kv` hold `committed[:num_cached]` in order, and slots
    `num_cached` to `num_used` hold nodes below `root`, which stands for the last committed token. `num_cached` lags
    behind the committed tokens by those that the draft model has not read yet; once the
    root has proposals all are read.

    Attributes:
        sampling: How the target chooses.
        vocab_size: Tokens that may be proposed.
        principal: On whose behalf.
        generated: Committed tokens that are not the prompt's.
        rounds: Commits so far.
        levels: That the last tree had, the root's included; as many may be read at once for the next.
        drawing: How the policy has the draft's distribution made.
    """

    kv: KVRange
    committed: list[int]
    sampling: Sampling
    vocab_size: int
    principal: str = ""
    generated: int = 0
    num_cached: int = 0
    num_used: int = 0
    rounds: int = 0
    levels: int = 4
    drawing: Drawing = DEFAULT_DRAWING
    root: TrieNode = field(init=False)

    def __post_init__(self) -> None:
        self.root = TrieNode(self.committed[-1])

    @property
    def draws(self) -> bool:
        """Whether continuations are random draws, instead of the best by a ranking."""
        return self.sampling.residual or (self.sampling.greedy and self.drawing.temperature is not None)

    @property
    def drafting(self) -> Sampling:
        """The options by which the draft's distribution is made: the target's, at the draft's temperature."""
        if self.drawing.temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=self.drawing.temperature)

    @property
    def speculative_slots(self) -> int:
        """Slots that hold nodes below the root."""
        return self.num_used - self.num_cached

    def commit(self, token_ids: Sequence[int], most_kept: int) -> list[int]:
        """Append committed tokens and re-root the trie.

        The slots of nodes on their path join the prefix, those of at most `most_kept` nodes below it stay, others go.

        Returns:
            The slots that now belong behind the cached prefix as it was, in their new order; the caller moves them.
        """
        start = self.num_cached
        path, node = self._follow(token_ids)
        self.committed.extend(token_ids)
        self.generated += len(token_ids)
        self.rounds += 1
        if self.draws:  # draws that shaped one tree are not fresh in the next, so the root is read anew
            path, node = path[: len(token_ids) - 1], None
        kept = list(node.descendants()) if node is not None else []
        if node is not None and len(kept) > most_kept:  # leave room for the next tree
            kept = []
            node.children.clear()
        survivors = [*path, *kept]
        moved = [survivor.slot for survivor in survivors if survivor.slot is not None]
        for slot, survivor in enumerate(survivors, start=start):
            survivor.slot = slot
        self.num_cached = start + len(path)
        self.num_used = start + len(survivors)
        self.root = node if node is not None else TrieNode(self.committed[-1])
        return moved

    def forget_all_but(self, kept: Set[int]) -> list[int]:
        """Forget what was read of nodes below the root but for those of these identities (`id`).

        Returns:
            The slots that now belong behind the cached prefix, in their new order; the caller moves them.
        """
        read = list(self.root.descendants())
        stay = [node for node in read if id(node) in kept]
        moved = [node.slot for node in stay if node.slot is not None]
        for node in read:
            node.slot = None
        for slot, node in enumerate(stay, start=self.num_cached):
            node.slot = slot
        self.num_used = self.num_cached + len(stay)
        return moved

    def _follow(self, token_ids: Sequence[int]) -> tuple[list[TrieNode], TrieNode | None]:
        """The nodes read on the path of these tokens, and the last of them where all were read."""
        path: list[TrieNode] = []
        node = self.root
        if self.num_cached < len(self.committed):
            return path, None
        for token in token_ids:
            node = node.child(token)
            if node.slot is None:
                return path, None
            path.append(node)
        return path, node
