"""Part 3: every policy's tokens beside plain decoding's, alone, together, and through real services."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from decoding import DEFAULT, GREEDY, PLAIN, SAMPLED, Method, complete, complete_together
from keeping import Bound, Measured, NotMeasuredError
from pair import prompts

from dynatree.common.sampling import Sampling
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.sampling.choosing import scores

if TYPE_CHECKING:
    from session import Context

OF_SERVICES = ("grpc_health", "grpc_reflection", "prometheus_client")


def plain_greedy(context: Context) -> Measured:
    """Plain decoding, greedily."""
    return _plain(context, GREEDY)


def plain_sampled(context: Context) -> Measured:
    """Plain decoding at temperature 0.7, with a fixed seed."""
    return _plain(context, SAMPLED)


def greedy(context: Context) -> Measured:
    """The policy that the step names, greedily."""
    return _compared(context, GREEDY, "3-plain-greedy")


def sampled(context: Context) -> Measured:
    """The policy that the step names, at temperature 0.7, by a seed."""
    return _compared(context, SAMPLED, "3-plain-sampled")


def together(context: Context) -> Measured:
    """So many sessions as the step names, at once: tokens a second, and whether each has its tokens of alone."""
    count = int(context.step.name.rsplit("-", 1)[1])
    if count > context.models.sessions:
        raise NotMeasuredError(f"the pair was loaded for {context.models.sessions} sessions")
    known = context.store.figures("3-plain-greedy")["token_ids"]
    given = [prompt for _, prompt in prompts(context.sizes.equality_prompts)]
    places = [number % len(given) for number in range(count)]
    pair, new_tokens = context.models.pair, context.sizes.equality_tokens
    figures: dict[str, Any] = {"sessions": count, "new_tokens": new_tokens}
    differing, says = 0, []
    for name, method in (("plain", PLAIN), ("default", DEFAULT)):
        done = complete_together(pair, [given[place] for place in places], new_tokens, method)
        unlike = sum(_unlike(tokens, known[place]) for place, tokens in zip(places, done.token_ids, strict=True))
        differing += unlike
        figures[name] = {
            "tokens a second": done.rate,
            "passes": done.passes,
            "rows a pass": done.rows / max(done.passes, 1),
            "differing tokens": unlike,
        }
        says.append(
            f"{count} sessions, {name}: {done.rate:.1f} tokens/s in {done.passes} passes of "
            f"{figures[name]['rows a pass']:.1f} rows"
        )
    bound = Bound(f"differing tokens of {count} sessions together", differing, most=0)
    return Measured(figures, says, [bound])


def services(context: Context) -> Measured:
    """Both services as processes on sockets, and the client library: tokens a second, and equality."""
    absent = [name for name in OF_SERVICES if find_spec(name) is None]
    if absent:
        raise NotMeasuredError(f"missing: {', '.join(absent)}")
    from dynatree.bench.decoding import Decoders
    from dynatree.bench.methods import PLAIN as PLAIN_METHOD
    from dynatree.bench.methods import Case, parse_method
    from dynatree.cli.serve import pair_settings
    from dynatree.cli.service_pair import service_pair

    context.models.free()
    plain = context.store.figures("3-plain-greedy")
    known = plain["token_ids"]
    given = [prompt for _, prompt in prompts(context.sizes.equality_prompts)]
    target, draft = map(str, context.models.folders)
    # bits depend on the number of rows, which the service might choose otherwise
    settings = pair_settings(target, draft, max_sessions=2, fixed_rows=(plain["rows"],))
    figures: dict[str, Any] = {"new_tokens": context.sizes.equality_tokens}
    differing, says = 0, []
    with service_pair(*settings) as pair:
        decoders = Decoders(pair.address)
        for name, method in (("plain", PLAIN_METHOD), ("default", parse_method(DEFAULT.policy))):
            case = Case(method, 0.0, None)
            decoders.complete(given[0], case, max_new_tokens=8, seed=0)
            done = [
                decoders.complete(prompt, case, max_new_tokens=context.sizes.equality_tokens, seed=0)
                for prompt in given
            ]
            unlike = sum(_unlike(each.token_ids or (), expected) for each, expected in zip(done, known, strict=True))
            differing += unlike
            rate = sum(each.tokens for each in done) / sum(each.seconds for each in done)
            figures[name] = {"tokens a second": rate, "differing tokens": unlike}
            says.append(f"services, {name}: {rate:.1f} tokens/s at the client")
    return Measured(figures, says, [Bound("differing tokens through services", differing, most=0)])


def _plain(context: Context, sampling: Sampling) -> Measured:
    sizes = context.sizes
    given = prompts(sizes.equality_prompts)
    done = [complete(context.models.pair, prompt, sizes.equality_tokens, PLAIN, sampling) for _, prompt in given]
    figures = {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "batch_invariant": context.models.target.batch_invariant,
        "rows": context.models.target.most_rows,
        "token_ids": [each.token_ids for each in done],
    }
    rate = sum(len(each.token_ids) for each in done) / sum(each.seconds for each in done)
    return Measured(figures, [f"{len(done)} prompts, {rate:.1f} tokens/s"])


def _compared(context: Context, sampling: Sampling, plain: str) -> Measured:
    """A policy's tokens beside plain decoding's, and of each that parts from them where, and how nearly tied it was."""
    known = context.store.figures(plain)["token_ids"]
    models, sizes = context.models, context.sizes
    method = Method(context.policy)
    differences, differing, tokens, seconds, rounds = [], 0, 0, 0.0, 0
    for number, ((_, prompt), expected) in enumerate(zip(prompts(sizes.equality_prompts), known, strict=True)):
        done = complete(models.pair, prompt, sizes.equality_tokens, method, sampling)
        tokens, seconds, rounds = tokens + len(done.token_ids), seconds + done.seconds, rounds + len(done.rounds)
        unlike = _unlike(done.token_ids, expected)
        differing += unlike
        if unlike:
            place = next(
                at for at, pair in enumerate(zip(done.token_ids, expected, strict=False)) if pair[0] != pair[1]
            )
            before = (*prompt, *expected[:place])
            margin = _margin(models.target, before, sampling)
            differences.append({"prompt": number, "first": place, "tokens": unlike, "margin": margin})
    figures = {
        "policy": method.policy,
        "temperature": sampling.temperature,
        "prompts": len(known),
        "tokens": tokens,
        "differing tokens": differing,
        "differences": differences,
        "tokens a second": tokens / seconds,
        "tokens a round": (tokens - len(known)) / max(rounds, 1),
    }
    says = [
        f"{method.policy}, temperature {sampling.temperature:g}: {tokens / seconds:.1f} tokens/s",
        *(f"prompt {each['prompt']} parts at {each['first']}, by {each['margin']:.3g}" for each in differences[:3]),
    ]
    what = f"differing tokens of {method.policy} at temperature {sampling.temperature:g}"
    return Measured(figures, says, [Bound(what, differing, most=0)])


def _margin(engine: Engine, tokens: Sequence[int], sampling: Sampling) -> float:
    """How far what is chosen after these tokens is before the second."""
    count = len(tokens)
    kv = engine.kv_cache.reserve(count)
    assert kv is not None, "no session is open"
    try:
        [logits] = engine.forward([Segment(kv, 0, tokens, range(count), keep=[count - 1])])
    finally:
        engine.kv_cache.release(kv)
    best = scores(logits, [count], sampling)[0].float().topk(2).values
    return float(best[0] - best[1])


def _unlike(tokens: Sequence[int], expected: Sequence[int]) -> int:
    return sum(ours != theirs for ours, theirs in zip(tokens, expected, strict=False)) + abs(
        len(tokens) - len(expected)
    )
