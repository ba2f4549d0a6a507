"""Replaying policies on recordings, machine by machine, and the figures of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median

from dynatree.bench.figures import by
from dynatree.bench.methods import PLAIN, Method
from dynatree.bench.replay.machines import Curve, Machine, seconds_on
from dynatree.bench.replay.recording import RecordedRun
from dynatree.bench.replay.session import Noise, Replayed, replay
from dynatree.bench.replay.table_model import Ask
from dynatree.common.model_info import ForwardCost
from dynatree.draft.control import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.policies import create_policy
from dynatree.draft.round_costs import Costs
from dynatree.draft.verify_cost import ROW_BUCKETS

TARGET_ROWS = 64  # what the services measure when they start
DRAFT_ROWS = 6

STALL = 3.0


@dataclass(frozen=True)
class Group:
    """Recorded runs that are told of together: all of one temperature and length, in the order of their files."""

    temperature: float
    new_tokens: int
    runs: tuple[RecordedRun, ...] = field(repr=False)

    @property
    def name(self) -> tuple[float, int]:
        """What no other group has."""
        return self.temperature, self.new_tokens


@dataclass(frozen=True)
class Settings:
    """How to replay.

    Attributes:
        fresh: Whether every prompt finds a service just started; otherwise a group's prompts share what was learnt.
        noise: The standard deviation of the logarithm of a measured time over the machine's own.
        stalls: The share of measured times that are `STALL` times as long.
        seed: Of both.
        control: The tuned constants of policies.
    """

    fresh: bool = False
    noise: float = 0.0
    stalls: float = 0.0
    seed: int = 0
    control: ControlSettings = DEFAULT_CONTROL


@dataclass(frozen=True)
class Task:
    """One method on one group of runs and one machine."""

    method: Method
    machine: Machine
    group: Group
    settings: Settings


@dataclass(frozen=True)
class Result:
    """What became of a task, run by run.

    Attributes:
        task: The task.
        runs: One for each of the group's.
    """

    task: Task
    runs: tuple[Replayed, ...]

    @property
    def speedups(self) -> list[float]:
        """Tokens a second / plain decoding's on the machine, by run; the prompt's own forward is left out."""
        plain = self.task.machine.plain_seconds
        return [run.tokens * plain / run.seconds for run in self.runs]

    @property
    def speedup(self) -> float:
        """The median over runs."""
        return median(self.speedups)

    @property
    def tokens_per_round(self) -> float:
        """Tokens of all runs / their rounds."""
        return self._total("tokens") / self._total("rounds")

    @property
    def nodes_per_round(self) -> float:
        """Nodes of all runs / their rounds."""
        return self._total("nodes") / self._total("rounds")

    @property
    def acceptance(self) -> float | None:
        """Accepted nodes / nodes, of all runs; None where there are no nodes."""
        return self._share("accepted", "nodes")

    @property
    def stood_in(self) -> float | None:
        """The share of expanded nodes that were not recorded; None where none was expanded."""
        return self._share("stood_in", "expanded")

    def _share(self, part: str, whole: str) -> float | None:
        total = self._total(whole)
        return self._total(part) / total if total else None

    def _total(self, name: str) -> int:
        return sum(getattr(run, name) for run in self.runs)


def groups(runs: Iterable[RecordedRun]) -> list[Group]:
    """Runs by temperature and length, shortest and coldest first."""
    sorted_ = sorted(by(runs, lambda run: (len(run.completion), run.temperature)).items())
    return [Group(temperature, new_tokens, tuple(same)) for (new_tokens, temperature), same in sorted_]


def replay_all(tasks: Sequence[Task], processes: int) -> Iterator[Result]:
    """The result of each task, in order; in so many processes, with the same results."""
    if processes == 1 or len(tasks) == 1:
        yield from map(replay_group, tasks)
        return
    with ProcessPoolExecutor(processes, initializer=_take, initargs=(tasks,)) as pool:
        yield from pool.map(_replay_taken, range(len(tasks)))


_taken: Sequence[Task] = ()  # in a process of the pool: all tasks, handed over once, since they hold the recordings


def _take(tasks: Sequence[Task]) -> None:
    global _taken
    _taken = tasks


def _replay_taken(place: int) -> Result:
    result = replay_group(_taken[place])
    return replace(result, task=replace(result.task, group=replace(result.task.group, runs=())))


def replay_group(task: Task, ask: Callable[[RecordedRun], Ask] | None = None) -> Result:
    """Decode a group's runs, one after the other, with what the service learns of one kept for the next.

    `ask` gives what is asked of contexts that a run lacks; see `TableModel`.
    """
    machine, settings = task.machine, task.settings
    control = settings.control
    costs = starting_costs(machine, control)
    noise = _noise(settings)
    replayed = []
    for run in task.group.runs:
        if settings.fresh:
            costs = starting_costs(machine, control)
        policy = create_policy(task.method.policy or PLAIN.label, dict(task.method.settings), costs, control=control)
        replayed.append(replay(run, policy, machine, noise, ask and ask(run)))
    return Result(task, tuple(replayed))


def starting_costs(machine: Machine, control: ControlSettings) -> Costs:
    """What a service knows of rounds when it starts: what each side measured of its own forwards."""

    def measured(curve: Curve, most_rows: int) -> list[ForwardCost]:
        return [ForwardCost(rows, seconds_on(curve, rows)) for rows in ROW_BUCKETS if rows <= most_rows]

    return Costs(measured(machine.verify, TARGET_ROWS), measured(machine.draft, DRAFT_ROWS), control)


def _noise(settings: Settings) -> Noise:
    generator = random.Random(settings.seed)

    def factor() -> float:
        stall = STALL if generator.random() < settings.stalls else 1.0
        return stall * generator.lognormvariate(0.0, settings.noise)

    return factor
