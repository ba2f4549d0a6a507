"""The verifier: one target forward pass over trees and prompts of several sessions, then each session's commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from dynatree.common.errors import NotFiniteError, ServiceBusyError
from dynatree.common.messages import VerifyTimings
from dynatree.common.model_info import ModelInfo
from dynatree.common.sampling import NOT_CHOSEN, Sampling
from dynatree.common.tree import ROOT, TokenTree
from dynatree.engine.engine import Engine
from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.prefix_cache import PrefixCache
from dynatree.engine.sampling.choosing import TokenHistories, adjusted, choose, warped
from dynatree.engine.sampling.gumbel import NoiseStream, random_generator
from dynatree.verify.accept import Verdict, accept, cut, follow
from dynatree.verify.layout import depth_first, prompt_segment, tree_segment
from dynatree.verify.log_probs import log_probs_of
from dynatree.verify.masked_logits import MaskedLogits
from dynatree.verify.node_states import NodeStates
from dynatree.verify.residual import Distribution, accept_residual
from dynatree.verify.session import SessionRequest, VerifySession

NO_TREE = TokenTree()

# A pass's result for one session: its commit, None if its prompt is not fully read, or the error that occurred.
Result = Verdict | Exception | None


@dataclass(frozen=True)
class Part:
    """One session's part of a pass: a tree below its last token, or the next `prompt_tokens` tokens of its prompt.

    `kept` lists the nodes that the pass verifies: ascending indices that include every node's parent; None means all.
    """

    session: VerifySession
    tree: TokenTree = NO_TREE
    kept: Sequence[int] | None = None
    prompt_tokens: int = 0

    @property
    def nodes(self) -> Sequence[int]:
        """The nodes of the tree that the pass verifies."""
        return range(len(self.tree)) if self.kept is None else self.kept

    @property
    def trimmed(self) -> int:
        """Number of nodes that the pass does not verify."""
        return len(self.tree) - len(self.nodes)

    @property
    def rows(self) -> int:
        """Rows of the part in the forward pass."""
        return self.prompt_tokens or 1 + len(self.nodes)


class Verifier:
    """Opens, advances and closes sessions on the target model. Not thread-safe: call it from one thread only.

    Invariant: after every round, a session's KV range holds all its committed tokens except the last, exactly as after
    a fresh prefill of them. This is the KV-cache management of DynaTree section 3.5, done by moving slots instead of by
    a second forward pass.
    """

    def __init__(self, engine: Engine, max_tree_nodes: int, cache: PrefixCache | None = None) -> None:
        self.engine = engine
        self.max_tree_nodes = max_tree_nodes
        self._cache = cache or PrefixCache(engine.kv_cache, enabled=False)
        self._pool = ThreadPoolExecutor(thread_name_prefix="grammar masks")  # without threads until a mask is asked for

    @property
    def target(self) -> ModelInfo:
        """Description of the target model."""
        return self.engine.info

    def slots(self, request: SessionRequest) -> int:
        """Number of KV slots that a session reserves: for its tokens, and for its largest tree after them."""
        return request.limit + self.max_tree_nodes

    def open(self, request: SessionRequest) -> VerifySession:
        """Reserve a session's KV slots, and fill those whose prompt tokens are cached, unless their logits are needed.

        Raises:
            ServiceBusyError: Too few slots are free.
        """
        # cached tokens come without logits
        wanted = () if request.decoding.prompt_log_probs else request.prompt_ids
        kv, cached = self._cache.reserve(self.slots(request), wanted, request.principal)
        if kv is None:
            raise ServiceBusyError("the verify service's KV cache is full; try again later")
        return VerifySession(kv, request, list(request.prompt_ids), read=cached, cached=cached)

    def run(self, parts: Sequence[Part]) -> tuple[list[Result], VerifyTimings]:
        """Run one pass: one target forward pass over all parts, then each session's commit.

        If the forward pass fails, its error is raised, no session has changed, and the pass may be tried again. A later
        error becomes the result of the session at fault, which cannot continue.

        Returns:
            The result of each part: its commit, None if its prompt is not fully read, or its error; and the timings.
        """
        began = time.perf_counter()
        orders = [depth_first(part.tree, part.nodes) for part in parts]
        parts = [
            replace(part, tree=part.tree.take(order), kept=None) for part, order in zip(parts, orders, strict=True)
        ]
        segments = [
            prompt_segment(part.session, part.prompt_tokens)
            if part.prompt_tokens
            else tree_segment(part.session, part.tree)
            for part in parts
        ]
        started = time.perf_counter()
        decides = self.engine.decider is not None
        states = [NodeStates(part.tree, part.session.grammar) if part.session.grammar else None for part in parts]
        masks = [self._begin_masks(each) if each and decides else None for each in states]
        decided = self.engine.decide(segments, [choosing(part) for part in parts]) if decides else None
        choices: list[list[int] | None] = [None] * len(parts)
        if decided is None:
            logits = self.engine.forward(segments)
            self.engine.synchronize()
        else:
            logits, choices = decided
        forwarded = time.perf_counter()
        verdicts = [
            _result(partial(_judge, part, rows, chosen, each, mask, at_once=decides))
            for part, rows, chosen, each, mask in zip(parts, logits, choices, states, masks, strict=True)
        ]
        accepted = time.perf_counter()
        results = [
            verdict
            if isinstance(verdict, Exception)
            else _result(partial(self._commit, part, verdict, order, rows, in_place=chosen is not None))
            for part, verdict, order, rows, chosen in zip(parts, verdicts, orders, logits, choices, strict=True)
        ]
        done = time.perf_counter()
        return results, VerifyTimings(forwarded - started, started - began + accepted - forwarded, done - accepted)

    def close(self, session: VerifySession) -> None:
        """Release the session's KV range; the prefix cache may keep its contents until the slots are needed."""
        self._cache.release(session.kv, session.committed[: self._held(session)], session.request.principal)

    def is_sound(self) -> bool:
        """Whether a trial forward pass over one token yields finite logits; also True if no slot is free for it.

        The token is fixed, and was part of the forward passes at startup, so that no request influences the trial.
        """
        kv, _ = self._cache.reserve(1, (), "")
        if kv is None:
            return True
        try:
            logits = self.engine.forward([Segment(kv, 0, [0], [0])])[0]
            return not kv.broken and choose(logits, [0], Sampling()) != [NOT_CHOSEN]
        finally:
            self._cache.release(kv, (), "")

    def _held(self, session: VerifySession) -> int:
        """Return how many of a session's first tokens the prefix cache may keep."""
        return session.read if session.unread or self._cache.only_prompts else session.length - 1

    def _begin_masks(self, states: NodeStates) -> Future[Tensor]:
        """Begin to compute the masks of a tree's rows on another thread, beside the forward pass on the device."""
        return self._pool.submit(states.masks, self.engine.info.vocab_size, self.engine.kv_cache.device)

    def _commit(
        self, part: Part, verdict: Verdict | None, order: Sequence[int], logits: Tensor, in_place: bool
    ) -> Verdict | None:
        """Advance the session; its verdict, with node indices mapped back through `order` to the tree that was sent.

        `in_place` says that the keys and values of the accepted nodes are already in their final slots.
        """
        session = part.session
        if session.request.decoding.prompt_log_probs and part.prompt_tokens:
            _keep_log_probs(session, logits)
        session.read += part.prompt_tokens
        if part.prompt_tokens and not session.unread:
            self._cache.note_prompt(session.kv)
        if verdict is None:
            self.engine.kv_cache.forget(session.kv, session.read)
            return None
        if not part.prompt_tokens:
            # the root is in slot length - 1 and node i in slot length + i; the accepted path moves after the root
            if not in_place:
                self.engine.kv_cache.move(session.kv, [session.length + n for n in verdict.accepted], session.length)
            session.round += 1
        session.commit(verdict.token_ids, finished=verdict.finish_reason is not None)
        self.engine.kv_cache.forget(session.kv, self._held(session))
        return replace(verdict, accepted=tuple(order[node] for node in verdict.accepted))


