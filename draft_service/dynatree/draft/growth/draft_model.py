"""The draft model: reads nodes of a tree in one forward pass, and ranks or draws their continuations."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynatree.common.sampling import Sampling, Scheme
from dynatree.common.tree import ROOT, DraftDistribution
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Expansion
from dynatree.draft.growth.shared_tokens import SharedTokens
from dynatree.draft.policies.drawing import Drawing
from dynatree.draft.policies.growing_tree import Allowed, GrowingTree, Proposal, TrieNode
from dynatree.draft.text.translated_context import aligned
from dynatree.draft.text.translation import NONE, Translation
from dynatree.engine.engine import Engine
from dynatree.engine.forward.level_runner import KVMove, LevelRead, LevelsWanted
from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.grammar.masking import masked, packed
from dynatree.engine.kv.kv_range import KVRange
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.sampling.choosing import TokenHistories, adjusted, noise, scores, warped
from dynatree.engine.sampling.gumbel import NoiseStream, gumbel, node_of

log = logging.getLogger(__name__)

LEAST_LOG_PROB = -1e4  # lower bound, since a tree carries only finite numbers


class EngineDraftModel:
    """A `DraftModel` that runs on an engine.

    Args:
        engine: The engine.
        cache: The prefix cache; None: prefixes are not cached.
        translation: The tokens that draft and target share, if their tokenizers differ.
    """

    def __init__(
        self, engine: Engine, cache: PrefixCache | None = None, translation: Translation | None = None
    ) -> None:
        self._engine = engine
        self._shared = None if translation is None else SharedTokens.of(translation, engine.kv_cache.device)
        self._moves: list[KVMove] = []  # pending moves, which go to the device with the next levels
        self._cache = cache or PrefixCache(engine.kv_cache, enabled=False)
        self._warned = False
        self.context_length = engine.info.context_length

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """Reserve a KV range; return it, or None if too few slots are free, and its number of cached prompt tokens."""
        self._move()
        return self._cache.reserve(slots, prompt_ids, principal)

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Give back a KV range that holds these tokens."""
        self._move()
        self._cache.release(kv, token_ids, principal)

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Copy the slots, in that order, to the slots from `start` on, before the next forward pass."""
        self._moves.append(KVMove(kv, slots, start))
        if self._engine.level_runner is None or sum(each.kv is kv for each in self._moves) > 1:
            self._move()

    def _move(self) -> None:
        for each in self._moves:
            self._engine.kv_cache.move(each.kv, each.sources, each.start)
        self._moves = []

    def expand(self, expansions: Sequence[Expansion]) -> float:
        """Read the nodes of several sessions in one forward pass, set their proposals, and return the seconds.

        An engine that can read several levels at once may also read levels below the roots.
        """
        wishing = [each for each in expansions if self._reads_below(each)]
        levels = max((each.session.levels for each in wishing), default=1) - 1  # of all sessions of a call
        below, seconds = self._read_below([each for each in wishing if self._fits_below(each, levels)], levels)
        expansions = [each for each in expansions if each not in below]
        self._move()
        vocab_size = self._engine.info.vocab_size
        segments = [
            tree_segment(each.session, each.tree, each.nodes, vocab_size)
            if each.nodes
            else prompt_segment(each.session, each.tokens, vocab_size)
            for each in expansions
        ]
        if not segments:
            return seconds
        started = time.perf_counter()
        logits = self._engine.forward(segments)
        self._engine.synchronize()
        seconds += time.perf_counter() - started
        for each, rows in zip(expansions, logits, strict=True):
            if each.nodes:
                _propose(each.session, each.tree, each.nodes, rows, each.breadth, self._shared)
                self._watch(each.tree, each.nodes)
                if self._shared is not None:
                    self._shared.restrict(each.tree, each.nodes)
        return seconds

    def guesses(self, kv: KVRange, token_ids: Sequence[int]) -> list[int]:
        """Read a text of the target's tokens into an empty KV range, and return the likeliest token after each of them.

        A draft with another tokenizer reads its own tokens of the text. Some tokens of the target end where no token of
        the draft ends, or where the draft's tokens would change if the text ended there. The guess after them is NONE.
        """
        read, ends = token_ids, [*range(1, len(token_ids) + 1)]
        if self._shared is not None:
            read, ends = aligned(self._shared.translation, token_ids)
        known = [_known(token, self._engine.info.vocab_size) for token in read[: kv.size]]
        keep = [end - 1 for end in ends if 0 < end <= len(known)]
        (logits,) = self._engine.forward([Segment(kv, 0, known, range(len(known)), keep=keep)])
        if self._shared is not None:
            logits = self._shared.gathered(logits.float())
        best = dict(zip(keep, logits.argmax(-1).tolist(), strict=True))
        return [best.get(end - 1, NONE) for end in ends]

    def _watch(self, tree: GrowingTree, nodes: Sequence[int]) -> None:
        """Warn once if the draft model proposes nothing, since the completions stay correct but become slow."""
        if not self._warned and any(
            not tree.node(node).proposals and tree.node(node).grammar is None for node in nodes
        ):
            self._warned = True
            log.warning("the draft model's logits are not finite (NaN or infinity); no tokens are drafted from them")

    def _reads_below(self, expansion: Expansion) -> bool:
        """Whether levels below an expansion's root may be read with it."""
        level_runner, session = self._engine.level_runner, expansion.session
        return (
            level_runner is not None
            and expansion.nodes[:1] == [ROOT]
            and session.levels > 1
            and expansion.breadth <= level_runner.breadth
            and not session.draws
            and session.translated is None
            and session.root.grammar is None
            and session.sampling.is_plain
            and (session.sampling.greedy or session.sampling.scheme is Scheme.GUMBEL)
        )

    def _fits_below(self, expansion: Expansion, levels: int) -> bool:
        """Whether a session has room for `levels` levels below an expansion, in its context and in its KV range."""
        level_runner, session = self._engine.level_runner, expansion.session
        assert level_runner is not None
        return (
            len(session.committed) + level_runner.most(levels) <= self.context_length
            and session.num_used + expansion.tokens + level_runner.slots(levels) <= session.kv.size
        )

    def _read_below(self, expansions: Sequence[Expansion], levels: int) -> tuple[Sequence[Expansion], float]:
        """Read expansions and `levels` levels below each; return the expansions that were read, and the seconds."""
        if not expansions:
            return (), 0.0
        vocab_size = self._engine.info.vocab_size
        wanted = []
        for each in expansions:
            session = each.session
            segment = tree_segment(session, each.tree, each.nodes, vocab_size)
            root = len(segment.token_ids) - len(each.nodes)
            choosing = Choosing([-1] * len(segment.token_ids), session.drafting.temperature, session.sampling.seed)
            wanted.append(LevelsWanted(segment, root, choosing, min(session.vocab_size, vocab_size)))
        started = time.perf_counter()
        read = self._engine.read_levels(wanted, levels, self._moves)
        seconds = time.perf_counter() - started
        if read is None:
            return (), 0.0
        self._moves = []
        for each, asked, found in zip(expansions, wanted, read, strict=True):
            given = found.given
            rows = zip(each.nodes, given.ids[asked.root :], given.log_probs[asked.root :], strict=True)
            for node, ids, log_probs in rows:
                each.tree.node(node).proposals = _proposals(ids[: each.breadth], log_probs)
            self._watch(each.tree, each.nodes)
            each.session.num_used = _plant(each.tree.node(ROOT), found.levels, asked.segment.stop, each.breadth)
        return expansions, seconds


