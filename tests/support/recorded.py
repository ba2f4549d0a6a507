"""A recording made by hand, and a machine with round costs."""

import math

from dynatree.bench.methods import Method
from dynatree.draft.policies.growing_tree import Proposal
from dynatree.replay.machines import Machine
from dynatree.replay.recording import RecordedRun
from dynatree.replay.runs import Group, Settings, Task
from tests.support.paths import ROOT

DATA = ROOT / "benchmarks" / "replay"
TOY = Machine(
    name="toy",
    measured=True,
    sources={},
    verify=((1, 1.0), (4, 1.6)),
    draft=((1, 0.1), (2, 0.2)),
    round_seconds=0.5,
    level_seconds=0.01,
)


def proposed(*tokens: int, prob: float = 0.5) -> tuple[Proposal, ...]:
    """Return proposals with probabilities 1/2, 1/4 and so on."""
    return tuple(Proposal(token, math.log(prob ** (rank + 1))) for rank, token in enumerate(tokens))


def hand_made() -> RecordedRun:
    """Return a prompt and six tokens; the draft's second guess of the third is right, and its first of the others."""
    run = RecordedRun(0, 0, 0.0, None, (9,), (1, 2, 3, 4, 5, 6))
    for node, tokens in enumerate([(1, 8), (2, 8), (7, 3), (4, 8), (5, 8), (6, 8)]):
        run.set_proposals(node, proposed(*tokens))
    run.add(2, 7, proposed(6, 4))
    return run


PLAINLY = Settings()


def tasks(runs: tuple[RecordedRun, ...], *names: str, settings: Settings = PLAINLY) -> list[Task]:
    return [Task(Method(name, name), TOY, Group(0.0, 6, runs), settings) for name in names]