def verdicts_of(results: Iterable[Result]) -> list[Verdict | None]:
    """The verdicts of a pass in which no session failed.

    Raises:
        Exception: The first error among the results.
    """
    verdicts = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        verdicts.append(result)
    return verdicts


def _result(work: Callable[[], Verdict | None]) -> Result:
    """The value or the error of one session's work; an error must not affect the commits of other sessions."""
    try:
        return work()
    except Exception as error:
        return error


def choosing(part: Part) -> Choosing | None:
    """Options for choosing tokens on the device after a part's tokens; None if the host chooses from the logits."""
    sampling = part.session.request.decoding.sampling
    if not sampling.is_plain or part.session.grammar is not None:
        return None
    # -1 marks tokens that were not drafted: the root, or the tokens of a prompt
    parents = [-1] * max(part.prompt_tokens, 1) + [1 + parent for parent in part.tree.parents]
    return Choosing(parents, sampling.temperature, sampling.seed)


def _judge(
    part: Part,
    logits: Tensor,
    chosen: Sequence[int] | None,
    states: NodeStates | None,
    masks: Future[Tensor] | None,
    *,
    at_once: bool,
) -> Verdict | None:
    """The verdict of a round; None if the prompt is not fully read.

    `logits` has one row for the root and one for each node, `[1 + nodes, vocabulary]`; for a prompt, its last row takes
    the place of the root's. `chosen` holds the choices for all rows, if the device has made them; `states`, the
    grammar's; `masks`, those of all rows, if the choices after all of them are made at once. The host samples along the
    accepted path alone, unless they are made `at_once`, because for each it sorts and draws whole vocabularies.

    Raises:
        NotFiniteError: A choice depends on numbers that are not finite, or on values that replaced such numbers.
        InvalidArgumentError: The grammar cannot be followed further.
    """
    if part.session.kv.broken:
        raise NotFiniteError
    if part.prompt_tokens:
        if part.prompt_tokens < part.session.unread:
            return None
        logits, chosen = logits[-1:], chosen and chosen[-1:]
    session, tree, request = part.session, part.tree, part.session.request
    masked = MaskedLogits(logits, states, masks.result() if masks else None)
    if request.decoding.sampling.residual:
        verdict = _accept_residual(session, tree, masked)
    else:
        if chosen is None and masked.rows_at_once is not None and (at_once or request.decoding.sampling.greedy):
            positions = [session.length, *(session.length + depth for depth in tree.depths)]
            histories = _histories(session, tree, range(-1, len(tree)))
            chosen = choose(masked.rows_at_once, positions, request.decoding.sampling, histories)
        if states is None and chosen is not None:
            verdict = accept(tree, chosen)
        else:
            verdict = follow(tree, partial(_choice, session, tree, masked, chosen))
    verdict = cut(verdict, session.remaining, request.end_tokens)
    if NOT_CHOSEN in verdict.token_ids:
        raise NotFiniteError
    if not request.decoding.log_probs:
        return verdict
    rows = masked.rows((ROOT, *verdict.accepted)[: len(verdict.token_ids)])
    values, likeliest = log_probs_of(rows, verdict.token_ids, request.decoding.top_log_probs)
    return replace(verdict, log_probs=values, top_log_probs=likeliest)


