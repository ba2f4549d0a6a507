"""The verifier: one target forward over any number of sessions' trees and prompts, then the commit of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from dynatree.common.engine import Choosing, Engine, Segment
from dynatree.common.errors import NotFiniteError, ServiceBusyError
from dynatree.common.gumbel import Stream, random_generator
from dynatree.common.model_info import ModelInfo
from dynatree.common.prefix_cache import PrefixCache
from dynatree.common.sampling import NOT_CHOSEN, Histories, Sampling, adjusted, choose, warped
from dynatree.common.tree import TokenTree
from dynatree.verify.accept import Verdict, accept, cut
from dynatree.verify.layout import depth_first, prompt_segment, tree_segment
from dynatree.verify.log_probs import log_probs_of
from dynatree.verify.residual import Distribution, accept_residual
from dynatree.verify.session import Session, SessionRequest

NO_TREE = TokenTree()

# What a pass comes to for one session: its commit, None for a prompt that is not read to its end, or what failed.
Result = Verdict | Exception | None


@dataclass(frozen=True)
class Timings:
    """Seconds of one forward, and of what went before it (in `accept`) and after it, for the whole pass."""

    forward: float
    accept: float
    commit: float


@dataclass(frozen=True)
class Part:
    """What one session puts into a pass: a tree below its last token, or the next `prompt_tokens` of its prompt."""

    session: Session
    tree: TokenTree = NO_TREE
    prompt_tokens: int = 0

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return self.prompt_tokens or 1 + len(self.tree)


class Verifier:
    """Opens, advances and closes sessions on the target model. Not thread-safe: one thread calls it.

    Invariant: after every round the range of a session holds its committed tokens but the last, as a fresh prefill of
    them would (DynaTree section 3.5, KV-cache management, by moving slots instead of a second forward).
    """

    def __init__(self, engine: Engine, max_tree_nodes: int, cache: PrefixCache | None = None) -> None:
        self.engine = engine
        self.max_tree_nodes = max_tree_nodes
        self._cache = cache or PrefixCache(engine.arena, enabled=False)

    @property
    def target(self) -> ModelInfo:
        """What the target model is."""
        return self.engine.info

    def slots(self, request: SessionRequest) -> int:
        """Slots that a session reserves: its tokens, and its largest tree behind them."""
        return request.limit + self.max_tree_nodes

    def open(self, request: SessionRequest) -> Session:
        """Reserve a session's slots, and fill those of the prompt that are cached, unless their logits are wanted.

        Raises:
            ServiceBusyError: Too few slots are free.
        """
        # cached tokens have no logits
        wanted = () if request.prompt_log_probs else request.prompt_ids
        kv, cached = self._cache.reserve(self.slots(request), wanted, request.principal)
        if kv is None:
            raise ServiceBusyError("the verify service's KV cache is full; try again later")
        return Session(kv, request, list(request.prompt_ids), read=cached, cached=cached)

    def run(self, parts: Sequence[Part]) -> tuple[list[Result], Timings]:
        """One pass: one target forward over all parts, then each session's commit.

        A forward that fails is raised, and has changed no session; it may be tried again. What fails after it is the
        result of the session at fault, which cannot go on.

        Returns:
            For each part what it commits; None for a prompt that is not read to its end.
        """
        began = time.perf_counter()
        orders = [depth_first(part.tree) for part in parts]
        parts = [replace(part, tree=tree) for part, (tree, _) in zip(parts, orders, strict=True)]
        segments = [
            prompt_segment(part.session, part.prompt_tokens)
            if part.prompt_tokens
            else tree_segment(part.session, part.tree)
            for part in parts
        ]
        started = time.perf_counter()
        decides = self.engine.decider is not None
        decided = self.engine.decide(segments, [choosing(part) for part in parts]) if decides else None
        choices: list[list[int] | None] = [None] * len(parts)
        if decided is None:
            logits = self.engine.forward(segments)
            self.engine.synchronize()
        else:
            logits, choices = decided
        forwarded = time.perf_counter()
        verdicts = [
            _result(partial(_judge, part, rows, chosen))
            for part, rows, chosen in zip(parts, logits, choices, strict=True)
        ]
        accepted = time.perf_counter()
        results = [
            verdict
            if isinstance(verdict, Exception)
            else _result(partial(self._commit, part, verdict, order, rows, in_place=chosen is not None))
            for part, verdict, (_, order), rows, chosen in zip(parts, verdicts, orders, logits, choices, strict=True)
        ]
        done = time.perf_counter()
        return results, Timings(forwarded - started, started - began + accepted - forwarded, done - accepted)

    def close(self, session: Session) -> None:
        """Give the session's range back, or leave what it holds to the prefix cache until it is wanted."""
        request = session.request
        held = session.read if session.unread or self._cache.only_prompts else session.length - 1
        self._cache.release(session.kv, session.committed[:held], request.principal)

    def is_sound(self) -> bool:
        """Whether the logits after one token are finite where a token is chosen; so too where no slot is free to try.

        The token is one that the forward passes of the start had, so that no request says what it is.
        """
        kv, _ = self._cache.reserve(1, (), "")
        if kv is None:
            return True
        logits = self.engine.forward([Segment(kv, 0, [0], [0])])[0]
        sound = not kv.broken and choose(logits, [0], Sampling()) != [NOT_CHOSEN]
        self._cache.release(kv, (), "")
        return sound

    def _commit(
        self, part: Part, verdict: Verdict | None, order: Sequence[int], logits: Tensor, in_place: bool
    ) -> Verdict | None:
        """Advance the session; its verdict, with the nodes named as before the tree was laid out in this order.

        `in_place`: the accepted nodes' keys and values are where they belong already.
        """
        session = part.session
        if session.request.prompt_log_probs and part.prompt_tokens:
            _keep_log_probs(session, logits)
        session.read += part.prompt_tokens
        if verdict is None:
            return None
        if not part.prompt_tokens:
            # the root sits in slot length - 1 and node i in slot length + i; the path follows the root
            if not in_place:
                self.engine.arena.move(session.kv, [session.length + n for n in verdict.accepted], session.length)
            session.round += 1
        session.commit(verdict.token_ids, finished=verdict.finish_reason is not None)
        return replace(verdict, accepted=tuple(order[node] for node in verdict.accepted))


