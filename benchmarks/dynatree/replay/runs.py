"""Replay policies on recordings, machine by machine, and compute the figures of each replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median

from dynatree.bench.figures import by
from dynatree.bench.methods import PLAIN, Method
from dynatree.common.model_info import ForwardCost
from dynatree.draft.control.constants import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.control.verify_cost import ROW_BUCKETS
from dynatree.draft.policies import create_policy
from dynatree.replay.machines import Curve, Machine, seconds_on
from dynatree.replay.recording import RecordedRun
from dynatree.replay.session import Noise, Replayed, replay
from dynatree.replay.table_model import Ask

TARGET_ROWS = 64  # rows up to which the verify service measures its forward passes when it starts
DRAFT_ROWS = 6  # the same for the draft service

STALL = 3.0


@dataclass(frozen=True)
class Group:
    """Recorded runs reported together: all runs of one temperature and length, in the order of their files."""

    temperature: float
    new_tokens: int
    runs: tuple[RecordedRun, ...] = field(repr=False)

    @property
    def name(self) -> tuple[float, int]:
        """Temperature and length, which identify the group."""
        return self.temperature, self.new_tokens


@dataclass(frozen=True)
class Settings:
    """Settings of a replay.

    Attributes:
        fresh: Whether each prompt starts with a new service; otherwise the prompts of a group share the learnt costs.
        noise: Standard deviation of the logarithm of a measured time / the machine's own time.
        stalls: Share of measured times that are `STALL` times as long.
        seed: Seed of noise and stalls.
        control: Tuned constants of the policies.
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
    """Results of a task.

    Attributes:
        task: The task.
        runs: One result for each run of the group.
    """

    task: Task
    runs: tuple[Replayed, ...]

    @property
    def speedups(self) -> list[float]:
        """Tokens per second / plain decoding's on the machine, for each run; the prefill is left out."""
        plain = self.task.machine.plain_seconds
        return [run.tokens * plain / run.seconds for run in self.runs]

    @property
    def speedup(self) -> float:
        """Median of `speedups` over the runs."""
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
        """Accepted nodes / nodes, over all runs; None if there are no nodes."""
        return self._share("accepted", "nodes")

    @property
    def stood_in(self) -> float | None:
        """Share of expanded nodes for which a recorded one stood in; None if no node was expanded."""
        return self._share("stood_in", "expanded")

    def _share(self, part: str, whole: str) -> float | None:
        total = self._total(whole)
        return self._total(part) / total if total else None

    def _total(self, name: str) -> int:
        return sum(getattr(run, name) for run in self.runs)


def groups(runs: Iterable[RecordedRun]) -> list[Group]:
    """Group runs by length and temperature, shortest first and then coldest first."""
    sorted_ = sorted(by(runs, lambda run: (len(run.completion), run.temperature)).items())
    return [Group(temperature, new_tokens, tuple(same)) for (new_tokens, temperature), same in sorted_]


def replay_all(tasks: Sequence[Task], processes: int) -> Iterator[Result]:
    """Run the tasks in `processes` processes; yield their results in order. The results do not depend on the number."""
    if processes == 1 or len(tasks) == 1:
        yield from map(replay_group, tasks)
        return
    with ProcessPoolExecutor(processes, initializer=_take, initargs=(tasks,)) as pool:
        yield from pool.map(_replay_taken, range(len(tasks)))


_taken: Sequence[Task] = ()  # in a pool process: all tasks, sent only once because they hold the recordings


def _take(tasks: Sequence[Task]) -> None:
    global _taken
    _taken = tasks


def _replay_taken(place: int) -> Result:
    result = replay_group(_taken[place])
    return replace(result, task=replace(result.task, group=replace(result.task.group, runs=())))


def replay_group(task: Task, ask: Callable[[RecordedRun], Ask] | None = None) -> Result:
    """Decode a group's runs one after the other; costs learnt in one run carry over to the next, unless `fresh`.

    `ask` returns, for a run, the function that gives the proposals of contexts that the run lacks; see `TableModel`.
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
    """The costs that a service knows when it starts: each side's measurements of its own forward passes."""

    def measured(curve: Curve, most_rows: int) -> list[ForwardCost]:
        return [ForwardCost(rows, seconds_on(curve, rows)) for rows in ROW_BUCKETS if rows <= most_rows]

    return Costs(measured(machine.verify, TARGET_ROWS), measured(machine.draft, DRAFT_ROWS), control)


def _noise(settings: Settings) -> Noise:
    generator = random.Random(settings.seed)

    def factor() -> float:
        stall = STALL if generator.random() < settings.stalls else 1.0
        return stall * generator.lognormvariate(0.0, settings.noise)

    return factor
