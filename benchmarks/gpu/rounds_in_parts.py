"""Part 2: where a round's time goes, how often the host waits for the device, and how long prompts take."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from bits import event_seconds
from decoding import DEFAULT, GREEDY, PLAIN, Completion, complete, read
from keeping import NO_GPU, Bound, Measured, NotMeasuredError
from pair import long_prompt, prompts
from speed import LINEAR

from dynatree.common.decoding import Decoding
from dynatree.common.tree import TokenTree
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.gpu import levels, row_runner
from dynatree.engine.gpu.graphs import Replayed
from dynatree.engine.gpu.rows import RowBuffers, Staging
from dynatree.verify.session import SessionRequest
from dynatree.verify.verifier import Part, verdicts_of

if TYPE_CHECKING:
    from session import Context

MOST_STEPS = 1.6  # plain steps that a round may cost
MOST_WAITS = 2  # of the host for the device, in a target's round
MARK = "measured rounds"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
TREE = TokenTree(tuple(range(20, 35)), (-1, 0, 1, 2, 3, -1, 5, 6, 0, 8, 1, 10, -1, 12, 13))  # 15 nodes
PROMPT_TIMES = 3


class Spans:
    """Seconds of each part of rounds: on the host by its clock, on the device by events around graphs.

    Attributes:
        model: Whose work is going on, "draft" or "target"; spans are kept by it. "prompt": none of a round's.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.model = "target"
        self._on_gpu = on_gpu
        self._host: dict[str, list[float]] = defaultdict(list)
        self._events: list[tuple[str, Any, Any]] = []

    def watch(self, model: str) -> None:
        """Who works from now on."""
        self.model = model

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of whatever runs meanwhile."""
        parts = (
            (RowBuffers, "stage", "fill"),
            (Staging, "send", "copy up"),
            (Replayed, "__call__", "launch"),
            (row_runner, "synchronize", "wait"),
            (levels, "synchronize", "wait"),
        )
        with ExitStack() as stack:
            for owner, name, what in parts:
                stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), what)))
            yield

    def milliseconds(self, rounds: int) -> dict[str, float]:
        """Of each part, a round."""
        totals = {what: sum(seconds) for what, seconds in self._host.items()}
        for what, began, ended in self._events:
            ended.synchronize()
            totals[what] = totals.get(what, 0.0) + began.elapsed_time(ended) / 1000
        return {what: round(1000 * seconds / max(rounds, 1), 4) for what, seconds in sorted(totals.items())}

    def _timed(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._is_graph(what) else []
            if events:
                events[0].record()
            began = time.perf_counter()
            result = function(*arguments, **options)
            seconds = time.perf_counter() - began
            if self.model == "prompt":
                return result
            self._host[f"{self.model}: {what}"].append(seconds)
            if events:
                events[1].record()
                self._events.append((f"{self.model}: device", *events))
            return result

        return timed

    def _is_graph(self, what: str) -> bool:
        return self._on_gpu and what == "launch"


def rounds(context: Context) -> Measured:
    """What a round costs in plain steps, and the parts of both."""
    pair, sizes = context.models.pair, context.sizes
    given = prompts(min(3, sizes.prompts))
    figures: dict[str, Any] = {}
    says = []
    for name, method in (("plain", PLAIN), ("default", DEFAULT), ("linear:depth=5", LINEAR)):
        # without the spans first: they cost time themselves
        done = [complete(pair, prompt, sizes.new_tokens, method) for _, prompt in given]
        spans = Spans(context.on_gpu)
        spanned: list[Completion] = []
        with spans.watching():
            for _, prompt in given:
                spanned.append(complete(pair, prompt, sizes.new_tokens, method, GREEDY, spans.watch))
        of_all = [each for completion in done for each in completion.rounds]
        figures[name] = {
            "milliseconds": 1000 * sum(draft + target for _, draft, target in of_all) / max(len(of_all), 1),
            "nodes": sum(nodes for nodes, _, _ in of_all) / max(len(of_all), 1),
            "rounds": len(of_all),
            "parts": spans.milliseconds(sum(len(each.rounds) for each in spanned)),
        }
        parts = ", ".join(f"{what} {each:.3g}" for what, each in figures[name]["parts"].items())
        says.append(f"{name}: {figures[name]['milliseconds']:.3g} ms a round; timed in parts, of it: {parts}")
    figures["graphs"] = _graphs(context.models.target, context)
    plain = figures["plain"]["milliseconds"]
    bounds = [
        Bound(f"a round of {name} in plain steps", figures[name]["milliseconds"] / plain, most=MOST_STEPS)
        for name in ("default", "linear:depth=5")
        if not sizes.tiny
    ]
    return Measured(figures, [*says, f"graphs, milliseconds: {figures['graphs']}"], bounds)


def _graphs(engine: Engine, context: Context) -> Mapping[str, Any] | str:
    """Milliseconds of the forward, and with the decision behind it, without and with noise."""
    if not context.on_gpu:
        return f"not measured: {NO_GPU}"
    forward = engine.runner.forwards[0]  # type: ignore[attr-defined]
    with torch.inference_mode():
        calls = {"forward": forward.run, "greedy": forward._decisions[0], "with noise": forward._decisions[1]}
        return {name: round(1000 * event_seconds(call), 4) for name, call in calls.items()}


def waits(context: Context) -> Measured:
    """How often the host waits for the device in a round, and what is copied, as the profiler counts it."""
    if not context.on_gpu:
        raise NotMeasuredError(NO_GPU)
    pair, count = context.models.pair, context.sizes.rounds
    _, prompt = prompts(1)[0]
    session = pair.verifier.open(SessionRequest(prompt, len(prompt) + 20 * count, frozenset(), Decoding(GREEDY)))
    try:
        read(pair, session)
        verdicts_of(pair.verifier.run([Part(session, TREE)])[0])
        before = session.length
        with _profiled() as profile:
            for _ in range(count):
                verdicts_of(pair.verifier.run([Part(session, TREE)])[0])
        committed = session.length - before
    finally:
        pair.verifier.close(session)
    of_target = _counted(profile, count)
    if not of_target.get("cudaGraphLaunch") or not of_target.get("kernels"):
        raise NotMeasuredError("the profiler saw no graph on the device, so it may have missed waits as well")
    with _profiled() as profile:
        done = complete(pair, prompt, context.sizes.new_tokens, LINEAR)
    whole = _counted(profile, len(done.rounds))
    waited = sum(of_target.get(name, 0.0) for name in WAITS)
    up, down = (of_target.get(name, 0.0) for name in ("Memcpy HtoD", "Memcpy DtoH"))
    figures = {"tokens": committed, "a target's round": of_target, "a whole round, prompts included": whole}
    says = [f"{where}: {_listed(counts)}" for where, counts in figures.items() if isinstance(counts, dict)]
    bounds = [
        Bound("waits of the host in a target's round", waited, most=MOST_WAITS),
        Bound("copies up in a target's round", up, most=1),
        Bound("copies down in a target's round", down, most=1),
    ]
    return Measured(figures, says, bounds)


@contextmanager
def _profiled() -> Iterator[Any]:
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile, torch.profiler.record_function(MARK):
        yield profile


def _counted(profile: Any, rounds: int) -> dict[str, float]:
    """Calls of the runtime, and copies and kernels on the device, a round; and the milliseconds of all waits.

    What the profiler itself waits for lies outside the mark.
    """
    events = list(profile.events())
    mark = next(event.time_range for event in events if event.name == MARK and "CPU" in str(event.device_type))
    counts: Counter[str] = Counter()
    waited = 0.0
    for event in events:
        name = event.name
        if name == MARK or not mark.start <= event.time_range.start <= mark.end:
            continue
        if name.startswith("cuda"):
            counts[name] += 1
            waited += event.time_range.elapsed_us() / 1000 if name in WAITS else 0.0
        elif name.startswith(("Memcpy", "Memset")):
            counts[" ".join(name.split()[:2])] += 1
        elif "CUDA" in str(event.device_type):
            counts["kernels"] += 1
    each = {name: total / max(rounds, 1) for name, total in sorted(counts.items())}
    return {**each, "milliseconds waited": waited / max(rounds, 1)}


def _listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {total:.3g}" for name, total in counts.items())


def prompt_times(context: Context) -> Measured:
    """Milliseconds in which a prompt is read: in forwards of fixed rows, and in one forward of its own size."""
    models = context.models
    found, says = [], []
    for length in context.sizes.prompt_lengths:
        prompt = long_prompt(length)
        times = {
            name: 1000 * _reading(engine, prompt) for name, engine in (("rows", models.target), ("one", models.eager))
        }
        found.append({"tokens": length, "milliseconds": times})
        says.append(f"{length} tokens: {times['rows']:.3g} ms by rows, {times['one']:.3g} ms in one forward")
    return Measured({"rows": models.target.most_rows, "prompts": found}, says)


def _reading(engine: Engine, prompt: tuple[int, ...]) -> float:
    count = len(prompt)
    kv = engine.kv_cache.reserve(count)
    assert kv is not None, "no session is open"
    segment = Segment(kv, 0, prompt, range(count), keep=[count - 1])
    try:
        engine.forward([segment])
        times = []
        for _ in range(PROMPT_TIMES):
            engine.synchronize()
            began = time.perf_counter()
            engine.forward([segment])
            engine.synchronize()
            times.append(time.perf_counter() - began)
    finally:
        engine.kv_cache.release(kv)
    return median(times)
