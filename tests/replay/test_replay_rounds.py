"""Replayed rounds worked out by hand, and the oracles."""

import math
from dataclasses import replace

import pytest

from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy
from dynatree.draft.policies.growing_tree import Proposal
from dynatree.replay import objectives, recording
from dynatree.replay.machines import load_machines, seconds_on
from dynatree.replay.session import Replayed, replay, sampling_of
from dynatree.replay.table_model import FIRST_TAIL_TOKEN, TableModel
from tests.support.recorded import DATA, TOY, hand_made, proposed


def test_a_chain_worked_out_by_hand() -> None:
    done = replay(hand_made(), create_policy("linear", {"depth": 2}), TOY)
    # the prefill, then the trees 2-7, of which 2 is right and 3 follows, and 4-5
    forwards, trees = 4 * (0.1 + 0.01), 2 * (1.4 + 0.5)
    promised = 2 * (1 / 2 + 1 / 4)
    seconds = pytest.approx(forwards + trees)
    assert done == Replayed(5, 2, 4, 3, seconds, expanded=5, stood_in=0, promised=pytest.approx(promised))


def test_oracles_know_what_comes() -> None:
    """The path oracle sends 2, 3, 4, 5 at once. By rank, 3 is fifth: so 2 goes alone, then 4 and 5, which is third."""
    level, round_ = 0.1 + TOY.level_seconds, TOY.round_seconds
    assert objectives.path_oracle(hand_made(), TOY) == pytest.approx(4 * level + seconds_on(TOY.verify, 5) + round_)
    trees = (level + seconds_on(TOY.verify, 2) + round_, 2 * level + seconds_on(TOY.verify, 4) + round_)
    assert objectives.size_oracle(hand_made(), TOY) == pytest.approx(sum(trees))


@pytest.mark.parametrize("machine", ["2.8b-avx512", "gpu-flat-expected"])
def test_no_objective_without_ngrams_is_faster_than_the_path_oracle(machine: str) -> None:
    (costs,) = (each for each in load_machines(DATA / "costs.json") if each.name == machine)
    run = recording.load(DATA / "books.npz").runs[0]
    short = replace(run, completion=run.completion[:40], nodes=list(run.nodes))
    (judged,) = objectives.study([("a book", short)], [costs])
    for each in judged:
        assert each.tokens == 39
        assert each.path_oracle <= each.size_oracle
        assert "n-grams" in each.rule or each.path_oracle <= each.seconds
    assert len(objectives.table(judged).rows) == len(judged) + 2


def test_plain_decoding_takes_a_round_a_token() -> None:
    done = replay(hand_made(), create_policy("autoregressive", {}), TOY)
    assert (done.tokens, done.rounds, done.nodes) == (5, 5, 0)
    assert done.seconds == pytest.approx(5 * TOY.plain_seconds) == pytest.approx(5 * 1.5)


def test_noise_changes_what_is_measured() -> None:
    done = replay(hand_made(), create_policy("autoregressive", {}), TOY, noise=lambda: 2.0)
    assert done.seconds == pytest.approx(2 * 5 * 1.5)


def test_a_wider_tree_finds_the_second_guess() -> None:
    done = replay(hand_made(), create_policy("fixed", {"depth": 4, "breadth": 2, "tau": 0}), TOY)
    assert (done.rounds, done.accepted) == (1, 4)


def test_what_was_not_recorded_is_stood_in_for_and_counted() -> None:
    run = hand_made()
    done = replay(run, create_policy("linear", {"depth": 4}), TOY)
    # prompt; 1, and below it 2, the recorded 2 7, and 2 7 6, which was not recorded; 3 and 4
    assert (done.expanded, done.stood_in) == (7, 1)
    run.add(6, 6, proposed(3, 4))
    assert replay(run, create_policy("linear", {"depth": 4}), TOY).stood_in == 0


def test_the_nearest_in_probability_stands_in() -> None:
    run = hand_made()
    run.add(1, 8, proposed(11))
    run.add(3, 8, proposed(12))
    run.nodes[1] = replace(run.nodes[1], proposals=(Proposal(2, math.log(0.05)), Proposal(8, math.log(0.9))))
    model = TableModel(run, TOY)
    drafter = Drafter(model, 16)
    session = drafter.open(run.prompt_ids, sampling_of(run), 0)
    drafter.commit(session, [1, 2, 3, 4, 5])
    policy = create_policy("fixed", {"depth": 2, "breadth": 2, "tau": 0})
    tree = drafter.grow(session, policy, 4, 16).tree
    assert model.stood_in == 2
    # 6 is as likely as 7 was (1/2), so it continues like 7; 8 is as likely as 8 was after 3 (1/4)
    assert tree.token_ids == (6, 8, 6, 4, 12, FIRST_TAIL_TOKEN)


def test_more_proposals_than_were_recorded_are_none_likelier() -> None:
    run = hand_made()
    drafter = Drafter(TableModel(run, TOY), 64)
    session = drafter.open(run.prompt_ids, sampling_of(run), 0)
    tree = drafter.grow(session, create_policy("fixed", {"depth": 1, "breadth": 5, "tau": 0}), 4, 64).tree
    assert tree.token_ids == (1, 8, FIRST_TAIL_TOKEN, FIRST_TAIL_TOKEN + 1, FIRST_TAIL_TOKEN + 2)
    assert [math.exp(log_prob) for log_prob in tree.log_probs] == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32])


def test_what_was_not_recorded_can_be_asked_for() -> None:
    run = hand_made()
    asked = []

    def ask(position: int, path: object) -> tuple[Proposal, ...]:
        asked.append((position, path))
        return proposed(3, 4)

    done = replay(run, create_policy("linear", {"depth": 4}), TOY, ask=ask)
    assert asked == [(1, [2, 7, 6])]
    assert done.stood_in == 0
    assert run.nodes[-1].proposals == proposed(3, 4)
    assert run.child(6, 6) == 7
