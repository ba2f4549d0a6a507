"""Run every method under every load, and compare each completion with plain decoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dynatree.bench.decoding import Output, Prompt
from dynatree.bench.load.clients import Reply, Service, drive
from dynatree.bench.load.loads import ClosedLoop, Load, OpenLoop, prompt_number
from dynatree.bench.methods import PLAIN, Case
from dynatree.bench.record import Failure, Place, Run, statistics_of
from dynatree.bench.runs import RunSettings, agreement
from dynatree.client import DynaTreeError

WARM_UP_CLIENTS = 4  # clients of the warm-up if only rates are given

Batch = Callable[[Sequence[Prompt], int], list[Output]]  # completes a batch greedily by the given number of tokens each


@dataclass(frozen=True)
class Cell:
    """Results of one method's requests in one repetition of a load."""

    runs: list[Run]
    failures: list[Failure]


@dataclass(frozen=True)
class LoadBench:
    """Runs loads on a service, and on transformers' batches if they are a baseline."""

    runner: asyncio.Runner
    service: Service
    batch: Batch | None
    settings: RunSettings

    def warm_up(self, loads: Sequence[Load], cases: Sequence[Case]) -> Iterator[None]:
        """Run each case with the largest number of clients, one prompt per client, and discard the results.

        Raises:
            DynaTreeError: No service answers at the address.
            SystemExit: The baseline cannot decode.
        """
        clients = [load.clients for load in loads if isinstance(load, ClosedLoop)]
        load = ClosedLoop(max(clients, default=WARM_UP_CLIENTS), rounds=1)
        for _ in range(self.settings.warmup):
            for case in cases:
                self._replies(case, load, 0)
                yield

    def measure(self, loads: Sequence[Load], cases: Sequence[Case]) -> Iterator[Cell]:
        """Run all cases for each load and repetition in turn, every second time in reverse order.

        Each completion is compared with plain decoding's first completion of its prompt, as soon as that is known.

        Raises:
            DynaTreeError: No service answers at the address.
            SystemExit: The baseline cannot decode.
        """
        plain = _PlainOutputs()
        backwards = False
        for load in loads:
            able = admitted_to(load, cases)
            for repetition in range(self.settings.repetitions):
                for case in able[::-1] if backwards else able:
                    cell = Cell([], [])
                    for reply in self._replies(case, load, repetition):
                        if isinstance(reply.result, Output):
                            run = _run(reply, reply.result, case, load, repetition, self.settings)
                            plain.compare(run, reply.result.token_ids or ())
                            cell.runs.append(run)
                        else:
                            cell.failures.append(_failure(reply, reply.result, case, load, repetition))
                    yield cell
                backwards = not backwards

    def _replies(self, case: Case, load: Load, repetition: int) -> list[Reply]:
        if case.method.policy is not None:
            return self.runner.run(drive(self.service, case, load, repetition, self.settings))
        if self.batch is None or not isinstance(load, ClosedLoop):
            raise ValueError(f"{case.method.label} cannot run as a batch under {load}")
        return list(_in_batches(self.batch, self.service.prompts, load, repetition, self.settings.max_new_tokens))


def admitted_to(load: Load, cases: Sequence[Case]) -> list[Case]:
    """The cases that can run under a load: a baseline's batches need a closed loop."""
    return [case for case in cases if isinstance(load, ClosedLoop) or case.method.policy is not None]


def _in_batches(
    batch: Batch, prompts: Sequence[Prompt], load: ClosedLoop, repetition: int, max_new_tokens: int
) -> Iterator[Reply]:
    """Run a closed loop in static batches, one for each turn of all clients; the next starts when all have ended."""
    began = time.perf_counter()
    for turn in range(load.rounds):
        requests = range(turn * load.clients, (turn + 1) * load.clients)
        numbers = [prompt_number(load, repetition, request, len(prompts)) for request in requests]
        start = time.perf_counter() - began
        for client, output in enumerate(batch([prompts[number] for number in numbers], max_new_tokens)):
            yield Reply(numbers[client], client, start, output.seconds, output)


@dataclass(frozen=True)
class _PlainOutputs:
    """Plain decoding's first tokens by prompt, and the completions that wait for them."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waiting: dict[int, list[tuple[Run, tuple[int, ...]]]] = field(default_factory=dict)  # by prompt

    def compare(self, run: Run, token_ids: tuple[int, ...]) -> None:
        """Record in the run whether its tokens equal plain decoding's, now or when those are known."""
        prompt = run["prompt"]
        if run["label"] == PLAIN.label:
            self.tokens.setdefault(prompt, token_ids)
        self.waiting.setdefault(prompt, []).append((run, token_ids))
        if prompt in self.tokens:
            for other, other_ids in self.waiting.pop(prompt):
                other["equal"] = other_ids == self.tokens[prompt]
                other["agrees"] = agreement(other_ids, self.tokens[prompt])


def _run(reply: Reply, output: Output, case: Case, load: Load, repetition: int, settings: RunSettings) -> Run:
    return Run(
        label=case.method.label,
        policy=case.method.policy,
        settings=dict(case.method.settings),
        temperature=case.temperature,
        scheme=case.scheme,
        seed=settings.seed_of(reply.prompt) if case.temperature else None,
        prompt=reply.prompt,
        repetition=repetition,
        load=_place(reply, load),
        tokens=output.tokens,
        equal=None,
        agrees=None,
        wall_seconds=output.seconds,
        arrivals=output.kept_arrivals,
        statistics=statistics_of(output.statistics),
    )


def _failure(reply: Reply, error: DynaTreeError, case: Case, load: Load, repetition: int) -> Failure:
    return Failure(
        label=case.method.label,
        prompt=reply.prompt,
        repetition=repetition,
        load=_place(reply, load),
        seconds=reply.seconds,
        tokens=len(error.token_ids),
        code=error.code.name,
        details=error.details,
    )


def _place(reply: Reply, load: Load) -> Place:
    return Place(
        clients=load.clients if isinstance(load, ClosedLoop) else None,
        rate=load.rate if isinstance(load, OpenLoop) else None,
        client=reply.client,
        start_seconds=round(reply.start, 6),
    )
