"""The speed that follows from a distilled draft: both models' measured costs, and replays of held-back text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dynatree.bench.methods import Method
from dynatree.common.errors import StartupError
from dynatree.common.model_info import ModelInfo
from dynatree.distill.texts import LENGTH
from dynatree.draft.policies import DEFAULT_POLICY
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.replay.machines import Curve, Machine
from dynatree.replay.recorder import MOST_NODES, Recorder
from dynatree.replay.recording import RecordedRun
from dynatree.replay.runs import Settings, Task, groups, replay_group

PROMPTS = 6
TEMPERATURES = (0.0, 0.7)
RANK = "; so few prompts say little: dynatree rank measures more of them"  # when the time was over early
LEAST_GAIN = 1.02  # of a draft that pays, over n-grams alone
PROMPT_TOKENS = 64
NEW_TOKENS = 48
LEAST_PROB = 1 / 32
# Time of a round and of a draft level beside the forward passes, as measured for `dynatree bench replay`.
ROUND_SECONDS, LEVEL_SECONDS = 0.0024, 0.0005
# n-grams as the default policy drafts them without a model, which is what a draft has to beat.
METHODS = (
    Method("n-grams alone", DEFAULT_POLICY, (("breadth", 0.0),)),
    Method("a chain", "linear"),
    Method("the default tree", DEFAULT_POLICY),
)
_TARGET_ROWS, _DRAFT_ROWS = 64, 6  # largest forward passes that are measured


def outcome(
    target: str, draft: Path, held_back: Tensor, end: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[str]:
    """Yield lines that say how many tokens a round commits on held-back text, how much faster that is, and what to do.

    Args:
        target: The target, as `--target-model` names it.
        draft: The folder of the draft.
        held_back: Held-back tokens, `[tokens]`.
        end: The time of `clock` at which prompts are left out, but one.
        clock: Returns the time in seconds.

    Raises:
        StartupError: One of the models cannot be served.
    """
    recorder = Recorder(
        load_engine(
            ModelSettings(
                target,
                "cpu",
                sessions=1,
                max_context=LENGTH,
                speculative_slots=_TARGET_ROWS,
                measured_rows=_TARGET_ROWS,
            )
        ),
        load_engine(
            ModelSettings(
                str(draft),
                "cpu",
                sessions=1,
                max_context=LENGTH,
                speculative_slots=2 * MOST_NODES,
                measured_rows=_DRAFT_ROWS,
                chooses_tokens=False,
            )
        ),
        LEAST_PROB,
    )
    machine = Machine(
        "this machine",
        True,
        {},
        _curve(recorder.target.info),
        _curve(recorder.draft.info),
        ROUND_SECONDS,
        LEVEL_SECONDS,
    )
    starts = torch.linspace(0, len(held_back) - PROMPT_TOKENS, PROMPTS).long().tolist()
    prompts = [held_back[start : start + PROMPT_TOKENS].tolist() for start in starts]
    runs: list[RecordedRun] = []
    begun = clock()
    for number, prompt in enumerate(prompts):
        if number and clock() + (clock() - begun) / number > end:
            break
        runs += [recorder.record(0, number, prompt, NEW_TOKENS, each, number) for each in TEMPERATURES]
    count = len(runs) // len(TEMPERATURES)
    yield f"expected on this machine, from {count} held-back prompts and {NEW_TOKENS} new tokens each:"
    speeds: dict[str, list[float]] = {}
    for group in groups(runs):
        own = speeds[f"{group.temperature:g}"] = []
        for method in METHODS:
            result = replay_group(Task(method, machine, group, Settings()))
            own.append(result.speedup)
            acceptance = "none drafted" if result.acceptance is None else f"acceptance {result.acceptance:.0%}"
            yield (
                f"  temperature {group.temperature:g}, {method.label}: {result.tokens_per_round:.2f} tokens a round, "
                f"{acceptance}, {result.speedup:.2f} x plain"
            )
    yield _advice(speeds, draft) + (RANK if count < PROMPTS else "")


def _advice(speeds: dict[str, list[float]], draft: Path) -> str:
    """Say how to use a draft, by the speeds of n-grams alone, a chain and the default tree at each temperature."""
    slow = [each for each, (alone, *drafting) in speeds.items() if max(drafting) <= LEAST_GAIN * alone]
    chained = [each for each, (alone, _, tree) in speeds.items() if tree <= LEAST_GAIN * alone]
    if not slow:
        chain = f", and --policy linear at temperature {' and '.join(chained)}" if chained else ""
        return f"use it: --draft-model {draft}{chain}"
    return (
        f"no faster than n-grams alone at temperature {' and '.join(slow)}: use --draft-model none or self:int4 "
        "instead, or train on: --resume with more --minutes, or anew with more --texts or other --layers"
    )


def _curve(info: ModelInfo) -> Curve:
    if not info.forward_costs:
        raise StartupError(f"the forward passes of model {info.name} were not measured")
    return tuple((cost.rows, cost.seconds) for cost in info.forward_costs)
