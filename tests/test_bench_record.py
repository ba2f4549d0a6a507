"""The files of `dynatree bench`: what is saved loads again, in both versions, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_records import baseline, costs_report, load_report, new_report, new_run, old_report, old_run

from dynatree.bench.record import Report, load, save
from dynatree.cli.main import main

KEPT = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    "report",
    [
        old_report("compare", [old_run("linear")]),
        new_report("sweep", [new_run("linear"), new_run("fixed", agrees=None, equal=None, peak_memory=None)]),
        new_report("compare", [baseline("transformers", 1.0)], complete=False),
        new_report("compare", []),
        costs_report(),
        load_report(),
    ],
)
def test_what_is_saved_loads_again(tmp_path: Path, report: Report) -> None:
    save(report, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == report


def test_each_run_is_a_line(tmp_path: Path) -> None:
    save(new_report("compare", [new_run("linear"), new_run("fixed")]), tmp_path / "a.json")
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert [json.loads(line.strip().rstrip(","))["label"] for line in lines if '"label"' in line] == ["linear", "fixed"]


# what is in replay/ is read by `bench replay`, and by its tests
MEASURED = sorted(path for path in KEPT.rglob("*.json") if path.parent != KEPT / "replay")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
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
        ("", "is not JSON"),
        ("[1]", "the file is not an object"),
        ("{}", "the file has no schema_version"),
        ('{"schema_version": 3, "command": "compare"}', "schema_version 3, command 'compare' are not known"),
        ('{"schema_version": 1, "command": "no"}', "schema_version 1, command 'no' are not known"),
        ('{"schema_version": NaN}', "NaN is not a JSON number"),
        (wrong_run(wall_seconds=0), "wall_seconds has the wrong type or value"),
        (wrong_run(equal="yes"), "equal has the wrong type or value"),
        (wrong_run(statistics=1), "statistics is not an object"),
        (wrong_run(policy=3), "policy has the wrong type or value"),
        (wrong_run(settings={"depth": "3"}), "settings has the wrong type or value"),
        (wrong_run(agrees=-1), "agrees has the wrong type or value"),
        (wrong_run(arrivals=[[1]]), "arrivals[0] has the wrong type or value"),
        (wrong_run(peak_memory={"draft": 1}), "peak_memory has no verify"),
        (json.dumps(new_report("ranks", [new_run("x")])), "runs[0] has no ranks"),
        (json.dumps(dict(new_report("compare", [])) | {"runs": {}}), "runs is not a list"),
        (json.dumps(new_report("compare", [], options={"repetitions": 1})), "options has no max_new_tokens"),
        (json.dumps(new_report("costs", [])), "the file has no costs"),
        (wrong_point(curve="speed"), "curve has the wrong type or value"),
        (wrong_point(seconds=[]), "seconds is empty"),
        (wrong_file(machine=None), "machine is not an object"),
        (wrong_file(machine={"read_bandwidth": "fast"}), "read_bandwidth has the wrong type or value"),
        (wrong_file(git="dirty"), "git is not an object"),
        (wrong_file(versions=[]), "versions is not an object"),
        (wrong_statistics(round_parts={"grow": {}}), "round_parts has the wrong type or value"),
        (wrong_statistics(acceptance_by_depth=None), "acceptance_by_depth is not a list"),
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