def _plant(root: TrieNode, levels: Sequence[LevelRead], slot: int, breadth: int) -> int:
    """Add levels that were read below a root to the trie; their nodes take the slots from `slot` on.

    Returns:
        The slot after the last node.
    """
    above = [root]
    for level in levels:
        nodes = []
        columns = (level.token_ids.tolist(), level.parents.tolist(), level.ids, level.log_probs)
        for token, parent, ids, log_probs in zip(*columns, strict=True):
            node = above[parent].child(token)
            if node.slot is None:
                node.slot, node.proposals = slot, _proposals(ids[:breadth], log_probs)
            nodes.append(node)
            slot += 1
        above = nodes
    return slot


def _proposals(ids: NDArray[np.int32], log_probs: NDArray[np.floating]) -> tuple[Proposal, ...]:
    """Proposals from token ids and log-probabilities; none if the draft's numbers are not finite."""
    if math.isnan(log_probs[0]):
        return ()
    pairs = zip(ids.tolist(), log_probs.tolist(), strict=False)
    return tuple(Proposal(token, min(max(log_prob, LEAST_LOG_PROB), 0.0)) for token, log_prob in pairs)


def prompt_segment(session: DraftSession, tokens: int, vocab_size: int) -> Segment:
    """Segment of the next `tokens` committed tokens that are not cached; their logits are not kept."""
    read = range(session.num_cached, session.num_cached + tokens)
    token_ids = [_known(session.context[position], vocab_size) for position in read]
    return Segment(session.kv, session.num_cached, token_ids, read, keep=[])


