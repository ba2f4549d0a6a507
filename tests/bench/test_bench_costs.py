"""Tests `dynatree bench costs`: its curves, the absence of side effects, and the memory bandwidth."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynatree import embedded
from dynatree.bench.bandwidth import read_bandwidth
from dynatree.bench.costs import (
    CONTEXT,
    KV_SESSIONS,
    SESSIONS,
    CostBench,
    Place,
    fill,
    places,
    random_tree,
)
from dynatree.bench.printing import print_report
from dynatree.bench.record import Costs, load
from dynatree.cli.main import main
from dynatree.engine.engine import Engine
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.verify.verifier import Part, Verifier
from tests.support.bench_records import new_report


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """The embedded pair, loaded as the command loads it."""
    target = load_engine(ModelSettings(str(embedded.target_path()), sessions=KV_SESSIONS))
    return target, load_engine(ModelSettings(str(embedded.draft_path()), sessions=1))


def test_the_curves() -> None:
    every = places(256, 2048)
    assert [place.nodes for place in every if place.curve == "nodes"][-3:] == [192, 255, 256]
    assert [place.sessions for place in every if place.curve == "sessions"] == list(range(1, SESSIONS + 1))
    few = places(20, 300)
    assert max(place.nodes for place in few) == 16
    assert {(place.nodes, place.context) for place in few if place.curve == "context"} == {
        (nodes, context) for nodes in (0, 15) for context in (128, 256)
    }


def test_measuring_leaves_sessions_and_committed_slots_as_they_were(engines: tuple[Engine, Engine]) -> None:
    target, draft = engines
    bench = CostBench(target, draft, 64)
    sessions = [session for group in bench._sessions.values() for session in group]
    assert len({session.kv.start for session in sessions}) == KV_SESSIONS

    def state() -> list[object]:
        return [(session.kv.start, session.round, session.finished, tuple(session.committed)) for session in sessions]

    def slots() -> list[torch.Tensor]:
        return [target.kv_cache.slots(session.kv, session.length).clone() for session in sessions]

    before, slots_before = state(), slots()
    for place in (Place("nodes", 64), Place("context", 15, 1024), Place("sessions", 15, sessions=8), Place("draft", 8)):
        seconds, forward_seconds = bench.measure(place)
        assert seconds >= forward_seconds > 0
    assert state() == before
    for now, then in zip(slots(), slots_before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=1e-5)


def test_what_an_interrupted_measurement_keeps_can_be_shown(
    engines: tuple[Engine, Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    kept: Costs = {
        "plain_seconds": [],
        "points": [],
        "floor": {"weight_bytes": 1, "read_bandwidth": 1.0, "seconds": 1.0},
    }
    report = new_report("costs", [], complete=False)
    report["costs"] = kept
    print_report(report)
    assert "interrupted" in capsys.readouterr().out
    points = fill(kept, CostBench(*engines, 64), places(64, 512), repetitions=2)
    for _ in range(3):
        next(points)
    assert [(point["nodes"], len(point["seconds"])) for point in kept["points"]] == [(0, 1), (1, 1), (2, 1)]
    print_report(report)
    assert "Verifying by nodes" in capsys.readouterr().out


def test_a_round_continues_its_context(engines: tuple[Engine, Engine]) -> None:
    """After copied slots, the target chooses the same token as after a prefill of the same tokens."""
    target, draft = engines
    sessions = CostBench(target, draft, 16)._sessions
    plain = AutoModelForCausalLM.from_pretrained(embedded.target_path())
    for context in (CONTEXT, 1024):
        session = replace(sessions[context][-1], committed=list(sessions[context][-1].committed))
        Verifier(target, 16).run([Part(session)])
        with torch.inference_mode():
            logits = plain(torch.tensor([session.committed[:-1]])).logits[0, -1]
        assert session.committed[-1] == logits.argmax()


def test_random_trees_are_bushy_and_repeat() -> None:
    tree = random_tree(100, 2048)
    assert (len(tree), random_tree(100, 2048)) == (100, tree)
    assert 4 < tree.depth < 30
    assert len(random_tree(0, 2048)) == 0


def test_a_step_reads_no_input_embedding(engines: tuple[Engine, Engine]) -> None:
    target, _ = engines
    assert target.info.step_bytes == 4 * (target.info.parameters - 2048 * 320)


@pytest.mark.long
def test_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--max-nodes", "16", "--repetitions", "2", "--threads", "1", "--out", str(out)]
    assert main(["bench", "costs", *options]) == 0
    printed = capsys.readouterr().out
    report = load(out)
    costs = report["costs"]
    assert [Place(p["curve"], p["nodes"], p["context"], p["sessions"]) for p in costs["points"]] == places(16, 2048)
    assert {len(point["seconds"]) for point in costs["points"]} == {2}
    assert costs["plain_seconds"] == costs["points"][0]["seconds"]
    floor = costs["floor"]
    assert floor["seconds"] == floor["weight_bytes"] / floor["read_bandwidth"]
    assert report["machine"]["read_bandwidth"] <= floor["read_bandwidth"]
    assert (report["machine"]["threads"], report["complete"], report["runs"]) == (1, True, [])
    assert report["models"]["target"]["architecture"] == "GPTNeoXForCausalLM"
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.long
def test_costs_of_rounded_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--max-nodes", "1", "--repetitions", "1", "--threads", "1", "--out", str(out)]
    assert main(["bench", "costs", *options, "--weights", "int8", "--draft-weights", "auto"]) == 0
    assert re.search(r"target embedded-target \(float32, (dequantised )?int8 weights, cpu\)", capsys.readouterr().out)
    models = load(out)["models"]
    assert "weights" not in models["draft"]["numerics"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target-model", "/no/such/model"], "there is no model at /no/such/model"),
        (["--device", "nowhere"], "device nowhere cannot be used"),
        (["--out", "/no/such/folder/out.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "costs", *more]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_the_memory_is_read_at_a_likely_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynatree.bench.bandwidth._BYTES", 2**26)
    assert 1e8 < read_bandwidth("cpu") < 1e13
