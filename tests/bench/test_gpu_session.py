"""Tests the session that measures the GPU path: what it saves, when it stops, what it prints, and a small whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynatree.draft import serve_draft
from dynatree.draft.policies import policy_names
from dynatree.verify import settings
from tests.support.benchmark_modules import GPU, module
from tests.support.paths import ROOT

keeping, session = module("keeping", GPU), module("session", GPU)
# What a call to a lent machine is held to.
COMMAND_SECONDS = 600
MOST_CHARACTERS = 2000
MOST_FILES = 8
MOST_BYTES = 16 << 20


# What is kept


@pytest.mark.parametrize("harm", ["{", "", "[]", "null", "{}"])
def test_a_file_that_was_harmed_counts_for_nothing(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = keeping.Store(tmp_path)
    store.write("1-a", keeping.to_record(keeping.Measured({"x": 1})))
    store.write("1-b", keeping.to_record(keeping.Measured({"x": 2})))
    (tmp_path / keeping.BUNDLE).write_text(harm)
    again = keeping.Store(tmp_path)
    assert [again.settled(name, since=0.0) for name in ("1-a", "1-b")] == [False, False]
    assert harm == "{}" or "session.json cannot be read" in capsys.readouterr().out
    again.write("1-a", keeping.to_record(keeping.Measured({"x": 3})))
    assert keeping.Store(tmp_path).figures("1-a") == {"x": 3}


def test_what_was_measured_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    store = keeping.Store(tmp_path, _clock=lambda: 100.0)
    store.write("1-a", keeping.to_record(keeping.Measured({"x": 1})))
    store.write("1-b", {"status": keeping.NOT_MEASURED, "reason": "no GPU"})
    store.write("1-c", {"status": keeping.FAILED, "reason": "out of memory"})
    again = keeping.Store(tmp_path)
    assert [again.settled(name, since=101.0) for name in ("1-a", "1-b", "1-c", "1-d")] == [True, True, False, False]
    assert again.settled("1-c", since=99.0), "within one call it is not tried again"
    assert again.figures("1-a") == {"x": 1}
    for name in ("1-b", "1-d"):
        with pytest.raises(keeping.NotMeasuredError, match=name):
            again.figures(name)


def test_another_machine_goes_on_from_the_bundle(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    store = keeping.Store(here)
    for name in ("1-a", "2-b"):
        store.write(name, keeping.to_record(keeping.Measured({"of": name})))
    assert [path.name for path in here.iterdir()] == [keeping.BUNDLE]
    moved = keeping.Store(there)
    moved.go_on_from(here / keeping.BUNDLE)
    assert moved.figures("1-a") == {"of": "1-a"}
    store.write("2-d", keeping.to_record(keeping.Measured({})))
    moved.go_on_from(here / keeping.BUNDLE)
    assert moved.read("2-d") is None, "what is there stays"
    with pytest.raises(SystemExit, match="is not there"):
        moved.go_on_from(tmp_path / keeping.BUNDLE)
    moved.write("2-c", keeping.to_record(keeping.Measured({})))
    assert list(json.loads((there / keeping.BUNDLE).read_text())) == ["1-a", "2-b", "2-c"]
    assert not list(tmp_path.glob("*/*.part"))


def test_tiny_figures_are_never_taken_for_others(tmp_path: Path) -> None:
    keeping.Store(tmp_path, tiny=True).write("1-a", keeping.to_record(keeping.Measured({})))
    assert keeping.Store(tmp_path, tiny=True).settled("1-a", 0.0)
    assert not keeping.Store(tmp_path).settled("1-a", 0.0)


# Time


def test_a_step_begins_only_if_the_time_holds_it() -> None:
    step = keeping.Step("1-a", "bits:noise", 60, models=True)
    assert session.begins(step, loaded=True, left=100.0)
    assert session.begins(step, loaded=True, left=60.0)
    assert not session.begins(step, loaded=False, left=100.0), "what must be loaded counts"
    assert not session.begins(step, loaded=True, left=59.0)


def test_a_part_ends_in_time() -> None:
    assert set(session.PARTS) == {1, 2, 3}
    assert len(session.PARTS) * session.PART_SECONDS <= 25 * 60
    assert session.PART_SECONDS + session.OVERTIME + 45 < COMMAND_SECONDS, "another process may have to begin"
    for steps in session.PARTS.values():
        assert all(session.expected(step, loaded=False) < session.PART_SECONDS for step in steps)
    assert sum(step.seconds for step in session.PARTS[1][:2]) <= 180, "the first answers come in three minutes"
    first = sum(step.seconds for step in session.PARTS[1][:5]) + session.LOADING
    assert first < session.PART_SECONDS, "and the headline figures in the first call"
    assert [step.name for step in session.PARTS[1][3:5]] == ["1-plain", "1-default"]


# Steps


def test_steps_are_there_and_what_they_need_comes_before() -> None:
    names = [step.name for steps in session.PARTS.values() for step in steps]
    assert len(set(names)) == len(names)
    for part, steps in session.PARTS.items():
        for place, step in enumerate(steps):
            assert step.name.startswith(f"{part}-")
            assert set(step.needs) <= {each.name for each in steps[:place]}
            home, _, function = step.work.partition(":")
            assert callable(getattr(module(home, GPU), function)), step.name


def test_every_policy_is_compared_with_plain_decoding() -> None:
    assert sorted((*session.POLICIES, "autoregressive")) == list(policy_names())
    for policy in session.POLICIES:
        for mode in ("greedy", "sampled"):
            [step] = [each for each in session.PARTS[3] if each.name == f"3-{policy}-{mode}"]
            assert session.Context(step, "cpu", "", None, None, None).policy == policy


def test_both_models_are_measured_as_the_services_measure_them() -> None:
    pair = module("pair", GPU)
    assert pair.TARGET_MEASURED_ROWS == settings.AUTO_ROWS
    assert pair.DRAFT_MEASURED_ROWS == serve_draft.MEASURED_ROWS


def test_prompts_begin_with_the_book_that_was_held_out() -> None:
    prompts = module("pair", GPU).prompts(20)
    assert len(set(prompts)) == 20
    assert {len(prompt) for _, prompt in prompts} == {128}
    assert [source for source, _ in prompts[:2]] == ["treasure_island"] * 2


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a function as a step, and returns whether it succeeded and its record."""
    store = keeping.Store(tmp_path)

    def run(function: Any) -> tuple[bool, Any]:
        monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace(function=function))
        step = keeping.Step("1-made-up", "made_up:function", 1)
        context = session.Context(step, "cpu", "a CPU", None, None, store)
        return session.run(context, {"device": "a CPU"}, 60.0), store.read("1-made-up")

    return run


