"""Part 3: every policy's tokens beside plain decoding's, alone, together, through services; and offloaded layers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from costs import seconds
from decoding import DEFAULT, GREEDY, PLAIN, SAMPLED, Method, complete, complete_together
from keeping import OF_SERVICES, Bound, Measured, NotMeasuredError, absent
from pair import prompts
from speed import unlike

from dynatree.common.sampling import Sampling
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.sampling.choosing import scores
from dynatree.engine.settings import ModelSettings

if TYPE_CHECKING:
    from session import Context

SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
STEPS = 10  # whose logits are compared where layers are offloaded
ROWS = (1, 64, 256)


def compared(context: Context) -> Measured:
    """The policy that the step names, greedy or sampled as it names; plain decoding is what the others must equal."""
    mode, models, sizes = context.step.name.rsplit("-", 1)[1], context.models, context.sizes
    sampling, plain = SAMPLINGS[mode], context.policy == "plain"
    method = PLAIN if plain else Method(context.policy)
    given = [prompt for _, prompt in prompts(sizes.equality_prompts)]
    done = [complete(models.pair, prompt, sizes.equality_tokens, method, sampling) for prompt in given]
    rate = sum(len(each.token_ids) for each in done) / sum(each.statistics.total_seconds for each in done)
    figures: dict[str, Any] = {"temperature": sampling.temperature, "seed": sampling.seed, "tokens a second": rate}
    says = [f"{method.policy}, temperature {sampling.temperature:g}: {rate:.1f} tokens/s"]
    if plain:
        figures["batch_invariant"], figures["rows"] = models.target.batch_invariant, models.target.most_rows
        figures["token_ids"] = [each.token_ids for each in done]
        return Measured(figures, says)
    differing = 0
    for number, expected in enumerate(context.store.figures(f"3-plain-{mode}")["token_ids"]):
        tokens = done[number].token_ids
        if differ := unlike(tokens, expected):
            differing += differ
            first = next(place for place, token in enumerate(expected) if tokens[place : place + 1] != (token,))
            margin = _margin(models.target, (*given[number], *expected[:first]), sampling)
            says.append(f"prompt {number} parts at {first}, in {differ} tokens, by {margin:.3g}")
    figures["differing tokens"], figures["differences"] = differing, says[1:]
    what = f"differing tokens of {method.policy} at temperature {sampling.temperature:g}"
    return Measured(figures, says[:4], [Bound(what, differing, most=0)])


def _margin(engine: Engine, tokens: Sequence[int], sampling: Sampling) -> float:
    """Return the difference between the two best scores after these tokens."""
    [logits] = _forward(engine, tokens, 1)
    best = scores(logits[None], [len(tokens)], sampling)[0].float().topk(2).values
    return float(best[0] - best[1])


def together(context: Context) -> Measured:
    """So many sessions as the step names, at once: tokens a second, and whether each has its tokens of alone."""
    count = int(context.step.name.rsplit("-", 1)[1])
    if count > context.models.sessions:
        raise NotMeasuredError(f"the pair was loaded for {context.models.sessions} sessions")
    known = context.store.figures("3-plain-greedy")["token_ids"]
    given = [prompt for _, prompt in prompts(context.sizes.equality_prompts)]
    places = [number % len(given) for number in range(count)]
    figures: dict[str, Any] = {"sessions": count}
    pair, says = context.models.pair, []
    for name, method in (("plain", PLAIN), ("default", DEFAULT)):
        several = [given[place] for place in places]
        done = asyncio.run(complete_together(pair, several, context.sizes.equality_tokens, method))
        differing = sum(map(unlike, (each.token_ids for each in done.completions), (known[place] for place in places)))
        figures[name] = {"tokens a second": done.rate, "rows of passes": done.rows, "differing tokens": differing}
        mean = sum(done.rows) / len(done.rows)
        says.append(f"{count} sessions, {name}: {done.rate:.1f} tokens/s, {len(done.rows)} passes of {mean:.1f} rows")
    differing = sum(figures[name]["differing tokens"] for name in ("plain", "default"))
    return Measured(figures, says, [Bound(f"differing tokens of {count} sessions together", differing, most=0)])


def services(context: Context) -> Measured:
    """Both services as processes on sockets, and the client library: tokens a second, and equality."""
    if names := absent(OF_SERVICES):
        raise NotMeasuredError(f"missing: {names}")
    from dynatree.bench.decoding import Decoders
    from dynatree.bench.methods import PLAIN as PLAIN_METHOD
    from dynatree.bench.methods import Case, parse_method
    from dynatree.cli.serve import pair_settings
    from dynatree.cli.service_pair import service_pair

    context.models.free()
    plain, new_tokens = context.store.figures("3-plain-greedy"), context.sizes.equality_tokens
    given = [prompt for _, prompt in prompts(context.sizes.equality_prompts)]
    # bits depend on the number of rows, which the service might choose otherwise
    settings = pair_settings(*map(str, context.models.folders), max_sessions=2, fixed_rows=(plain["rows"],))
    figures: dict[str, Any] = {"new_tokens": new_tokens}
    with service_pair(*settings) as pair:
        decoders = Decoders(pair.address)
        for name, method in (("plain", PLAIN_METHOD), ("default", parse_method(DEFAULT.policy))):
            case = Case(method, 0.0, None)
            decoders.complete(given[0], case, max_new_tokens=8, seed=0)
            done = [decoders.complete(prompt, case, max_new_tokens=new_tokens, seed=0) for prompt in given]
            differing = sum(
                unlike(each.token_ids or (), ids) for each, ids in zip(done, plain["token_ids"], strict=True)
            )
            rate = sum(each.tokens for each in done) / sum(each.seconds for each in done)
            figures[name] = {"tokens a second": rate, "differing tokens": differing}
    says = [f"services, {name}: {figures[name]['tokens a second']:.1f} tokens/s" for name in ("plain", "default")]
    differing = sum(figures[name]["differing tokens"] for name in ("plain", "default"))
    return Measured(figures, says, [Bound("differing tokens through services", differing, most=0)])


def offloaded(context: Context) -> Measured:
    """Half the layers in the host's memory, beside all on the device: bits of logits, times, and how fast is copied."""
    context.models.free()
    [(_, prompt)] = prompts(1)
    layers = context.sizes.shapes[0].layers
    logits, times, stream = [], [], None
    with tempfile.TemporaryDirectory() as cache:
        for resident in (layers, layers // 2):
            settings = ModelSettings(
                str(context.models.folders[0]),
                device=context.device,
                sessions=1,
                max_context=1024,
                fixed_rows=(),
                resident_layers=resident,
                layer_cache=Path(cache),
            )
            engine = load_engine(settings)
            logits.append(_forward(engine, prompt, STEPS))
            times.append({rows: 1000 * _step_seconds(engine, rows) for rows in ROWS})
            stream = engine.source
            if stream is not None:
                sweep, size = stream.sweep_seconds, stream.bytes
                stream.close()
            del engine
            context.models.free()
    differing = sum(not torch.equal(*both) for both in zip(*logits, strict=True))
    figures = {
        "offloaded layers": layers - layers // 2,
        "bytes": size,
        "sweep, s": sweep,
        "milliseconds by rows, all on the device": times[0],
        "milliseconds by rows": times[1],
        "forwards with other bits": differing,
    }
    says = [
        f"{size / 1e9:.2f} GB are copied in {1e3 * sweep:.1f} ms, {size / sweep / 1e9:.1f} GB/s",
        *(f"{rows} rows: {times[1][rows]:.1f} ms, all there {times[0][rows]:.1f} ms" for rows in ROWS),
    ]
    return Measured(figures, says, [Bound("forwards with other bits where layers are offloaded", differing, most=0)])


def _forward(engine: Engine, prompt: Sequence[int], steps: int) -> list[torch.Tensor]:
    """The logits `[vocabulary]` of a prompt's last token, and of greedy steps behind it."""
    kv = engine.kv_cache.reserve(len(prompt) + steps)
    assert kv is not None, "no session is open"
    tokens, logits, start = list(prompt), [], 0
    try:
        for _ in range(steps):
            rest = tokens[start:]
            segment = Segment(kv, start, rest, range(start, len(tokens)), keep=[len(rest) - 1])
            logits.append(engine.forward([segment])[0][0].clone())
            start = len(tokens)
            tokens.append(int(logits[-1].argmax()))
    finally:
        engine.kv_cache.release(kv)
    return logits


def _step_seconds(engine: Engine, rows: int) -> float:
    kv = engine.kv_cache.reserve(rows)
    assert kv is not None, "no session is open"
    try:
        segment = Segment(kv, 0, [5] * rows, range(rows), keep=[rows - 1])
        return seconds(lambda: engine.forward([segment]), engine, calls=4)
    finally:
        engine.kv_cache.release(kv)