def verdicts_of(results: Iterable[Result]) -> list[Verdict | None]:
    """The results of a pass, where none failed.

    Raises:
        Exception: The first that did.
    """
    verdicts = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        verdicts.append(result)
    return verdicts


def _result(work: Callable[[], Verdict | None]) -> Result:
    """What one session's work returns or raises: others' commits do not depend on it."""
    try:
        return work()
    except Exception as error:
        return error


def choosing(part: Part) -> Choosing | None:
    """How the device chooses after a part's tokens; None where it is for the host, by the logits."""
    sampling = part.session.request.sampling
    if not sampling.is_plain:
        return None
    # a prompt's tokens, like the root, were not drafted
    parents = [-1] * max(part.prompt_tokens, 1) + [1 + parent for parent in part.tree.parents]
    return Choosing(parents, sampling.temperature, sampling.seed)


def _judge(part: Part, logits: Tensor, chosen: Sequence[int] | None) -> Verdict | None:
    """What the round commits; None for a prompt that is not read to its end.

    `logits` are those after the root and after each node `[1 + nodes, vocabulary]`; of a prompt the last one's are
    those after the root. `chosen` are the choices after all of them, where the device has made them.

    Raises:
        NotFiniteError: A token would be chosen by numbers that are not finite, or by what stands in place of such.
    """
    if part.session.kv.broken:
        raise NotFiniteError
    if part.prompt_tokens:
        if part.prompt_tokens < part.session.unread:
            return None
        logits, chosen = logits[-1:], chosen and chosen[-1:]
    session, tree, request = part.session, part.tree, part.session.request
    if request.sampling.residual:
        verdict = _accept_residual(session, tree, logits)
    else:
        if chosen is None:
            positions = [session.length, *(session.length + depth for depth in tree.depths)]
            histories = _histories(session, tree, range(-1, len(tree)))
            chosen = choose(logits, positions, request.sampling, histories)
        verdict = accept(tree, chosen)
    verdict = cut(verdict, session.remaining, request.end_tokens)
    if NOT_CHOSEN in verdict.token_ids:
        raise NotFiniteError
    if not request.log_probs:
        return verdict
    rows = [0, *(node + 1 for node in verdict.accepted)][: len(verdict.token_ids)]
    values, likeliest = log_probs_of(logits[rows], verdict.token_ids, request.top_log_probs)
    return replace(verdict, log_probs=values, top_log_probs=likeliest)


def _accept_residual(session: Session, tree: TokenTree, logits: Tensor) -> Verdict:
    sampling = session.request.sampling

    def target(node: int) -> Distribution:
        rows = adjusted(logits[node + 1 : node + 2], sampling, _histories(session, tree, [node]))
        distribution: Distribution = warped(rows, sampling)[0].double().softmax(-1).cpu().numpy()
        return distribution

    def random(depth: int) -> np.random.Generator:
        return random_generator(sampling.seed, session.length + depth - 1, Stream.RESIDUAL)

    return accept_residual(tree, target, random)


def _histories(session: Session, tree: TokenTree, nodes: Iterable[int]) -> Histories | None:
    """The tokens before the choice after each node, where the options ask for them."""
    if not session.request.sampling.needs_history:
        return None
    own = [[tree.token_ids[n] for n in tree.path(node)] for node in nodes]
    return Histories(session.committed, own, session.generated)


def _keep_log_probs(session: Session, logits: Tensor) -> None:
    """Keep what the logits of the next piece of a prompt `[tokens, vocabulary]` say of the prompt's tokens.

    A token's logits are about the one behind it: those of the tokens [a, b) about [a + 1, b + 1), as far as these are
    of the prompt.

    Raises:
        NotFiniteError: They say nothing.
    """
    request = session.request
    following = request.prompt_ids[session.read + 1 : session.read + 1 + len(logits)]
    values, likeliest = log_probs_of(logits[: len(following)], following, request.top_log_probs)
    if any(map(math.isnan, values)):
        raise NotFiniteError
    session.prompt_log_probs += values
    session.prompt_top_log_probs += likeliest