def test_a_step_that_was_measured_keeps_its_figures_and_bounds(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = [keeping.Bound("waits", 3, most=2), keeping.Bound("speed", 1200.5, "tokens/s", least=1000)]
    fine, record = run(lambda context: keeping.Measured({"x": 1.5}, ["it says so"], bounds))
    assert fine
    assert record["status"] == "measured"
    assert record["figures"] == {"x": 1.5}
    assert record["around"] == {"device": "a CPU"}
    assert [each["met"] for each in record["bounds"]] == [False, True]
    printed = capsys.readouterr().out
    assert "it says so" in printed
    assert "waits: 3, expected at most 2: MISSED" in printed
    assert "speed: 1200.5 tokens/s, expected at least 1000: met" in printed


def test_a_step_that_failed_says_why(run: Any) -> None:
    def failing(context: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nmore of it")

    fine, record = run(failing)
    assert not fine
    assert record["status"] == "failed"
    assert record["reason"] == "CUDA error: an illegal memory access"
    assert "in failing" in record["traceback"]


def test_a_baseline_that_ends_the_program_fails_its_step_only(run: Any) -> None:
    def ending(context: Any) -> None:
        raise SystemExit("model x could not be loaded for a baseline")

    fine, record = run(ending)
    assert not fine
    assert record["reason"] == "model x could not be loaded for a baseline"


def test_a_step_that_cannot_be_measured_invents_nothing(run: Any) -> None:
    def without_a_gpu(context: Any) -> None:
        raise keeping.NotMeasuredError(keeping.NO_GPU)

    fine, record = run(without_a_gpu)
    assert fine
    assert (record["status"], record["reason"]) == ("not measured", "no GPU")
    assert "figures" not in record


# What is said


@pytest.mark.parametrize(
    ("device", "what", "measured", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "plain", 380.14, "at least 400: MISSED"),
        ("NVIDIA H100 80GB HBM3", "default", 1000, "at least 1000: met"),
        ("NVIDIA H200", "plain", 540.0, "at least 540: met"),
        ("NVIDIA H200", "default", 1599.9, "at least 1600: MISSED"),
    ],
)
def test_speeds_stand_beside_their_bounds(device: str, what: str, measured: float, said: str) -> None:
    [bound] = keeping.speed_bounds(device, what, measured)
    assert str(bound).endswith(said)
    assert f"{keeping.shown(measured)} tokens/s" in str(bound)


def test_other_cards_have_no_bounds_of_speed() -> None:
    assert keeping.speed_bounds("NVIDIA L4", "plain", 1.0) == []


def test_a_number_that_is_none_misses_its_bound() -> None:
    assert not keeping.Bound("a ratio", float("nan"), most=1.0).met


def test_the_end_of_a_part_tells_what_is_missing() -> None:
    bounds = [keeping.Bound("tokens", 0, most=0), keeping.Bound("waits", 3, most=2)]
    records = {
        "1-a": keeping.to_record(keeping.Measured({}, bounds=bounds)),
        "1-b": {"status": "not measured", "reason": "no GPU"},
        "1-c": {"status": "failed", "reason": "out of memory"},
        "1-d": None,
    }
    status, lines = keeping.ending(records)
    assert status == 1
    assert lines == [
        "1-b: not measured: no GPU",
        "1-c: failed: out of memory",
        "1 of 2 bounds met",
        "waits: 3, expected at most 2: MISSED",
        "left for another call: 1-d",
    ]
    del records["1-c"]
    assert keeping.ending(records)[0] == 3, "one is left"
    del records["1-d"]
    assert keeping.ending(records)[0] == 0


def test_what_is_not_installed_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "find_spec", lambda name: None if name in ("grpc_health", "triton") else object())
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    monkeypatch.setattr(session, "version_of", {"grpcio": "1.75.9", "protobuf": "6.31.1"}.get)
    monkeypatch.delenv("DYNATREE_COMMIT", raising=False)
    assert session.missing() == [
        "too old: grpcio 1.75.9, expected at least 1.76; no services run",
        "missing: triton; no kernel of the project runs, and no graph is captured",
        "missing: grpc_health; no services run over sockets",
        "missing: compute-sanitizer; accesses to memory are not checked",
        "missing: the commit; expected it in DYNATREE_COMMIT",
    ]


