"""Parts 1 and 2: tokens a second of one session by policy, beside transformers' `generate`, and a trace of rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from decoding import DEFAULT, PLAIN, Completion, Method, complete
from keeping import NO_GPU, Bound, Measured, NotMeasuredError, speed_bounds
from pair import PROMPT_TOKENS, prompts

if TYPE_CHECKING:
    from session import Context

METHODS = {
    "plain": PLAIN,
    "default": DEFAULT,
    "linear": Method("linear", {"depth": 5}),
    "dynatree": Method("dynatree"),
    "dyspec": Method("dyspec"),
}
BOUNDED = ("default", "linear")  # policies whose rounds may cost `MOST_STEPS` plain steps
MOST_STEPS = 1.6
WARM_UP = 16  # tokens
HELD_OUT = "treasure_island"  # the book that the pair was not trained on
MARK = "rounds"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
MOST_WAITS = 2  # of the host for the device, in a plain round
SLOWEST = 12  # kernels of a trace


def policy(context: Context) -> Measured:
    """The policy that the step names: speed, the parts of a round, and tokens unlike plain decoding's."""
    name, sizes, pair = context.step.name.split("-", 1)[1], context.sizes, context.models.pair
    given = prompts(sizes.prompts)
    complete(pair, given[0][1], min(WARM_UP, sizes.new_tokens), METHODS[name])
    done = [complete(pair, prompt, sizes.new_tokens, METHODS[name]) for _, prompt in given]
    figures = {
        "settings": dict(METHODS[name].settings),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": sizes.new_tokens,
        **_of_completions(done),
        "by source": _by_source([source for source, _ in given], [each.rate for each in done]),
        "token_ids": [each.token_ids for each in done],
        "seconds of loading": context.models.seconds,
    }
    rate, milliseconds = figures["tokens a second"]["median"], figures["milliseconds a round"]
    bounds = [] if sizes.tiny else speed_bounds(context.device_name, name, rate)
    if name != "plain" and (plain := context.store.measured("1-plain")):
        figures["differing tokens"] = sum(map(unlike, figures["token_ids"], plain["token_ids"]))
        if name in BOUNDED and not sizes.tiny:
            steps = milliseconds / plain["milliseconds a round"]
            bounds.append(Bound(f"a round of {name} in plain steps", steps, most=MOST_STEPS))
    parts = ", ".join(f"{part} {each:.3g}" for part, each in figures["parts, milliseconds a round"].items())
    says = (
        f"{name}: {rate:.1f} tokens/s, behind the first {figures['tokens a second behind the first']['median']:.1f}; "
        f"{figures['tokens a round']:.2f} tokens and {figures['nodes a round']:.1f} nodes a round of "
        f"{milliseconds:.2f} ms: {parts}"
    )
    return Measured(figures, [says], bounds)


def _of_completions(done: Sequence[Completion]) -> dict[str, Any]:
    told = [each.statistics for each in done]
    rounds = max(sum(each.rounds for each in told), 1)
    totals = Counter[str]()
    for each in told:
        totals.update({part.name: 1000 * part.total_seconds / rounds for part in each.round_parts})
    later = [each.time_per_output_token_seconds * (each.generated_tokens - 1) for each in told]
    return {
        "tokens a second": _spread([each.rate for each in done]),
        "tokens a second behind the first": _spread([1 / each.time_per_output_token_seconds for each in told]),
        "milliseconds to the first": _spread([1000 * each.time_to_first_token_seconds for each in told]),
        "tokens a round": sum(each.tokens_per_round * each.rounds for each in told) / rounds,
        "nodes a round": sum(each.draft_n for each in told) / rounds,
        "milliseconds a round": 1000 * sum(later) / rounds,
        "parts, milliseconds a round": {name: round(each, 4) for name, each in totals.items()},
    }


