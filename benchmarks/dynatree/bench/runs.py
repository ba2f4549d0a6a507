"""Run every case on every prompt, and compare each output with plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dynatree.bench.decoding import Decoders, Prompt
from dynatree.bench.memory import PeakMemory
from dynatree.bench.methods import PLAIN, RANKS, Case, Method
from dynatree.bench.ranks import count_ranks
from dynatree.bench.record import Run, Skipped, Tree, statistics_of
from dynatree.client import InvalidRequestError, RoundTrace, SamplingScheme
from dynatree.common.seeds import derived_seed


@dataclass(frozen=True)
class RunSettings:
    """Settings of all runs of a measurement; end-of-sequence tokens are ignored, so that all outputs are equally long.

    Each prompt has its own seed in each repetition, derived from `seed`. With `ranks`, runs are traced and guesses
    are counted; with `trees`, runs are traced and their trees kept. `warmup` is a number of prompts.
    """

    max_new_tokens: int
    seed: int
    repetitions: int
    warmup: int
    ranks: bool = False
    trees: bool = False

    def seed_of(self, prompt: int, repetition: int = 0) -> int:
        """The seed of a run."""
        return derived_seed(self.seed, prompt, repetition)


def plan(methods: Sequence[Method], temperatures: Sequence[float], schemes: Sequence[SamplingScheme]) -> list[Case]:
    """Every method at every temperature, under every scheme if the temperature is above 0."""
    cases = (
        Case(method, temperature, scheme if temperature else None)
        for method in methods
        for temperature in temperatures
        for scheme in schemes
    )
    return list(dict.fromkeys(cases))


def admitted(decoders: Decoders, prompt: Prompt, cases: Sequence[Case]) -> tuple[list[Case], list[Skipped]]:
    """Split the cases into those that can run and those refused for their sampling scheme, by a request for one token.

    Raises:
        DynaTreeError: The server refuses a policy or a setting, or does not answer.
        SystemExit: A baseline cannot decode.
    """
    refusals: dict[tuple[Method, str], str] = {}
    for case in dict.fromkeys(Case(case.method, 0.0, None) for case in cases):
        decoders.complete(prompt, case, max_new_tokens=1, seed=0)
    for method in dict.fromkeys(case.method for case in cases if case.scheme == "residual"):
        try:
            decoders.complete(prompt, Case(method, 1.0, "residual"), max_new_tokens=1, seed=0)
        except InvalidRequestError as error:
            refusals[method, "residual"] = error.details
    skipped = [Skipped(label=method.label, scheme=scheme, reason=why) for (method, scheme), why in refusals.items()]
    return [case for case in cases if (case.method, case.scheme) not in refusals], skipped


def warm_up(
    decoders: Decoders, prompts: Sequence[Prompt], cases: Sequence[Case], settings: RunSettings
) -> Iterator[None]:
    """Run the cases on the first `settings.warmup` prompts, and discard the outputs."""
    for number in range(settings.warmup):
        prompt = prompts[number % len(prompts)]
        for case in cases:
            decoders.complete(
                prompt,
                case,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed_of(number, settings.repetitions),
            )
            yield


def measure(
    decoders: Decoders, memory: PeakMemory, prompts: Sequence[Prompt], cases: Sequence[Case], settings: RunSettings
) -> Iterator[Run]:
    """Run all cases for each prompt and repetition in turn, so that a slow minute affects them all.

    Plain decoding runs first; the order of the other cases rotates, so that none gains by its position.
    If a greedy output differs from plain decoding, `margin` is the gap between the target's two best logits, if known.

    Raises:
        DynaTreeError: A completion failed.
        SystemExit: A baseline failed.
    """
    plain_cases = [case for case in cases if case.method == PLAIN]
    others = [case for case in cases if case.method != PLAIN]
    for number, prompt in enumerate(prompts):
        for repetition in range(settings.repetitions):
            plain: dict[float, tuple[int, ...]] = {}
            of_servers: dict[Method, tuple[Run, tuple[int, ...] | None]] = {}
            seed = settings.seed_of(number, repetition)
            turn = (number * settings.repetitions + repetition) % max(1, len(others))
            for case in plain_cases + others[turn:] + others[:turn]:
                memory.reset()
                output = decoders.complete(
                    prompt,
                    case,
                    max_new_tokens=settings.max_new_tokens,
                    seed=seed,
                    trace=settings.ranks or settings.trees,
                )
                peaks = memory.read()
                if case.method == PLAIN and output.token_ids is not None:
                    plain[case.temperature] = output.token_ids
                known = case.equals_plain_decoding and output.token_ids is not None
                expected = plain.get(case.temperature) if known else None
                agrees = None if expected is None else agreement(output.token_ids or (), expected)
                run = Run(
                    label=case.method.label,
                    policy=case.method.policy,
                    settings=dict(case.method.settings),
                    temperature=case.temperature,
                    scheme=case.scheme,
                    seed=seed if case.temperature else None,
                    prompt=number,
                    repetition=repetition,
                    tokens=output.tokens,
                    equal=None if expected is None or case.method.foreign else output.token_ids == expected,
                    agrees=agrees,
                    wall_seconds=output.seconds,
                    arrivals=output.kept_arrivals,
                    peak_memory=peaks,
                    statistics=statistics_of(output.statistics),
                )
                margin = decoders.baselines.margin if case.temperature == 0 else None
                if margin is not None and expected is not None and agrees != len(expected):
                    run["margin"] = margin([*prompt, *expected[:agrees]])
                if settings.ranks:
                    run["ranks"] = count_ranks(output.trace, RANKS)
                if settings.trees and case.method != PLAIN:
                    run["trees"] = [_tree(each) for each in output.trace]
                if case.method.foreign:
                    of_servers[case.method] = run, output.token_ids
                yield run
            _compare_servers(of_servers)


def _compare_servers(found: Mapping[Method, tuple[Run, tuple[int, ...] | None]]) -> None:
    """Compare servers that draft with their own plain decoding of the same prompt; the runs are changed in place."""
    token_ids = {method.label: ids for method, (_, ids) in found.items()}
    for method, (run, ids) in found.items():
        expected = token_ids.get(method.own_plain or "")
        if ids is not None and expected is not None:
            run["own_equal"], run["own_agrees"] = ids == expected, agreement(ids, expected)


def _tree(trace: RoundTrace) -> Tree:
    return Tree(
        parents=list(trace.parents), probabilities=list(trace.probabilities), accepted=list(trace.accepted_nodes)
    )


def agreement(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Number of leading tokens that equal the expected ones."""
    differences = (place for place, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1])
    return next(differences, min(len(tokens), len(expected)))