def _known(token: int, vocab_size: int) -> int:
    """Return the token, or 0 if the draft cannot embed it: the target's vocabulary may be padded further."""
    return token if token < vocab_size else 0


def tree_segment(session: DraftSession, tree: GrowingTree, nodes: Sequence[int], vocab_size: int) -> Segment:
    """Return the segment of nodes, ancestors first, after the slots in use.

    Each node attends to the committed prefix, its ancestors and itself. If the first node is the root, the segment
    begins with the committed tokens that are not cached.
    """
    uncached = session.context[session.num_cached :] if nodes[0] == ROOT else []
    below = nodes[1:] if uncached else nodes
    token_ids = [*uncached, *(session.draft_id(tree.node(node).token) for node in below)]
    token_ids = [_known(token, vocab_size) for token in token_ids]
    root = len(session.context) - 1
    positions = [*range(session.num_cached, session.num_cached + len(uncached))]
    positions += [root + tree.depth(node) for node in below]
    keep = range(max(len(uncached) - 1, 0), len(token_ids))
    mask = _mask(session, tree, len(uncached), below) if below else None
    return Segment(session.kv, session.num_used, token_ids, positions, mask=mask, keep=keep)


def _mask(session: DraftSession, tree: GrowingTree, uncached: int, below: Sequence[int]) -> Tensor:
    """Attention mask over the slots after the cached prefix: bool `[tokens, speculative slots + tokens]`."""
    behind = session.speculative_slots
    tokens = uncached + len(below)
    mask = torch.zeros(tokens, behind + tokens, dtype=torch.bool)
    visible = mask.numpy()  # shares memory; NumPy assigns elements faster
    for index in range(uncached):
        visible[index:, behind + index] = True
    slots = {tree.node(node): slot for slot, node in enumerate(below, start=session.num_used + uncached)}
    for index, node in enumerate(below, start=uncached):
        for above in tree.path(node):
            slot = slots.get(above, above.slot)
            assert slot is not None, "a node's ancestors are read before it, or with it"
            visible[index, slot - session.num_cached] = True
    return mask


def _propose(
    session: DraftSession,
    tree: GrowingTree,
    nodes: Sequence[int],
    logits: Tensor,
    breadth: int,
    shared: SharedTokens | None,
) -> None:
    """Set the best `breadth` continuations of each node from the logits `[nodes, vocabulary]`."""
    sampling = session.drafting
    logits, known = (logits, None) if shared is None else shared.logits(logits.float(), sampling)
    logits = logits[:, : session.vocab_size].float()
    grammars = [tree.node(node).grammar for node in nodes]
    logits = _masked(logits, grammars)
    paths: list[list[int]] = []
    if sampling.needs_history or session.draws:
        paths = [[above.token for above in reversed(tree.path(node))] for node in nodes]
    histories = TokenHistories(session.committed, paths, session.generated) if sampling.needs_history else None
    positions = [len(session.committed) + tree.depth(node) for node in nodes]
    if session.draws:
        noise_of = [
            partial(
                gumbel, sampling.seed, position, stream=NoiseStream.DRAFT, round_=session.rounds, node=node_of(path)
            )
            for position, path in zip(positions, paths, strict=True)
        ]
        drawn = _draw(adjusted(logits, sampling, histories), noise_of, sampling, breadth, session.drawing)
        for node, (distribution, draws) in zip(nodes, drawn, strict=True):
            tree.node(node).candidates, tree.node(node).proposals = distribution, draws
    else:
        every = _rank(logits, positions, sampling, histories, breadth, known)
        for node, grammar, ranked in zip(nodes, grammars, every, strict=True):
            if grammar is not None:  # fewer tokens than `breadth` may be allowed
                ranked = tuple(each for each in ranked if each.log_prob > LEAST_LOG_PROB)
            tree.node(node).proposals = ranked