def _choice(
    session: VerifySession, tree: TokenTree, masked: MaskedLogits, chosen: Sequence[int] | None, node: int
) -> int | None:
    """The target's choice after a node, one of `chosen` if that is known; None leaves the node unverified."""
    row = masked.after(node)
    if row is None:
        return None
    if chosen is not None:
        return chosen[node + 1]
    position = session.length + (0 if node == ROOT else tree.depths[node])
    sampling = session.request.decoding.sampling
    return choose(row, [position], sampling, _histories(session, tree, [node]))[0]


def _accept_residual(session: VerifySession, tree: TokenTree, masked: MaskedLogits) -> Verdict:
    sampling = session.request.decoding.sampling

    def target(node: int) -> Distribution | None:
        row = masked.after(node)
        if row is None:
            return None
        rows = adjusted(row, sampling, _histories(session, tree, [node]))
        distribution: Distribution = warped(rows, sampling)[0].double().softmax(-1).cpu().numpy()
        return distribution

    def random(depth: int) -> np.random.Generator:
        return random_generator(sampling.seed, session.length + depth - 1, NoiseStream.RESIDUAL)

    return accept_residual(tree, target, random)


def _histories(session: VerifySession, tree: TokenTree, nodes: Iterable[int]) -> TokenHistories | None:
    """The tokens that precede the choice after each node; None if the sampling options do not depend on them."""
    if not session.request.decoding.sampling.needs_history:
        return None
    own = [[tree.token_ids[n] for n in tree.path(node)] for node in nodes]
    return TokenHistories(session.committed, own, session.generated)


def _keep_log_probs(session: VerifySession, logits: Tensor) -> None:
    """Store the prompt's log-probabilities that follow from the logits `[tokens, vocabulary]` of its next piece.

    The logits of a token predict the next token: those of the tokens [a, b) predict [a + 1, b + 1), without positions
    past the end of the prompt.

    Raises:
        NotFiniteError: A log-probability is NaN.
    """
    request = session.request
    following = request.prompt_ids[session.read + 1 : session.read + 1 + len(logits)]
    values, likeliest = log_probs_of(logits[: len(following)], following, request.decoding.top_log_probs)
    if any(map(math.isnan, values)):
        raise NotFiniteError
    session.prompt_log_probs += values
    session.prompt_top_log_probs += likeliest
