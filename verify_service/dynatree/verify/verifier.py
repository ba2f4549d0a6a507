"""The verifier: one target forward over any number of sessions' trees, then the commit of each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dynatree.common.engine import Engine, Segment
from dynatree.common.errors import ServiceBusyError
from dynatree.common.model_info import ModelInfo
from dynatree.common.sampling import Histories, Stream, adjusted, choose, random_generator, warped
from dynatree.common.tree import TokenTree
from dynatree.verify.accept import Verdict, accept, cut
from dynatree.verify.layout import depth_first, tree_segment
from dynatree.verify.residual import Distribution, accept_residual
from dynatree.verify.session import Session, SessionRequest


@dataclass(frozen=True)
class Timings:
    """Seconds of one forward, and of what went before it (in `accept`) and after it, for the whole batch."""

    forward: float
    accept: float
    commit: float


class Verifier:
    """Opens, advances and closes sessions on the target model. Not thread-safe: one thread calls it.

    Invariant: after every round the arena row of a session holds its committed tokens but the last, as a fresh prefill
    of them would (DynaTree section 3.5, KV-cache management, by moving rows instead of a second forward).
    """

    def __init__(self, engine: Engine, max_tree_nodes: int) -> None:
        self.engine = engine
        self.max_tree_nodes = max_tree_nodes

    @property
    def target(self) -> ModelInfo:
        """What the target model is."""
        return self.engine.info

    def open(self, request: SessionRequest) -> tuple[Session, Verdict, Timings]:
        """Read the prompt and commit the first token.

        Raises:
            ServiceBusyError: Every session is in use.
        """
        row = self.engine.arena.allocate()
        if row is None:
            raise ServiceBusyError("every session of the verify service is in use; try again later")
        try:
            prompt = request.prompt_ids
            session = Session(row, request, list(prompt))
            started = time.perf_counter()
            segment = Segment(row, 0, prompt, range(len(prompt)), keep=[len(prompt) - 1])
            (logits,) = self.engine.forward([segment])
            verdict, timings = self._commit([(session, TokenTree())], [logits], started)
        except BaseException:
            self.engine.arena.free(row)
            raise
        return session, verdict[0], timings

    def verify(self, batch: Sequence[tuple[Session, TokenTree]]) -> tuple[list[Verdict], Timings]:
        """One round for each session: one target forward over all trees, then each session's commit."""
        began = time.perf_counter()
        orders = [depth_first(tree) for _, tree in batch]
        laid_out = [(session, tree) for (session, _), (tree, _) in zip(batch, orders, strict=True)]
        segments = [tree_segment(session, tree) for session, tree in laid_out]
        started = time.perf_counter()
        logits = self.engine.forward(segments)
        verdicts, timings = self._commit(laid_out, logits, started)
        for session, _ in batch:
            session.round += 1
        verdicts = [
            replace(verdict, accepted=tuple(order[node] for node in verdict.accepted))
            for verdict, (_, order) in zip(verdicts, orders, strict=True)
        ]
        return verdicts, replace(timings, accept=timings.accept + started - began)

    def close(self, session: Session) -> None:
        """Free the session's arena row."""
        self.engine.arena.free(session.row)

    def _commit(
        self, batch: Sequence[tuple[Session, TokenTree]], logits: Sequence[Tensor], started: float
    ) -> tuple[list[Verdict], Timings]:
        self.engine.synchronize()
        forwarded = time.perf_counter()
        verdicts = [_judge(session, tree, rows) for (session, tree), rows in zip(batch, logits, strict=True)]
        accepted = time.perf_counter()
        for (session, _), verdict in zip(batch, verdicts, strict=True):
            # the root sits in slot length - 1 and node i in slot length + i; the path follows the root
            self.engine.arena.move(session.row, [session.length + n for n in verdict.accepted], session.length)
            session.commit(verdict.token_ids, finished=verdict.finish_reason is not None)
        done = time.perf_counter()
        return verdicts, Timings(forwarded - started, accepted - forwarded, done - accepted)


def _judge(session: Session, tree: TokenTree, logits: Tensor) -> Verdict:
    """What the round commits, given the logits after the root and after each node `[1 + nodes, vocabulary]`."""
    request = session.request
    if request.sampling.residual:
        verdict = _accept_residual(session, tree, logits)
    else:
        positions = [session.length, *(session.length + depth for depth in tree.depths)]
        histories = _histories(session, tree, range(-1, len(tree)))
        verdict = accept(tree, choose(logits, positions, request.sampling, histories))
    verdict = cut(verdict, session.remaining, request.end_tokens)
    return replace(verdict, log_probs=_log_probs(verdict, logits)) if request.log_probs else verdict


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
    return Histories(session.committed, [[tree.token_ids[n] for n in tree.path(node)] for node in nodes])


def _log_probs(verdict: Verdict, logits: Tensor) -> tuple[float, ...]:
    """The committed tokens' natural log-probabilities under the target's own softmax."""
    rows = [0, *(node + 1 for node in verdict.accepted)][: len(verdict.token_ids)]
    chosen = torch.tensor(verdict.token_ids, device=logits.device)[:, None]
    return tuple(logits[rows].float().log_softmax(-1).gather(-1, chosen)[:, 0].tolist())
