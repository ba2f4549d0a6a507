"""The draft model: reads the nodes of a tree in one forward, and ranks or draws what may follow them."""

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

from dynatree.common.engine import Choosing, Engine, KVMove, LevelRead, LevelsWanted, Segment
from dynatree.common.gumbel import Stream, gumbel, node_of
from dynatree.common.kv_range import KVRange
from dynatree.common.prefix_cache import PrefixCache
from dynatree.common.sampling import (
    Histories,
    Sampling,
    Scheme,
    adjusted,
    noise,
    scores,
    warped,
)
from dynatree.common.tree import ROOT, DraftDistribution
from dynatree.draft.draft_session import DraftSession
from dynatree.draft.drafter import Expansion
from dynatree.draft.drawing import Drawing
from dynatree.draft.growing_tree import GrowingTree, Proposal, TrieNode

log = logging.getLogger(__name__)

LEAST_LOG_PROB = -1e4  # a tree carries finite numbers only


class EngineDraftModel:
    """A `DraftModel` that runs on an engine."""

    def __init__(self, engine: Engine, cache: PrefixCache | None = None) -> None:
        self._engine = engine
        self._moves: list[KVMove] = []  # that go to the device with the next levels
        self._cache = cache or PrefixCache(engine.arena, enabled=False)
        self._warned = False
        self.context_length = engine.info.context_length

    def reserve(self, slots: int, prompt_ids: Sequence[int], principal: str) -> tuple[KVRange | None, int]:
        """A range of the arena, and how many tokens of the prompt it holds; None where too few slots are free."""
        self._move()
        return self._cache.reserve(slots, prompt_ids, principal)

    def release(self, kv: KVRange, token_ids: Sequence[int], principal: str) -> None:
        """Give back a range that holds these tokens."""
        self._move()
        self._cache.release(kv, token_ids, principal)

    def move(self, kv: KVRange, slots: Sequence[int], start: int) -> None:
        """Copy the slots, in that order, to slots `start` onwards, before anything reads them."""
        self._moves.append(KVMove(kv, slots, start))
        if self._engine.reader is None or sum(each.kv is kv for each in self._moves) > 1:
            self._move()

    def _move(self) -> None:
        for each in self._moves:
            self._engine.arena.move(each.kv, each.sources, each.start)
        self._moves = []

    def expand(self, expansions: Sequence[Expansion]) -> float:
        """Read the nodes of several sessions in one forward, and set their proposals; returns its seconds.

        Where the engine reads several levels at once, those below roots that are read may come with them.
        """
        below, seconds = self._read_below([each for each in expansions if self._reads_below(each)])
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
                _propose(each.session, each.tree, each.nodes, rows, each.breadth)
                self._watch(each.tree, each.nodes)
        return seconds

    def _watch(self, tree: GrowingTree, nodes: Sequence[int]) -> None:
        """Warn once of a draft that proposes nothing, since its completions are right and slow."""
        if not self._warned and any(not tree.node(node).proposals for node in nodes):
            self._warned = True
            log.warning("the draft model's numbers are not finite (NaN or infinity); no tokens are drafted by such")

    def _reads_below(self, expansion: Expansion) -> bool:
        """Whether levels below an expansion's root may be read with it."""
        reader, session = self._engine.reader, expansion.session
        return (
            reader is not None
            and expansion.nodes[:1] == [ROOT]
            and session.levels > 1
            and expansion.breadth <= reader.breadth
            and not session.draws
            and session.sampling.is_plain
            and (session.sampling.greedy or session.sampling.scheme is Scheme.GUMBEL)
            and len(session.committed) + reader.most(session.levels - 1) <= self.context_length
            and session.num_used + expansion.tokens + reader.slots(session.levels - 1) <= session.kv.size
        )

    def _read_below(self, expansions: Sequence[Expansion]) -> tuple[Sequence[Expansion], float]:
        """Read expansions with levels below them; those that were read, and the seconds that it took."""
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
        levels = max(each.session.levels for each in expansions) - 1
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
    """Take levels that were read below a root into the trie; the first takes the slots from this one on.

    Returns:
        The slot behind the last.
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
    """Continuations that a tree can carry; none where the draft's numbers are not finite."""
    if math.isnan(log_probs[0]):
        return ()
    pairs = zip(ids.tolist(), log_probs.tolist(), strict=False)
    return tuple(Proposal(token, min(max(log_prob, LEAST_LOG_PROB), 0.0)) for token, log_prob in pairs)


def prompt_segment(session: DraftSession, tokens: int, vocab_size: int) -> Segment:
    """The next committed tokens that are not cached; no logits of them are kept."""
    read = range(session.num_cached, session.num_cached + tokens)
    token_ids = [_known(session.committed[position], vocab_size) for position in read]
    return Segment(session.kv, session.num_cached, token_ids, read, keep=[])


def _known(token: int, vocab_size: int) -> int:
    """The token, or 0 in place of one that the draft cannot embed: a target may be padded further."""
    return token if token < vocab_size else 0


