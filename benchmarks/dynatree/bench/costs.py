"""Measure the cost of a target round by nodes, context and sessions, and of a draft forward pass by rows."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dynatree.bench.record import Costs, Point
from dynatree.common.decoding import Decoding
from dynatree.common.sampling import Sampling
from dynatree.common.tree import ROOT, TokenTree
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_range import KVRange
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier, verdicts_of

NODES = (0, 1, 2, 4, 8, 12, 15, 16, 24, 31, 32, 48, 63, 64, 96, 127, 128, 192, 255, 256)
CONTEXTS = (128, 256, 512, 1024, 1536, 1900)
DRAFT_ROWS = (1, 2, 4, 8, 16, 32)
SESSIONS = 8
KV_SESSIONS = (
    SESSIONS + len(CONTEXTS) - 1
)  # sessions of the target: all of the first context, one of each other context
CONTEXT = CONTEXTS[0]  # context of the curves that do not vary it
TREE = 15  # nodes per tree of the curves that do not vary them

_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Place:
    """A point of a curve: `sessions` sessions, each with a tree of `nodes` nodes after `context` tokens."""

    curve: Literal["nodes", "context", "sessions", "draft"]
    nodes: int
    context: int = CONTEXT
    sessions: int = 1


PLAIN_STEP = Place("nodes", 0)


def places(max_nodes: int, context_length: int) -> list[Place]:
    """The points of every curve whose trees have at most `max_nodes` nodes and fit into the context."""
    every = [
        *(Place("nodes", nodes) for nodes in NODES),
        *(Place("context", nodes, context) for nodes in (0, TREE) for context in CONTEXTS),
        *(Place("sessions", TREE, sessions=sessions) for sessions in range(1, SESSIONS + 1)),
        *(Place("draft", rows) for rows in DRAFT_ROWS),
    ]
    return [place for place in every if place.nodes <= max_nodes and place.context + place.nodes <= context_length]


class CostBench:
    """A target and a draft with tokens in KV caches that no one else uses; measurements leave the tokens unchanged.

    Raises:
        ValueError: The shortest context does not fit into the models' contexts.
    """

    def __init__(self, target: Engine, draft: Engine, max_nodes: int) -> None:
        length = target.info.context_length
        if min(length, draft.info.context_length) <= CONTEXT:
            raise ValueError(f"costs are measured after {CONTEXT} tokens, which the models' contexts do not hold")
        self._verifier = Verifier(target, max_nodes)
        self._draft = draft
        self._sessions = _sessions(target, [context for context in CONTEXTS if context <= length], max_nodes)
        self._draft_range, _ = _read(draft, CONTEXT, CONTEXT + max(DRAFT_ROWS))

    def measure(self, place: Place) -> tuple[float, float]:
        """Seconds of the whole round, and of its forward pass."""
        return self._draft_forward(place) if place.curve == "draft" else self._round(place)

    def _round(self, place: Place) -> tuple[float, float]:
        """Measure a round on copies of the sessions; it rewrites only their last committed slot, with equal values."""
        engine = self._verifier.engine
        tree = random_tree(place.nodes, engine.info.vocab_size)
        sessions = self._sessions[place.context][: place.sessions]
        parts = [Part(replace(session, committed=list(session.committed)), tree) for session in sessions]
        engine.synchronize()
        started = time.perf_counter()
        results, timings = self._verifier.run(parts)
        engine.synchronize()
        seconds = time.perf_counter() - started
        verdicts_of(results)
        return seconds, timings.forward

    def _draft_forward(self, place: Place) -> tuple[float, float]:
        """Measure a forward pass over siblings, as when the draft grows a level of a tree."""
        rows = place.nodes
        segment = Segment(
            self._draft_range,
            place.context,
            _tokens(self._draft, rows),
            [place.context] * rows,
            mask=torch.eye(rows, dtype=torch.bool),
        )
        self._draft.synchronize()
        started = time.perf_counter()
        self._draft.forward([segment])
        self._draft.synchronize()
        seconds = time.perf_counter() - started
        return seconds, seconds


def fill(costs: Costs, bench: CostBench, wanted: Sequence[Place], repetitions: int) -> Iterator[None]:
    """Measure all points in each repetition, so that a slow minute affects them all; yield after each point."""
    points = [
        Point(
            curve=place.curve,
            nodes=place.nodes,
            context=place.context,
            sessions=place.sessions,
            seconds=[],
            forward_seconds=[],
        )
        for place in wanted
    ]
    for repetition in range(repetitions):
        for place, point in zip(wanted, points, strict=True):
            seconds, forward_seconds = bench.measure(place)
            if repetition == 0:
                costs["points"].append(point)
            point["seconds"].append(seconds)
            point["forward_seconds"].append(forward_seconds)
            if place == PLAIN_STEP:
                costs["plain_seconds"].append(seconds)
            yield


@torch.inference_mode()
def _sessions(engine: Engine, contexts: Sequence[int], max_nodes: int) -> dict[int, list[VerifySession]]:
    """Sessions by context, on the first tokens of one text, prefilled once; `SESSIONS` of the shortest context."""
    longest = contexts[-1]
    first, tokens = _read(engine, longest, longest + max_nodes)
    request = SessionRequest(tokens, _NO_LIMIT, frozenset(), Decoding(Sampling()))
    sessions: dict[int, list[VerifySession]] = defaultdict(list)
    for number, context in enumerate([*reversed(contexts), *(SESSIONS - 1) * [CONTEXT]]):
        kv = first if number == 0 else _reserved(engine, context + max_nodes)
        if number:
            engine.kv_cache.copy(first, kv, context)
        sessions[context].append(VerifySession(kv, request, list(tokens[:context])))
    return sessions


def _read(engine: Engine, count: int, slots: int) -> tuple[KVRange, tuple[int, ...]]:
    """Prefill `count` random tokens into a new range of `slots` KV slots; return the range and the tokens."""
    kv, tokens = _reserved(engine, slots), _tokens(engine, count)
    engine.forward([Segment(kv, 0, tokens, range(count), keep=[])])
    return kv, tokens


def _reserved(engine: Engine, slots: int) -> KVRange:
    kv = engine.kv_cache.reserve(slots)
    assert kv is not None, "the KV cache was made for all sessions that are measured"
    return kv


def _tokens(engine: Engine, count: int) -> tuple[int, ...]:
    return tuple(random.Random(count).choices(range(engine.info.vocab_size), k=count))


def random_tree(nodes: int, vocabulary: int) -> TokenTree:
    """A bushy random tree that depends on the arguments alone: a node's parent is any earlier node or the root."""
    generator = random.Random(nodes)
    parents = tuple(generator.randrange(ROOT, node) for node in range(nodes))
    return TokenTree(tuple(generator.sample(range(vocabulary), nodes)), parents)
