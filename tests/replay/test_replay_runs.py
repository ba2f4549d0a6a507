"""Policies on groups of recorded runs: noise, processes, learning, figures, and many clients."""

from dataclasses import replace

import pytest

from dynatree.bench.methods import PLAIN
from dynatree.draft.policies import policy_names
from dynatree.replay.many import simulate
from dynatree.replay.recording import RecordedRun
from dynatree.replay.runs import Result, Settings, groups, replay_all, replay_group
from dynatree.replay.session import Replayed
from tests.support.recorded import PLAINLY, TOY, hand_made, tasks


def test_runs_of_one_temperature_and_length_belong_together() -> None:
    warm = replace(hand_made(), temperature=0.7)
    short = RecordedRun(0, 0, 0.0, None, (9,), (1, 2))
    assert [(group.name, len(group.runs)) for group in groups([warm, short, hand_made(), warm])] == [
        ((0.0, 2), 1),
        ((0.0, 6), 1),
        ((0.7, 6), 2),
    ]


def test_noise_and_stalls_have_a_seed() -> None:
    def seconds(settings: Settings) -> float:
        (task,) = tasks((hand_made(),), "autoregressive", settings=settings)
        return replay_group(task).runs[0].seconds

    plain = 5 * TOY.plain_seconds
    assert seconds(PLAINLY) == pytest.approx(plain)
    assert seconds(Settings(noise=0.5, seed=1)) == seconds(Settings(noise=0.5, seed=1)) != pytest.approx(plain)
    assert seconds(Settings(noise=0.5, seed=1)) != seconds(Settings(noise=0.5, seed=2))
    assert seconds(Settings(stalls=0.999)) == pytest.approx(3 * plain)


def test_results_do_not_depend_on_the_processes() -> None:
    every = tasks((hand_made(), hand_made()), *policy_names(), settings=Settings(noise=0.3, seed=7))
    alone, together = list(replay_all(every, 1)), list(replay_all(every, 2))
    assert [result.runs for result in alone] == [result.runs for result in together]
    assert [result.task.method.label for result in together] == list(policy_names())


def test_prompts_share_what_was_learnt_unless_each_is_fresh() -> None:
    runs = (hand_made(), hand_made())
    (shared,), (fresh,) = tasks(runs, "throughput"), tasks(runs, "throughput", settings=Settings(fresh=True))
    first, second = replay_group(fresh).runs
    assert first == second == replay_group(shared).runs[0]


def test_the_figures_of_a_result() -> None:
    (task,) = tasks((), "linear")
    runs = (Replayed(10, 5, 20, 5, 5.0, 12, 3), Replayed(10, 10, 0, 0, 30.0, 0, 0))
    result = Result(task, runs)
    assert result.speedups == pytest.approx([3.0, 0.5])
    assert result.speedup == pytest.approx(1.75)
    assert (result.tokens_per_round, result.nodes_per_round) == pytest.approx((20 / 15, 20 / 15))
    assert (result.acceptance, result.stood_in) == (0.25, 0.25)
    assert Result(task, runs[1:]).acceptance is None


def test_many_clients_go_through_the_services_scheduler() -> None:
    run = hand_made()
    one, eight = (simulate([run], PLAIN, TOY, clients, completions=2) for clients in (1, 8))
    assert (one.tokens, eight.tokens) == (2 * len(run.completion), 16 * len(run.completion))
    assert one.rounds == one.passes
    assert eight.rounds / eight.passes > 2
    assert eight.rate > 2 * one.rate
