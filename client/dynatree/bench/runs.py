"""Running every case on every prompt, and holding each output against plain decoding."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from dynatree.bench.methods import PLAIN, RANKS, Case, Method
from dynatree.bench.ranks import count_ranks
from dynatree.bench.report import Run, Skipped
from dynatree.client import Client, Completion, InvalidRequestError, SamplingScheme

Prompt = Sequence[int]


@dataclass(frozen=True)
class RunSettings:
    """What all runs of a measurement share; end-of-sequence tokens are ignored, so that all are as long.

    The seed of a run is `seed` + its prompt's number. With `ranks`, runs are traced and guesses counted.
    """

    max_new_tokens: int
    seed: int
    repetitions: int
    warmup: int
    ranks: bool = False


def plan(methods: Sequence[Method], temperatures: Sequence[float], schemes: Sequence[SamplingScheme]) -> list[Case]:
    """Every method at every temperature, under every scheme where something is drawn."""
    cases = (
        Case(method, temperature, scheme if temperature else None)
        for method in methods
        for temperature in temperatures
        for scheme in schemes
    )
    return list(dict.fromkeys(cases))


def admitted(client: Client, prompt: Prompt, cases: Sequence[Case]) -> tuple[list[Case], list[Skipped]]:
    """The cases that the server runs, and those that it refuses for their sampling scheme; asks for one token of each.

    Raises:
        DynaTreeError: It refuses a policy or a setting, or does not answer.
    """
    once = RunSettings(max_new_tokens=1, seed=0, repetitions=1, warmup=0)
    refusals: dict[tuple[Method, str], str] = {}
    for case in dict.fromkeys(Case(case.method, 0.0, None) for case in cases):
        _complete(client, prompt, case, once, 0)
    for method in dict.fromkeys(case.method for case in cases if case.scheme == "residual"):
        try:
            _complete(client, prompt, Case(method, 1.0, "residual"), once, 0)
        except InvalidRequestError as error:
            refusals[method, "residual"] = error.details
    skipped = [Skipped(label=method.label, scheme=scheme, reason=why) for (method, scheme), why in refusals.items()]
    return [case for case in cases if (case.method, case.scheme) not in refusals], skipped


def warm_up(client: Client, prompts: Sequence[Prompt], cases: Sequence[Case], settings: RunSettings) -> Iterator[None]:
    """Run the cases on the first prompt, and keep nothing of it."""
    for _ in range(settings.warmup):
        for case in cases:
            _complete(client, prompts[0], case, settings, 0)
            yield


def measure(client: Client, prompts: Sequence[Prompt], cases: Sequence[Case], settings: RunSettings) -> Iterator[Run]:
    """Run the cases in turn, for each prompt and each repetition, plain decoding first: a slow minute hits them all.

    Raises:
        DynaTreeError: A completion failed.
    """
    cases = sorted(cases, key=lambda case: case.method != PLAIN)  # the order is kept otherwise
    for number, prompt in enumerate(prompts):
        plain: dict[float, tuple[int, ...]] = {}
        for repetition in range(settings.repetitions):
            for case in cases:
                started = time.perf_counter()
                completion = _complete(client, prompt, case, settings, number)
                seconds = time.perf_counter() - started
                if case.method == PLAIN and case.equals_plain_decoding:
                    plain.setdefault(case.temperature, completion.token_ids)
                expected = plain.get(case.temperature) if case.equals_plain_decoding else None
                run = Run(
                    label=case.method.label,
                    policy=case.method.policy,
                    settings=dict(case.method.settings),
                    temperature=case.temperature,
                    scheme=case.scheme,
                    seed=settings.seed + number if case.temperature else None,
                    prompt=number,
                    repetition=repetition,
                    tokens=len(completion.token_ids),
                    equal=None if expected is None else completion.token_ids == expected,
                    wall_seconds=seconds,
                    statistics=asdict(completion.stats),
                )
                if settings.ranks:
                    run["ranks"] = count_ranks(completion.trace, RANKS)
                yield run


def _complete(client: Client, prompt: Prompt, case: Case, settings: RunSettings, number: int) -> Completion:
    return client.generate(
        prompt,
        max_new_tokens=settings.max_new_tokens,
        temperature=case.temperature,
        seed=settings.seed + number,
        scheme=case.scheme,
        ignore_eos=True,
        trace=settings.ranks,
        policy=case.method.policy,
        policy_settings=dict(case.method.settings),
    )
