"""Tests how `dynatree bench` parses methods and cases, and how it counts ranks and agreement."""

from collections.abc import Sequence

import pytest

from dynatree.bench import runs
from dynatree.bench.methods import PLAIN, Case, Method, parse_method, parse_methods
from dynatree.bench.ranks import add_ranks, count_ranks, sequoia_rates
from dynatree.cli.main import main
from dynatree.client import RoundTrace

# methods


def test_methods_are_named_as_they_were_given() -> None:
    assert parse_method("fixed:depth=5,tau=0.5") == Method(
        "fixed:depth=5,tau=0.5", "fixed", (("depth", 5.0), ("tau", 0.5))
    )
    assert parse_method("linear") == Method("linear", "linear")
    text = "fixed:root=single,widths=1,2,prune=expand"
    assert parse_method(text) == Method(
        text, "fixed", (("root", "single"), ("widths", (1.0, 2.0)), ("prune", "expand"))
    )


def test_an_item_without_a_name_continues_the_list_before_it() -> None:
    text = "specinfer:widths=1,1,3,max_nodes=8"
    assert parse_method(text) == Method(text, "specinfer", (("widths", (1.0, 1.0, 3.0)), ("max_nodes", 8.0)))
    assert parse_methods(text) == [parse_method(text)]
    assert [method.label for method in parse_methods("specinfer:widths=1,1,3/2,2/4,max_nodes=4/8")] == [
        f"specinfer:widths={widths},max_nodes={nodes}" for widths in ("1,1,3", "2,2", "4") for nodes in (4, 8)
    ]


def test_alternatives_are_combined() -> None:
    assert [method.label for method in parse_methods("fixed:depth=3/4,breadth=1/2")] == [
        "fixed:depth=3,breadth=1",
        "fixed:depth=3,breadth=2",
        "fixed:depth=4,breadth=1",
        "fixed:depth=4,breadth=2",
    ]
    assert parse_methods("fixed:tau=0.5") == [Method("fixed:tau=0.5", "fixed", (("tau", 0.5),))]
    assert parse_methods("linear") == [Method("linear", "linear")]
    both = [method.settings for method in parse_methods("fixed:root=single/committed")]
    assert both == [(("root", "single"),), (("root", "committed"),)]


@pytest.mark.parametrize("measurement", ["compare", "sweep"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        ":a=1",
        "fixed:",
        "fixed:depth",
        "fixed:depth=8x",
        "fixed:root=a,b",
        "fixed:=1",
        "fixed:a=1,a=2",
        "fixed:1,a=2",
        "fixed:a=1,,2",
    ],
)
def test_methods_that_are_none(measurement: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", measurement, "--prompts", "x", "--policy", text]) == 2
    assert "argument --policy:" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["fixed:depth=1/", "fixed:depth=1/8x", "fixed:depth=1/2,depth=3", "fixed:widths=1,/2"])
def test_alternatives_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--prompts", "x", "--policy", text]) == 2
    assert "argument --policy:" in capsys.readouterr().err


def test_nothing_is_drawn_at_temperature_0() -> None:
    cases = runs.plan([PLAIN], [0.0, 1.0], ["gumbel", "residual"])
    assert cases == [Case(PLAIN, 0.0, None), Case(PLAIN, 1.0, "gumbel"), Case(PLAIN, 1.0, "residual")]
    assert [case.equals_plain_decoding for case in cases] == [True, True, False]


# ranks


def a_round(parents: Sequence[int], accepted: Sequence[int]) -> RoundTrace:
    return RoundTrace(
        round=0,
        base_length=1,
        token_ids=tuple(range(len(parents))),
        parents=tuple(parents),
        probabilities=(0.5,) * len(parents),
        texts=("",) * len(parents),
        accepted_nodes=tuple(accepted),
        committed_ids=(),
        committed_texts=(),
        parameters={},
        draft_seconds=0.0,
        verify_seconds=0.0,
    )


def test_ranks_are_places_among_siblings() -> None:
    rounds = [
        a_round([-1, -1, -1], [1]),  # the target chose the second guess
        a_round([-1, -1, -1], []),  # the target chose none of the guesses
        a_round([], []),  # nothing was drafted
        a_round([-1, -1, 0, 0, 1, 1], [1, 4]),  # the second guess at the root, then the first
        a_round([-1, -1, -1, -1], [3]),  # the fourth guess, although only three ranks are counted
    ]
    counts = count_ranks(rounds, 3)
    assert counts == {"trials": 5, "hits": [1, 2, 0]}
    both = add_ranks([counts, {"trials": 1, "hits": [0, 1, 0]}])
    assert both == {"trials": 6, "hits": [1, 3, 0]}
    assert sequoia_rates(both) == [0.1666, 0.5, 0.0]


# agreement


@pytest.mark.parametrize(
    ("tokens", "agrees"), [([1, 2, 3], 3), ([1, 2, 4], 2), ([2, 2, 3], 0), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_agreement_is_the_common_beginning(tokens: Sequence[int], agrees: int) -> None:
    assert runs.agreement(tokens, [1, 2, 3]) == agrees
