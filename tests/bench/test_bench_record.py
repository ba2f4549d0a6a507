"""Tests that saved files of `dynatree bench` load again, in both versions, and that other files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynatree.bench import arguments
from dynatree.bench.record import Report, load, save
from dynatree.cli.main import main
from tests.support.bench_records import baseline, costs_report, load_report, new_report, new_run
from tests.support.paths import BENCHMARKS

KEPT = BENCHMARKS / "results"


@pytest.mark.parametrize(
    "report",
    [
        new_report("sweep", [new_run("linear"), new_run("fixed", agrees=None, equal=None, peak_memory=None)]),
        new_report("compare", [baseline("transformers", 1.0)], complete=False),
        new_report("compare", [], more=1),
        costs_report(),
        load_report(),
    ],
)
def test_what_is_saved_loads_again(tmp_path: Path, report: Report) -> None:
    save(report, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == report
    save(report, tmp_path / "a.json.gz")
    assert load(tmp_path / "a.json.gz") == report
    assert (tmp_path / "a.json.gz").stat().st_size < (tmp_path / "a.json").stat().st_size


def test_each_run_is_a_line(tmp_path: Path) -> None:
    save(new_report("compare", [new_run("linear"), new_run("fixed")]), tmp_path / "a.json")
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert [json.loads(line.strip().rstrip(","))["label"] for line in lines if '"label"' in line] == ["linear", "fixed"]


@pytest.mark.parametrize("path", sorted(KEPT.glob("*.json.gz")), ids=lambda path: path.name)
def test_the_measurements_of_this_repository_load(path: Path) -> None:
    assert load(path)["complete"]


def wrong_point(**changes: Any) -> str:
    report: Any = costs_report()
    report["costs"]["points"][0].update(changes)
    return json.dumps(report)


def wrong_file(**changes: Any) -> str:
    return json.dumps(new_report("compare", [new_run("x")]) | changes)


def wrong_statistics(**changes: Any) -> str:
    run = new_run("x")
    return wrong_run(statistics=run["statistics"] | changes)


def wrong_run(**changes: Any) -> str:
    return json.dumps(new_report("compare", [new_run("x", **changes)]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ("{}", "schema_version: Field required"),
        ('{"schema_version": 1}', "schema_version: Input should be 2"),
        (wrong_file(command="no"), "command: Input should be 'compare'"),
        (wrong_file(runs={}), "runs: Input should be a valid"),
        (wrong_file(machine=None), "machine: "),
        (wrong_file(git="dirty"), "git: "),
        (wrong_file(versions=[]), "versions: "),
        (wrong_file(options={"repetitions": 1}), "options"),
        (wrong_run(wall_seconds=0), "runs.0.wall_seconds: Input should be greater than 0"),
        (wrong_run(wall_seconds=float("nan")), "runs.0.wall_seconds: Input should be a finite number"),
        (wrong_run(equal="yes"), "runs.0.equal: "),
        (wrong_run(statistics=1), "runs.0.statistics: "),
        (wrong_run(policy=3), "runs.0.policy: "),
        (wrong_run(settings={"depth": None}), "runs.0.settings.depth"),
        (wrong_run(agrees=-1), "runs.0.agrees: Input should be greater than or equal to 0"),
        (wrong_run(arrivals=[[1]]), "runs.0.arrivals.0.1: Field required"),
        (wrong_statistics(round_parts={"grow": {}}), "round_parts.grow.total_seconds: Field required"),
        (wrong_statistics(acceptance_by_depth=None), "acceptance_by_depth: "),
        (json.dumps(new_report("ranks", [new_run("x")])), "the runs have no ranks"),
        (json.dumps(new_report("load", [new_run("x")])), "failures or a run's load is missing"),
        (json.dumps(new_report("costs", [])), "costs is missing"),
        (wrong_point(curve="speed"), "costs.points.0.curve: "),
        (wrong_point(seconds=[]), "costs.points.0.seconds: "),
    ],
)
def test_files_that_are_no_measurement(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert main(["bench", "show", str(tmp_path / "a.json")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_formats_of_quantised_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = new_report("compare", [new_run("linear")])
    report["models"]["target"]["numerics"] = "Q4_K and Q6_K weights, x86 kernels"
    report["models"]["draft"]["numerics"] = "x86 kernels"
    save(report, tmp_path / "a.json")
    assert main(["bench", "show", str(tmp_path / "a.json")]) == 0
    told = "target large (float32, Q4_K and Q6_K weights, cpu), draft small (float32, cpu); prompts"
    assert told in capsys.readouterr().out


def test_a_saved_measurement_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = new_run("fixed:depth=[2]", equal=False, temperature=0.7, scheme="gumbel", seed=1)
    skipped = [{"label": "ngram", "scheme": "residual", "reason": "no"}]
    save(new_report("compare", [wrong], complete=False, skipped=skipped), tmp_path / "a.json")
    assert main(["bench", "show", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "target large (float32, cpu), draft small (float32, cpu); prompts: 2 from a.txt" in out
    assert "scheme residual does not allow them: ngram" in out
    assert "NOT EQUAL to plain decoding: fixed:depth=[2], temperature 0.7, gumbel, seed 1, prompt 0" in out
    assert "interrupted" in out


def test_the_extra_is_named_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "_EXTRA", ("pandas", "no_such_package"))
    assert main(["bench", "compare", "--prompts", "nowhere.txt"]) == 1
    assert "dynatree bench needs no_such_package: install dynatree with its extra [bench]" in capsys.readouterr().err