def test_a_trace_counts_what_lies_within_the_mark() -> None:
    def event(name: str, start: float, device: str = "CPU", microseconds: float = 0.0) -> Any:
        span = SimpleNamespace(start=start, end=start + microseconds, elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=f"DeviceType.{device}", time_range=span)

    speed = module("speed", GPU)
    events = [
        event(speed.MARK, 10.0, microseconds=90.0),
        event(speed.MARK, 10.0, "CUDA", 90.0),
        *(event("cudaGraphLaunch", at) for at in (5.0, 20.0, 60.0)),
        *(event("cudaStreamSynchronize", at) for at in (25.0, 65.0, 101.0)),
        event("Memcpy HtoD (Pinned -> Device)", 30.0, "CUDA", 2.0),
        *(event("own_paths", at, "CUDA", 3.0) for at in (40.0, 70.0, 120.0)),
        event("aten::add", 50.0),
    ]
    assert speed.of_events(events, rounds=2) == {
        "Memcpy HtoD": 0.5,
        "cudaGraphLaunch": 1.0,
        "cudaStreamSynchronize": 1.0,
        "kernels": 1.0,
        "kernels' milliseconds": 0.003,
        "own_paths": 0.003,
    }


# All of it


@pytest.mark.early
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_tiny_session_measures_all_parts(tmp_path: Path) -> None:
    """On a CPU, every step is kept, no bound is missed, and a second call has nothing left to do.

    Each call is on another machine, as after a loss: it has the bundle of the call before, and no models.
    """
    bundle: Path | None = None
    for part, steps in session.PARTS.items():
        results = tmp_path / str(part) / "results"
        printed = tiny_part(part, results, tmp_path / str(part) / "models", bundle)
        files = list(results.iterdir())
        assert len(files) <= MOST_FILES
        assert max(path.stat().st_size for path in files) < MOST_BYTES
        assert "torch " in printed.splitlines()[1], "versions come first"
        assert (results / f"{part}.log").read_text() == printed
        bundle = results / keeping.BUNDLE
        for step in steps:
            record = json.loads(bundle.read_text())[step.name]
            assert record["status"] in ("measured", "not measured"), printed
            assert record["tiny"]
            assert record["around"]["device"].startswith("a CPU")
            assert all(bound["met"] for bound in record.get("bounds", ())), printed
    assert bundle is not None
    records = json.loads(bundle.read_text())
    assert set(records) == {step.name for steps in session.PARTS.values() for step in steps}
    without_a_gpu = {"1-sanitizer", "2-compiled", "2-trace"}
    assert {name for name, record in records.items() if record.get("reason") == "no GPU"} == without_a_gpu
    assert records["3-services"]["status"] == "measured"
    assert [len(each) for each in records["3-plain-greedy"]["figures"]["token_ids"]] == [12, 12]
    before = bundle.stat().st_mtime_ns
    tiny_part(1, results, tmp_path / "models", bundle)
    assert bundle.stat().st_mtime_ns == before