def tree_segment(session: DraftSession, tree: GrowingTree, nodes: Sequence[int], vocab_size: int) -> Segment:
    """Nodes, ancestors first, behind the slots in use; each sees the committed prefix, its ancestors and itself.

    The root brings the committed tokens before it that are not cached.
    """
    uncached = session.committed[session.num_cached :] if nodes[0] == ROOT else []
    below = nodes[1:] if uncached else nodes
    token_ids = [*uncached, *(tree.node(node).token for node in below)]
    token_ids = [_known(token, vocab_size) for token in token_ids]
    root = len(session.committed) - 1
    positions = [*range(session.num_cached, session.num_cached + len(uncached))]
    positions += [root + tree.depth(node) for node in below]
    keep = range(max(len(uncached) - 1, 0), len(token_ids))
    mask = _mask(session, tree, len(uncached), below) if below else None
    return Segment(session.kv, session.num_used, token_ids, positions, mask=mask, keep=keep)


def _mask(session: DraftSession, tree: GrowingTree, uncached: int, below: Sequence[int]) -> Tensor:
    """Whom each token sees of the slots behind the cached prefix: bool `[tokens, speculative slots + tokens]`."""
    behind = session.speculative_slots
    tokens = uncached + len(below)
    mask = torch.zeros(tokens, behind + tokens, dtype=torch.bool)
    visible = mask.numpy()  # shares memory; element assignment is cheaper there
    for index in range(uncached):
        visible[index:, behind + index] = True
    slots = {tree.node(node): slot for slot, node in enumerate(below, start=session.num_used + uncached)}
    for index, node in enumerate(below, start=uncached):
        for above in tree.path(node):
            slot = slots.get(above, above.slot)
            assert slot is not None, "a node's ancestors are read before it, or with it"
            visible[index, slot - session.num_cached] = True
    return mask


def _propose(session: DraftSession, tree: GrowingTree, nodes: Sequence[int], logits: Tensor, breadth: int) -> None:
    """Give nodes their best `breadth` continuations, by the logits after each `[nodes, vocabulary]`."""
    sampling = session.drafting
    logits = logits[:, : session.vocab_size].float()
    paths: list[list[int]] = []
    if sampling.needs_history or session.draws:
        paths = [[above.token for above in reversed(tree.path(node))] for node in nodes]
    histories = Histories(session.committed, paths, session.generated) if sampling.needs_history else None
    positions = [len(session.committed) + tree.depth(node) for node in nodes]
    if session.draws:
        noise_of = [
            partial(gumbel, sampling.seed, position, stream=Stream.DRAFT, round_=session.rounds, node=node_of(path))
            for position, path in zip(positions, paths, strict=True)
        ]
        drawn = _draw(adjusted(logits, sampling, histories), noise_of, sampling, breadth, session.drawing)
        for node, (distribution, draws) in zip(nodes, drawn, strict=True):
            tree.node(node).candidates, tree.node(node).proposals = distribution, draws
    else:
        for node, ranked in zip(nodes, _rank(logits, positions, sampling, histories, breadth), strict=True):
            tree.node(node).proposals = ranked


def _rank(
    logits: Tensor, positions: Sequence[int], sampling: Sampling, histories: Histories | None, breadth: int
) -> list[tuple[Proposal, ...]]:
    """The best `breadth` continuations of each row, ranked as the target ranks, with the chance of each.

    When sampling, both sides perturb their logits with one noise, so the draft's best perturbed tokens are its best
    guesses of the target's sample (drafter-invariant coupling), and what it gives for each is the softmax of the
    perturbed logits: the target's differ from them by about as much as such a softmax forgives. With noise of its own
    the draft knows no more than the token's probability.
    """
    if sampling.greedy or sampling.scheme is Scheme.GUMBEL:
        ranking = scores(logits, positions, sampling, histories)
        chances = ranking.log_softmax(-1)
    else:
        chances = warped(adjusted(logits, sampling, histories), sampling).log_softmax(-1)
        ranking = chances + noise(logits, positions, sampling.seed, Stream.DRAFT)
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
    """Up to `breadth` draws of each row from its distribution, truncated to so many candidates.

    With replacement each draw maximises the log-probabilities with Gumbel noise of its own. The order of those with one
    row of noise is that of draws without replacement (Gumbel-top-k). A row that is not finite has no distribution and
    no draws.

    `noise_of` gives each row so many numbers of noise. They are independent of those of every other node and of every
    other round: whether a draw is kept may depend on what other nodes drew, and must not depend on its own token
    (docs/explanation/exactness.md).
    """
    size = min(drawing.candidates, logits.shape[-1])
    best = warped(logits, sampling).topk(size, dim=-1)
    rows: list[tuple[DraftDistribution | None, tuple[Proposal, ...]]] = []
    for noise_of_row, values, ids in zip(noise_of, best.values, best.indices.tolist(), strict=True):
        probs = values.softmax(-1)
        count = int((probs > 0).sum())  # 0 of NaN
        if not count:
            rows.append((None, ()))
            continue
        log_probs = probs[:count].log().cpu()
        each = breadth if drawing.replacement else 1
        perturbed = log_probs + noise_of_row(each * count).view(each, count)
        places = perturbed.argmax(-1) if drawing.replacement else perturbed[0].argsort(descending=True)[:breadth]
        order = places.tolist()
        distribution = DraftDistribution(tuple(ids[:count]), tuple(probs[:count].tolist()))
        draws = tuple(Proposal(ids[place], max(min(log_probs[place].item(), 0.0), LEAST_LOG_PROB)) for place in order)
        rows.append((distribution, draws))
    return rows
