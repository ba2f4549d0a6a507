"""The worth of the tuned constants."""

from dataclasses import replace

import pytest

from dynatree.draft.control.constants import ControlSettings
from dynatree.replay import constants
from dynatree.replay.runs import Settings, replay_all, replay_group
from tests.support.recorded import hand_made, tasks


def test_each_constant_is_varied_alone() -> None:
    default = ControlSettings()
    found = {(each.name, each.kind): each for each in constants.variants()}
    assert {
        key: found[key].value
        for key in [
            ("cost_window", "half"),
            ("cost_window", "double"),
            ("cost_trials", "neutral"),
            ("rate_fade", "half"),
            ("rate_fade", "double"),
            ("rate_fade", "neutral"),
            ("prior_children", "double"),
            ("prior_others_rate", "double"),
        ]
    } == {
        ("cost_window", "half"): 8,
        ("cost_window", "double"): 32,
        ("cost_trials", "neutral"): 1,
        ("rate_fade", "half"): pytest.approx(0.95),
        ("rate_fade", "double"): pytest.approx(0.8),
        ("rate_fade", "neutral"): 1.0,
        ("prior_children", "double"): 0.85,
        ("prior_others_rate", "double"): 0.2,
    }
    assert ("cost_trials", "half") not in found  # "half" is the neutral value
    assert found["foresight", "half"].value == (1, 4, 15)
    assert found["foresight", "double"].value == (1, 2, 3, 4, 6, 8, 11, 15)
    for variant in found.values():
        assert replace(variant.control, **{variant.name: getattr(default, variant.name)}) == default
        assert getattr(variant.control, variant.name) == variant.value


def test_what_a_constant_is_worth() -> None:
    names = ("cost_window", "cost_trials")
    chosen = [each for each in constants.variants() if each.name in names]
    changes = [constants.Change(each, (-0.1, 0.0), 0.0) for each in chosen]
    changes[0] = constants.Change(chosen[0], (0.1, 0.2), 0.0)
    assert [each.variant.kind for each in changes] == ["half", "double", "neutral", "double"]
    assert constants.worth(changes[:2]) == pytest.approx(0.05)
    table = constants.table(changes)
    assert [list(row) for row in table.rows] == [
        ["cost_window", "16", "+5.0 %", "+15.0 (+10.0 to +20.0)", "-5.0 (-10.0 to +0.0)", "-"],
        ["cost_trials", "2", "+5.0 %", "-", "-5.0 (-10.0 to +0.0)", "-5.0 (-10.0 to +0.0)"],
    ]


def test_changes_are_against_the_default_on_the_same_runs() -> None:
    every = tasks((hand_made(),), "throughput")
    found = list(constants.changes(every, lambda tasks: replay_all(tasks, 1)))
    assert [change.variant for change in found] == constants.variants()
    (before,) = replay_all(every, 1)
    for change in found:
        settings = Settings(control=change.variant.control)
        after = replay_group(replace(every[0], settings=settings))
        assert change.cells == pytest.approx((after.speedup / before.speedup - 1,))