def test_the_command_finds_all_packages_of_the_project() -> None:
    """The machine has no installation of the project."""
    text = (GPU / "session.sh").read_text()
    roots = {path.parent.relative_to(ROOT) for path in ROOT.glob("*/dynatree")}
    assert len(roots) >= 6
    for root in roots:
        assert f"$root/{root}" in text


def test_the_commands_of_the_page_fit_a_call_of_the_machine() -> None:
    text = (GPU / "README.md").read_text()
    commands = [line.strip() for line in text.splitlines() if "session.sh" in line and line.startswith("    ")]
    assert len(commands) >= 4
    assert all(len(command) < MOST_CHARACTERS for command in commands)


def tiny_part(part: int, results: Path, models: Path, bundle: Path | None) -> str:
    """Run the command; return its output."""
    environment = os.environ | {"PYTHON": sys.executable, "DYNATREE_TINY": "1", "DYNATREE_MODELS": str(models)}
    command = [str(GPU / "session.sh"), str(part), str(results), *(["--from", str(bundle)] if bundle else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BREAKING = """
import os, sys, time
sys.path.insert(0, {folder!r})
import session
from keeping import Measured, Step

def dies(context): os._exit(9)
def hangs(context): time.sleep(60)
def works(context): return Measured({{"x": 1}})

if __name__ == "__main__":
    sys.modules["breaking"] = sys.modules["__main__"]
    session.OVERTIME = 0.0
    steps = [Step(f"1-{{name}}", f"breaking:{{name}}", 0.5) for name in ("dies", "hangs", "works")]
    session.PARTS[1] = (*steps, Step("1-late", "breaking:works", 1000))
    sys.exit(session.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_step_that_takes_its_process_down_does_not_take_the_others(tmp_path: Path) -> None:
    script = tmp_path / "breaking.py"
    script.write_text(BREAKING.format(folder=str(GPU)))
    command = [sys.executable, str(script), "1", str(tmp_path / "results"), "--tiny", "--seconds", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    records = json.loads((tmp_path / "results" / keeping.BUNDLE).read_text())
    assert {name: record["status"] for name, record in records.items()} == {
        "1-dies": "failed",
        "1-hangs": "failed",
        "1-works": "measured",
    }, done.stdout + done.stderr
    assert "in hangs" in done.stderr, "where it hung"
    assert "left for another call: 1-late" in done.stdout
    assert done.returncode == 1
