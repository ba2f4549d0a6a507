"""Parts 1 and 2: tokens a second of one session, by policy, beside transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from decoding import DEFAULT, PLAIN, Completion, Method, complete
from keeping import Measured, speed_bounds
from pair import PROMPT_TOKENS, Prompt, prompts

if TYPE_CHECKING:
    from session import Context

LINEAR = Method("linear", {"depth": 5})
DYNATREE = Method("dynatree")
DYSPEC = Method("dyspec")
METHODS = {"plain": PLAIN, "default": DEFAULT, "linear:depth=5": LINEAR, "dynatree": DYNATREE, "dyspec": DYSPEC}
WARM_UP = 16  # tokens
HELD_OUT = "treasure_island"  # the book that the pair was not trained on


def plain(context: Context) -> Measured:
    """Plain decoding."""
    measured, completions = _measured(context, PLAIN)
    rate = measured.figures["tokens a second"]["median"]
    figures = {**measured.figures, "token_ids": [each.token_ids for each in completions]}
    return Measured(figures, measured.says, speed_bounds(_card(context), "plain", rate))


def default(context: Context) -> Measured:
    """Measure the default policy."""
    measured, _ = _measured(context, DEFAULT)
    rate = measured.figures["tokens a second"]["median"]
    return Measured(measured.figures, measured.says, speed_bounds(_card(context), "default", rate))


def linear(context: Context) -> Measured:
    """Measure the policy `linear` with chains of five nodes."""
    return _measured(context, LINEAR)[0]


def dynatree(context: Context) -> Measured:
    """DynaTree's policy."""
    return _measured(context, DYNATREE)[0]


def dyspec(context: Context) -> Measured:
    """DySpec's policy."""
    return _measured(context, DYSPEC)[0]


def long(context: Context) -> Measured:
    """One long completion by each of these."""
    source, prompt = prompts(1)[0]
    figures: dict[str, Any] = {"source": source, "new_tokens": context.sizes.long_tokens}
    says = []
    expected: tuple[int, ...] | None = None
    for name, method in METHODS.items():
        done = complete(context.models.pair, prompt, context.sizes.long_tokens, method)
        expected = expected or done.token_ids
        figures[name] = {
            **_of_completions([done]),
            "differing tokens": _differing(done.token_ids, expected),
        }
        says.append(f"{name}: {done.rate:.1f} tokens/s over {len(done.token_ids)} tokens")
    return Measured(figures, says)


def transformers(context: Context) -> Measured:
    """Plain `generate` of transformers."""
    return _by_transformers(context, "transformers", context.sizes.prompts, context.sizes.new_tokens)


def transformers_assisted(context: Context) -> Measured:
    """The same with the draft as its assistant."""
    return _by_transformers(context, "transformers-assisted", context.sizes.prompts, context.sizes.new_tokens)


def transformers_long(context: Context) -> Measured:
    """Both on the one long completion."""
    both = {
        name: _by_transformers(context, name, 1, context.sizes.long_tokens)
        for name in ("transformers", "transformers-assisted")
    }
    return Measured(
        {name: each.figures for name, each in both.items()}, [line for each in both.values() for line in each.says]
    )


def _measured(context: Context, method: Method) -> tuple[Measured, list[Completion]]:
    pair, new_tokens = context.models.pair, context.sizes.new_tokens
    given = prompts(context.sizes.prompts)
    complete(pair, given[0][1], min(WARM_UP, new_tokens), method)
    completions = [complete(pair, prompt, new_tokens, method) for _, prompt in given]
    figures = {
        "policy": method.policy,
        "settings": dict(method.settings),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": new_tokens,
        **_of_completions(completions),
        "by source": _by_source([source for source, _ in given], [each.rate for each in completions]),
    }
    known = context.store.read("1-plain")
    if known is not None and known["status"] == "measured":
        expected = known["figures"]["token_ids"]
        pairs = zip(completions, expected, strict=True)
        figures["differing tokens"] = sum(_differing(done.token_ids, plain_ids) for done, plain_ids in pairs)
    rate = figures["tokens a second"]
    says = (
        f"{method.policy}: {rate['median']:.1f} tokens/s ({rate['low']:.1f} to {rate['high']:.1f}), behind the first "
        f"{figures['tokens a second behind the first']['median']:.1f}; {figures['tokens a round']:.2f} tokens and "
        f"{figures['nodes a round']:.1f} nodes a round of {figures['milliseconds a round']:.2f} ms"
    )
    return Measured(figures, [says]), completions


def _of_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    rounds = [each for done in completions for each in done.rounds]
    count = max(len(rounds), 1)
    return {
        "tokens a second": _spread([each.rate for each in completions]),
        "tokens a second behind the first": _spread([each.later_rate for each in completions]),
        "milliseconds to the first": _spread([1000 * each.first_seconds for each in completions]),
        "tokens a round": sum(len(each.token_ids) - 1 for each in completions) / count,
        "nodes a round": sum(nodes for nodes, _, _ in rounds) / count,
        "milliseconds a round": 1000 * sum(draft + target for _, draft, target in rounds) / count,
        "draft milliseconds a round": 1000 * sum(draft for _, draft, _ in rounds) / count,
        "target milliseconds a round": 1000 * sum(target for _, _, target in rounds) / count,
    }


def _by_transformers(context: Context, name: str, count: int, new_tokens: int) -> Measured:
    # They need the client, and with it versions of grpcio and protobuf that a GPU machine may lack.
    from dynatree.bench.baselines import LocalModel, load_baselines
    from dynatree.bench.methods import ASSISTED, BASELINES

    target, draft = context.models.folders
    methods = [BASELINES[name]]
    models = LocalModel(str(target), context.models.target.info), LocalModel(str(draft), context.models.draft.info)
    baseline = load_baselines(methods, *models).decoders[methods[0].label]
    given: list[tuple[str, Prompt]] = prompts(count)
    baseline(given[0][1], min(WARM_UP, new_tokens))
    outputs = [baseline(prompt, new_tokens) for _, prompt in given]
    rates = [output.tokens / output.seconds for output in outputs]
    figures: dict[str, Any] = {
        "new_tokens": new_tokens,
        "assisted": methods[0] == ASSISTED,
        "tokens a second": _spread(rates),
        "by source": _by_source([source for source, _ in given], rates),
    }
    known = context.store.read("1-plain")
    if known is not None and known["status"] == "measured" and new_tokens == context.sizes.new_tokens:
        # in 16 bits transformers' own kernels may decide nearly tied tokens otherwise
        pairs = zip(outputs, known["figures"]["token_ids"], strict=True)
        figures["tokens unlike plain decoding's"] = sum(_differing(each.token_ids or (), ours) for each, ours in pairs)
    return Measured(figures, [f"{methods[0].label}: {median(rates):.1f} tokens/s over {new_tokens} tokens"])


def _card(context: Context) -> str:
    return "" if context.sizes.tiny else context.device_name


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values), "prompts": len(values)}


def _by_source(sources: Sequence[str], rates: Sequence[float]) -> dict[str, dict[str, float]]:
    grouped: dict[str, list[float]] = {}
    for source, rate in zip(sources, rates, strict=True):
        grouped.setdefault(f"{source} (held out)" if source == HELD_OUT else source, []).append(rate)
    return {source: _spread(each) for source, each in grouped.items()}


def _differing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    return sum(ours != theirs for ours, theirs in zip(tokens, expected, strict=False)) + abs(
        len(tokens) - len(expected)
    )