def _masked(logits: Tensor, grammars: Sequence[Allowed | None]) -> Tensor:
    """Return logits `[rows, vocabulary]` with -inf for the tokens that each row's grammar forbids."""
    return masked(logits, packed(grammars, logits.shape[-1], logits.device)) if any(grammars) else logits


def _rank(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sampling,
    histories: TokenHistories | None,
    breadth: int,
    known: Tensor | None,
) -> list[tuple[Proposal, ...]]:
    """Rank the best `breadth` continuations of each row as the target ranks, with the probability of each.

    When sampling, both sides perturb their logits with the same noise, so the draft's best perturbed tokens are its
    best guesses of the target's sample (drafter-invariant coupling). The log-probability of a guess is the log-softmax
    of the perturbed logits: this softmax allows for about the difference between the logits of draft and target. With
    independent noise, the draft knows only the token's probability. `known` is the log-probability, `[rows, 1]`, that
    the draft's next token is among those of the logits; None: it always is.
    """
    if sampling.greedy or sampling.scheme is Scheme.GUMBEL:
        ranking = scores(logits, positions, sampling, histories)
        chances = ranking.log_softmax(-1)
    else:
        chances = warped(adjusted(logits, sampling, histories), sampling).log_softmax(-1)
        ranking = chances + noise(logits, positions, sampling.seed, NoiseStream.DRAFT)
    chances = chances if known is None else chances + known
    best = ranking.topk(min(breadth, logits.shape[-1]), dim=-1).indices
    both = torch.stack((best.double(), chances.gather(-1, best).double())).cpu().numpy()  # one copy from the device
    return [_proposals(ids, values) for ids, values in zip(both[0].astype(np.int32), both[1], strict=True)]


def _draw(
    logits: Tensor,
    noise_of: Sequence[Callable[[int], Tensor]],
    sampling: Sampling,
    breadth: int,
    drawing: Drawing,
) -> list[tuple[DraftDistribution | None, tuple[Proposal, ...]]]:
    """Draw up to `breadth` continuations of each row from its distribution, truncated to `drawing.candidates` tokens.

    With replacement, each draw is the argmax of the log-probabilities plus fresh Gumbel noise. Without replacement, the
    draws are the top of the log-probabilities plus one row of noise, in descending order (Gumbel-top-k). A row that is
    not finite has no distribution and no draws.

    `noise_of` returns the requested number of noise values for each row. They are independent of those of every other
    node and every other round: whether a draw is kept may depend on the draws of other nodes, but must not depend on
    its own token (docs/explanation/exactness.md).
    """
    size = min(drawing.candidates, logits.shape[-1])
    best = warped(logits, sampling).topk(size, dim=-1)
    every = best.values.softmax(-1).cpu().numpy()  # NumPy takes less than torch for a row of few numbers
    rows: list[tuple[DraftDistribution | None, tuple[Proposal, ...]]] = []
    for noise_of_row, probs, ids in zip(noise_of, every, best.indices.tolist(), strict=True):
        count = int(np.count_nonzero(probs > 0))  # 0 if the row is NaN
        if not count:
            rows.append((None, ()))
            continue
        log_probs = np.log(probs[:count])
        each = breadth if drawing.replacement else 1
        perturbed = log_probs + noise_of_row(each * count).numpy().reshape(each, count)
        places = perturbed.argmax(-1) if drawing.replacement else np.argsort(-perturbed[0])[:breadth]
        chances = log_probs.clip(LEAST_LOG_PROB, 0.0).tolist()
        distribution = DraftDistribution(tuple(ids[:count]), tuple(probs[:count].tolist()))
        draws = tuple(Proposal(ids[place], chances[place]) for place in places.tolist())
        rows.append((distribution, draws))
    return rows