def transformers(context: Context) -> Measured:
    """`generate` of transformers: plain, or with the draft as its assistant, as the step names."""
    # They need the client, and with it versions of grpcio and protobuf that a GPU machine may lack.
    from dynatree.bench.baselines import LocalModel, load_baselines
    from dynatree.bench.methods import BASELINES

    method = BASELINES[context.step.name.split("-", 1)[1]]
    models, new_tokens = context.models, context.sizes.new_tokens
    infos = (models.target.info, models.draft.info)
    local = [LocalModel(str(folder), info) for folder, info in zip(models.folders, infos, strict=True)]
    baseline = load_baselines([method], *local).decoders[method.label]
    given = prompts(context.sizes.prompts)
    baseline(given[0][1], min(WARM_UP, new_tokens))
    outputs = [baseline(prompt, new_tokens) for _, prompt in given]
    rates = [output.tokens / output.seconds for output in outputs]
    figures = {
        "new_tokens": new_tokens,
        "tokens a second": _spread(rates),
        "by source": _by_source([source for source, _ in given], rates),
    }
    if plain := context.store.measured("1-plain"):  # its kernels may decide nearly tied tokens otherwise in 16 bits
        ours = plain["token_ids"]
        figures["tokens unlike plain decoding's"] = sum(map(unlike, (each.token_ids or () for each in outputs), ours))
    return Measured(figures, [f"{method.label}: {median(rates):.1f} tokens/s over {new_tokens} tokens"])


def trace(context: Context) -> Measured:
    """What the profiler sees of plain and default rounds: launches, waits, copies, and the kernels' time."""
    if not context.on_gpu:
        raise NotMeasuredError(NO_GPU)
    _, prompt = prompts(1)[0]
    figures = {name: _traced(context, prompt, METHODS[name]) for name in ("plain", "default")}
    plain = figures["plain"]
    if not plain.get("cudaGraphLaunch") or not plain["kernels"]:
        raise NotMeasuredError("the profiler saw no graph on the device, so it may have missed waits as well")
    says = [f"{name}, a round: {told}" for name, told in figures.items()]
    bounds = [
        Bound("waits of the host in a plain round", sum(plain.get(name, 0) for name in WAITS), most=MOST_WAITS),
        Bound("copies up in a plain round", plain.get("Memcpy HtoD", 0), most=1),
        Bound("copies down in a plain round", plain.get("Memcpy DtoH", 0), most=1),
    ]
    return Measured(figures, says, bounds)


def _traced(context: Context, prompt: tuple[int, ...], method: Method) -> dict[str, Any]:
    """Calls of the runtime, copies and kernels a round, after the prompt; milliseconds of the slowest kernels."""
    torch.cuda.synchronize()
    mark = torch.profiler.record_function(MARK)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        done = complete(context.models.pair, prompt, context.sizes.new_tokens, method, begun=mark.__enter__)
        mark.__exit__(None, None, None)
    return of_events(list(profile.events()), done.statistics.rounds)


def of_events(events: Sequence[Any], rounds: int) -> dict[str, Any]:
    """The events within the mark, for each round; what the profiler itself waits for lies outside."""
    span = next(each.time_range for each in events if each.name == MARK and "CPU" in str(each.device_type))
    counts, kernels = Counter[str](), Counter[str]()
    for each in events:
        if each.name == MARK or not span.start <= each.time_range.start <= span.end:
            continue
        if each.name.startswith("cuda"):
            counts[each.name] += 1
        elif each.name.startswith(("Memcpy", "Memset")):
            counts[" ".join(each.name.split()[:2])] += 1
        elif "CUDA" in str(each.device_type):
            counts["kernels"] += 1
            kernels[each.name[:60]] += each.time_range.elapsed_us()
    per_round = {name: round(count / max(rounds, 1), 3) for name, count in sorted(counts.items())}
    slowest = {name: round(total / 1000 / max(rounds, 1), 4) for name, total in kernels.most_common(SLOWEST)}
    return {**per_round, "kernels' milliseconds": round(sum(kernels.values()) / 1000 / max(rounds, 1), 3), **slowest}


def unlike(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Count the places where two completions differ."""
    return sum(map(int.__ne__, tokens, expected)) + abs(len(tokens) - len(expected))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values), "prompts": len(values)}


def _by_source(sources: Sequence[str], rates: Sequence[float]) -> dict[str, dict[str, float]]:
    grouped: dict[str, list[float]] = {}
    for source, rate in zip(sources, rates, strict=True):
        grouped.setdefault(f"{source} (held out)" if source == HELD_OUT else source, []).append(rate)
    return {source: _spread(each) for source, each in grouped.items()}
