"""The draft model's state of one session, and how a commit changes it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import InitVar, dataclass, field, replace

from dynatree.common.sampling import Sampling
from dynatree.draft.policies.drawing import DEFAULT_DRAWING, Drawing
from dynatree.draft.policies.growing_tree import TrieNode
from dynatree.draft.text.translated_context import TranslatedContext
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.kv.kv_range import KVRange


@dataclass(eq=False)
class DraftSession:
    """The committed tokens, the KV slots that hold them, and the trie of the nodes read below them.

    Invariant: slots 0 to `num_cached` of the KV range `kv` hold `context[:num_cached]` in order, and slots `num_cached`
    to `num_used` hold nodes below `root`, which stands for the last committed token. `num_cached` lags behind the
    context by the tokens that the draft model has not read yet; once the root has proposals, all are read.

    Attributes:
        kv: The session's range of the KV cache.
        committed: The committed tokens, the prompt included.
        sampling: Sampling options of the target.
        vocab_size: Number of token ids that may be proposed.
        principal: The principal.
        generated: Number of committed tokens after the prompt.
        num_cached: Number of tokens of the context in the KV cache.
        num_used: Number of KV slots in use.
        rounds: Number of commits so far.
        levels: Levels of the last tree, the root's included; up to as many may be read at once for the next tree.
        drawing: Settings of the draft's distribution.
        recalls: Whether trees may have candidates from the principal's earlier completions.
        keeps: Whether later completions of the principal may have candidates from this one.
        translated: The committed text in the draft's tokens, if its tokenizer is not the target's.
        grammar: State of the request's grammar after `committed`; None allows any text.
        root: The trie's node of the last committed token.
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
    recalls: bool = True
    keeps: bool = True
    translated: TranslatedContext | None = None
    grammar: InitVar[GrammarState | None] = None
    root: TrieNode = field(init=False)

    def __post_init__(self, grammar: GrammarState | None) -> None:
        self.root = TrieNode(self.committed[-1], grammar=grammar)

    @property
    def context(self) -> Sequence[int]:
        """The committed text as the draft model reads it: the committed tokens, or their text in its own tokens."""
        return self.committed if self.translated is None else self.translated.token_ids

    def draft_id(self, token: int) -> int:
        """The draft's token for a token of the target; 0 if it has none, so that nothing below it is proposed."""
        return token if self.translated is None else max(self.translated.translation.draft_id(token), 0)

    @property
    def draws(self) -> bool:
        """Whether continuations are random draws, instead of the best by a ranking."""
        return self.sampling.residual or (self.sampling.greedy and self.drawing.temperature is not None)

    @property
    def drafting(self) -> Sampling:
        """Sampling options of the draft's distribution: the target's, at the draft's temperature."""
        if self.drawing.temperature is None:
            return self.sampling
        return replace(self.sampling, temperature=self.drawing.temperature)

    @property
    def speculative_slots(self) -> int:
        """Number of slots that hold nodes below the root."""
        return self.num_used - self.num_cached

    def commit(self, token_ids: Sequence[int], most_kept: int) -> list[int]:
        """Append committed tokens and re-root the trie.

        The slots of nodes on the committed path join the cached prefix. The slots of the nodes below it stay if these
        are at most `most_kept`. All other slots are freed.

        Returns:
            The slots to move after the old cached prefix, in their new order; the caller moves them.
        """
        start, behind = self.num_cached, len(self.context) + len(token_ids)
        path, node = self._follow(token_ids)
        self.committed.extend(token_ids)
        self.generated += len(token_ids)
        self.rounds += 1
        if self.draws:  # draws must not be used in two trees, so the root is read again
            path, node = path[: len(token_ids) - 1], None
        if self.translated is not None:
            same = self.translated.push(token_ids)
            if not same == behind == len(self.context):  # the context is not the old one with the path's tokens
                same = min(same, len(self.context) - 1)  # its last token is read again, as the root
                path, node = path[: max(same - start, 0)], None
                start = min(start, same)
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
        if node is None:
            grammar = self.root.grammar
            for token in token_ids:
                grammar = grammar and grammar.after(token)
            node = TrieNode(self.committed[-1], grammar=grammar)
        self.root = node
        return moved

    def forget_all_but(self, kept: Set[int]) -> list[int]:
        """Free the slots of all nodes below the root, except for the nodes whose identity (`id`) is in `kept`.

        Returns:
            The slots to move after the cached prefix, in their new order; the caller moves them.
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
        """Return the nodes read on the path of these tokens, and the last node if the whole path was read."""
        path: list[TrieNode] = []
        node = self.root
        if self.num_cached < len(self.context):
            return path, None
        for token in token_ids:
            node = node.child(token)
            if node.slot is None:
                return path, None
            path.append(node)
        return path, node
