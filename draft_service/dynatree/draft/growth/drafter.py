"""The drafter: grows a session's tree a level at a time, and re-roots it after each commit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dynatree.common.errors import ServiceBusyError
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.round import Growth
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.policies import Policy
from dynatree.draft.policies.drawing import DEFAULT_DRAWING, Drawing
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.text.translated_context import TranslatedContext
from dynatree.draft.text.translation import Translation
from dynatree.engine.grammar.state import GrammarState
from dynatree.engine.kv.kv_range import KVRange

DRAFT_TOKENS_PER_TOKEN = 2  # for each token of a target with another tokenizer; a longer context is not drafted for
MANY_TOKENS = 32  # of a prompt in one forward pass, from which the time of a token follows
READINGS = 4  # such forward passes, of which the last are looked at
PIECE = 128  # prompt tokens per forward pass, which it shares with the tree levels of other sessions


@dataclass(frozen=True)
class Expansion:
    """Nodes of one session to read, parents first; each gets its `breadth` best continuations.

    An expansion of the root also reads the unread committed tokens. An expansion without nodes reads the next `PIECE`
    of those tokens.
    """

    session: DraftSession
    tree: GrowingTree
    nodes: Sequence[int]
    breadth: int

    @property
    def unread(self) -> int:
        """Number of committed tokens to read, without the root."""
        if not self.nodes:
            return PIECE
        unread = len(self.session.context) - self.session.num_cached
        return max(unread - 1, 0) if ROOT in self.nodes else 0

    @property
    def tokens(self) -> int:
        """Number of tokens that the expansion adds to a forward pass."""
        return len(self.nodes) + self.unread


@dataclass(frozen=True)
class Spent:
    """Seconds of one expansion. Sessions that share a forward pass split its time in proportion to their tokens.

    Attributes:
        forward: This session's share of the forward pass.
        total: This session's share of the forward pass and of ranking the continuations.
        others: The other sessions' shares of the forward pass.
    """

    forward: float
    total: float
    others: float = 0.0


T = TypeVar("T")
Growing = Generator[Expansion, Spent, T]  # yields one expansion after the other, and returns a T


class DraftModel(Protocol):
    """Reads tokens and proposes continuations: the draft model with its KV cache, or a recording of one.

    Attributes:
        context_length: The longest sequence it can read, in tokens.
    """

    context_length: int

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """Reserve a KV range; return it, or None if too few slots are free, and its number of cached prompt tokens."""

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Give back a KV range that holds these tokens."""

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Copy the slots, in that order, to the slots from `start` on."""

    def expand(self, expansions: Sequence[Expansion]) -> float:
        """Read the nodes of several sessions in one forward pass, set their proposals, and return its seconds.

        Unread committed tokens are read with the root. The tokens take the slots from `session.num_used` on. A model
        that also reads nodes below the root puts them in the next slots, and sets `session.num_used` behind them.
        """


class Drafter:
    """Opens, grows, commits and closes sessions on the draft model. Not thread-safe: only one thread may call it.

    Args:
        model: The draft model; its KV cache needs `2 * max_tree_nodes` speculative slots per session.
        max_tree_nodes: The largest tree of any policy.
        histories: The completions of each principal; None keeps none.
        translation: The tokens that draft and target share, if their tokenizers differ.
    """

    def __init__(
        self,
        model: DraftModel,
        max_tree_nodes: int,
        histories: SuffixIndexes | None = None,
        translation: Translation | None = None,
    ) -> None:
        self._model = model
        self._max_tree_nodes = max_tree_nodes
        self._histories = histories or SuffixIndexes()
        self._translation = translation
        self._token_seconds: deque[float] = deque([0.0], READINGS)  # seconds of a token in prefills

    def slots(self, prompt_tokens: int, limit: int) -> int:
        """KV slots of a session of at most `limit` tokens, prompt included."""
        if prompt_tokens >= self._model.context_length:
            return 1  # nothing is ever drafted, so nothing is read
        tokens = limit if self._translation is None else DRAFT_TOKENS_PER_TOKEN * limit
        return min(tokens, self._model.context_length) + 2 * self._max_tree_nodes

    def open(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        vocab_size: int,
        limit: int | None = None,
        principal: str = "",
        generated: int = 0,
        drawing: Drawing = DEFAULT_DRAWING,
        *,
        recalls: bool = True,
        keeps: bool = True,
        grammar: GrammarState | None = None,
    ) -> DraftSession:
        """Reserve a KV range for a session; nothing is read yet.

        Args:
            prompt_ids: The prompt, followed by the tokens that a resumed completion already has.
            sampling: Sampling options of the target.
            vocab_size: Number of token ids that may be proposed.
            limit: Largest length of the session, prompt included; None: the context length.
            principal: The principal, whose earlier sessions may provide a cached prefix.
            generated: Number of tokens at the end of `prompt_ids` that the completion has generated.
            drawing: Settings of the draft's distribution.
            recalls: Whether trees may have candidates from the principal's earlier completions.
            keeps: Whether later completions of the principal may have candidates from this one.
            grammar: State of the request's grammar after `prompt_ids`; None allows any text.

        Raises:
            ServiceBusyError: Too few slots are free.
        """
        slots = self.slots(len(prompt_ids), self._model.context_length if limit is None else limit)
        translated = None if self._translation is None else TranslatedContext(self._translation, prompt_ids)
        context = prompt_ids if translated is None else translated.token_ids
        readable = context if len(context) < self._readable(slots, translated) else ()  # a cached prefix fits
        kv, cached = self._model.reserve(slots, readable, principal)
        if kv is None:
            raise ServiceBusyError("the draft service's KV cache is full; try again later")
        return DraftSession(
            kv,
            list(prompt_ids),
            sampling,
            vocab_size,
            principal,
            generated,
            num_cached=cached,
            num_used=cached,
            drawing=drawing,
            recalls=recalls,
            keeps=keeps,
            translated=translated,
            grammar=grammar,
        )

    def close(self, session: DraftSession) -> None:
        """Give back the session's KV range, and keep its tokens as the principal's if the session allows it.

        The completion may be cut short.
        """
        self._model.release(session.kv, session.context[: session.num_cached], session.principal)
        if session.keeps and session.generated:
            self._histories.add(session.principal, session.committed)

    def prefilling(self, session: DraftSession, policy: Policy, tokens: int | None = None) -> Growing[None]:
        """Read the committed tokens that are not cached yet, if the policy wants that: the prefill of the draft model.

        Args:
            session: The session.
            policy: Its policy.
            tokens: Most tokens of the completion that will follow; None to read the tokens in any case.
        """
        readable = self._readable(session.kv.size, session.translated)
        if policy.breadth and session.num_cached < len(session.context) < readable:
            tree = self.new_tree(session, 0, 0)
            if tokens is not None and not policy.reads_prompt(tree.catch_up_seconds, tokens):
                return
            yield from self._reading(session, tree, [ROOT], policy.breadth)  # even if a grammar forces the next token

    def growing(self, session: DraftSession, policy: Policy, max_depth: int, max_nodes: int) -> Growing[Growth]:
        """Grow a tree below the last committed token, at most `max_depth` deep and with at most `max_nodes` nodes.

        Each level with unread nodes takes one expansion. Nodes that the draft model has read before, in this round or
        before the last re-rooting, cost nothing. The tree is the same either way.
        """
        began = time.perf_counter()
        spent = []
        waited = 0.0  # seconds of forward passes, other sessions' shares included
        max_depth = min(max_depth, self.reach(session))
        tree = self.new_tree(session, max_nodes, max_depth)
        level = policy.start(tree) if max_depth > 0 else []
        levels = 0
        while level and (self.has_room(session, tree, level) or self._makes_room(session, tree, level, policy)):
            asked = time.perf_counter()
            spent += yield from self._expanding(session, tree, level, policy.breadth)
            waited += time.perf_counter() - asked
            level = [node for node in policy.grow(tree, level) if tree.depth(node) < max_depth]
            levels += 1
        if levels:
            session.levels = levels
        frozen = tree.freeze(policy.select(tree), distributions=session.sampling.residual)
        worked = sum(each.total for each in spent)
        return Growth(
            frozen,
            seconds=time.perf_counter() - began - waited + worked,
            forward_seconds=sum(each.forward for each in spent),
            draft_forwards=len(spent),
            waited_seconds=max(waited - worked, 0.0),
            others_seconds=sum(each.others for each in spent),
        )

    def grow(self, session: DraftSession, policy: Policy, max_depth: int, max_nodes: int) -> Growth:
        """Do `growing` for one session alone."""
        return self.alone(self.growing(session, policy, max_depth, max_nodes))

    def prefill(self, session: DraftSession, policy: Policy) -> None:
        """Do `prefilling` for one session alone."""
        self.alone(self.prefilling(session, policy))

    def alone(self, growing: Growing[T]) -> T:
        """Run a generator of expansions to its end, with one forward pass for each expansion."""
        try:
            expansion = next(growing)
            while True:
                (spent,) = self.expand_all([expansion])
                expansion = growing.send(spent)
        except StopIteration as end:
            result: T = end.value
            return result

    def expand_all(self, expansions: Sequence[Expansion]) -> list[Spent]:
        """Read the nodes of several sessions in one forward pass, and return the seconds of each expansion."""
        started = time.perf_counter()
        forward = self._model.expand(expansions)
        total = time.perf_counter() - started
        shares = [each.tokens for each in expansions]
        tokens = sum(shares)
        if sum(each.unread for each in expansions) >= MANY_TOKENS:
            self._token_seconds.append(forward / tokens)
        parts = [share / tokens for share in shares]
        return [Spent(forward * part, total * part, forward * (1.0 - part)) for part in parts]

    def commit(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """Append committed tokens: slots on their path join the cached prefix, slots below stay, the rest is freed."""
        start = session.num_cached
        self._model.move(session.kv, session.commit(token_ids, most_kept=self._max_tree_nodes), start)

    def reach(self, session: DraftSession) -> int:
        """Depth of the deepest node that the draft model can propose; 0 or less if its context is used up."""
        # a node at depth d is proposed by the token at position context + d - 2, which the draft's context must hold
        return self._readable(session.kv.size, session.translated) + 1 - len(session.context)

    def _readable(self, slots: int, translated: TranslatedContext | None) -> int:
        """Return the length of the longest context that the draft model can read in a KV range of `slots` slots."""
        if translated is None:
            return self._model.context_length
        return min(self._model.context_length, slots - 2 * self._max_tree_nodes)

    def new_tree(self, session: DraftSession, max_nodes: int, max_depth: int) -> GrowingTree:
        """An empty tree below the session's root."""
        return GrowingTree(
            session.root,
            session.committed,
            max_nodes=min(max_nodes, self._max_tree_nodes),
            max_depth=max_depth,
            sampled=session.draws,
            replacement=session.drawing.replacement,
            earlier=self._histories.of(session.principal) if session.recalls else None,
            vocab_size=session.vocab_size,
            catch_up_seconds=max(len(session.context) - session.num_cached - 1, 0) * min(self._token_seconds),
        )

    def has_room(self, session: DraftSession, tree: GrowingTree, level: Sequence[int]) -> bool:
        """Whether the session's range has slots for a level's unread nodes."""
        unread = sum(node != ROOT for node in self._unread(session, tree, level))
        return session.speculative_slots + unread <= 2 * self._max_tree_nodes

    def _makes_room(self, session: DraftSession, tree: GrowingTree, level: Sequence[int], policy: Policy) -> bool:
        """Free the slots of nodes that will not be sent, to make room for the next level; return whether there is room.

        The level, its ancestors and the policy's selection keep their slots. Growth ends at a level without room. If
        the selection, which is no larger than a tree, includes the level, there is always room. That holds for draws,
        and must: the free room depends on the drawn tokens, and the shape of a tree must not.
        """
        kept = set(policy.select(tree))
        for node in level:
            while node != ROOT and node not in kept:
                kept.add(node)
                node = tree.parent(node)
        start = session.num_cached
        moved = session.forget_all_but({id(tree.node(node)) for node in kept})
        self._model.move(session.kv, moved, start)
        return self.has_room(session, tree, level)

    def expand(self, session: DraftSession, tree: GrowingTree, level: Sequence[int], breadth: int) -> None:
        """Read the nodes of a level that have no proposals yet, in one forward pass."""
        self.alone(self._expanding(session, tree, level, breadth))

    def _unread(self, session: DraftSession, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """The nodes to read before all nodes of a level have proposals, parents first.

        A node may have proposals without a slot: a grammar gave it its only one, or its slot was freed to make room
        (`_makes_room`). It is read, or read again, together with the first node below it that is read.
        """
        wanted = {node for node in level if not tree.is_expanded(node)}
        for node in sorted(wanted):
            while node != ROOT:
                node = tree.parent(node)
                unread = session.num_cached < len(session.context) if node == ROOT else tree.node(node).slot is None
                if not unread:
                    break
                wanted.add(node)
        return sorted(wanted)

    def _expanding(
        self, session: DraftSession, tree: GrowingTree, level: Sequence[int], breadth: int
    ) -> Growing[list[Spent]]:
        """Read the nodes of a level that have no proposals yet, if any, and return the seconds of each expansion."""
        unread = self._unread(session, tree, level)
        return (yield from self._reading(session, tree, unread, breadth)) if unread else []

    def _reading(
        self, session: DraftSession, tree: GrowingTree, unread: Sequence[int], breadth: int
    ) -> Growing[list[Spent]]:
        """Read nodes, and return the seconds of each expansion.

        A long prompt is read in pieces, so that other sessions do not wait for the whole prefill.
        """
        spent = []
        while ROOT in unread and len(session.context) - session.num_cached > PIECE and not session.speculative_slots:
            spent.append((yield Expansion(session, tree, (), breadth)))
            session.num_cached += PIECE
            session.num_used = session.num_cached
        start = session.num_used + len(session.context) - session.num_cached if ROOT in unread else session.num_used
        spent.append((yield Expansion(session, tree, unread, breadth)))
        session.num_cached = len(session.context)
        below = [node for node in unread if node != ROOT]
        for slot, node in enumerate(below, start=start):
            tree.node(node).slot = slot
        session.num_used = max(session.num_used, start + len(below))  # the model may have read more
        return spent
