"""Cost curves of machines: read, written, interpolated, and made of measurements."""

from pathlib import Path

import pytest

from dynatree.bench.record import save
from dynatree.replay import measured_machines
from dynatree.replay.machines import load_machines, seconds_on, to_json
from tests.support.bench_records import DRAFTED, STATISTICS, costs_report, detailed, new_report, new_run
from tests.support.recorded import DATA, TOY

TOY_FIGURES = {"verify", "draft", "round_seconds", "level_seconds"}


def test_seconds_are_on_lines_between_the_points_and_on_by_the_mean_slope() -> None:
    curve = ((2, 1.0), (4, 2.0), (8, 2.5))
    assert [seconds_on(curve, rows) for rows in (1, 2, 3, 6, 8, 12)] == pytest.approx([1.0, 1.0, 1.5, 2.25, 2.5, 3.5])
    assert seconds_on(((3, 1.0),), 100) == 1.0


def test_machines_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(to_json([TOY]))
    assert load_machines(file) == [TOY]
    for spoilt, message in [
        (file.read_text().replace('"version": 1', '"version": 2'), "has version 2"),
        (file.read_text().replace("[[1, 1.0], [4, 1.6]]", "[[4, 1.0], [1, 1.6]]"), "curve"),
        (file.read_text().replace("round_seconds", "rounds"), "is not a file of machines"),
        ("[", "is not a file of machines"),
    ]:
        file.write_text(spoilt)
        with pytest.raises(SystemExit, match=message):
            load_machines(file)


def test_a_machine_is_made_of_measurements(tmp_path: Path) -> None:
    """A plain round takes 190 ms, 20 of them in forward passes; a round of 10 nodes takes 475 ms, 50 of them there."""
    file, costs, compare = (tmp_path / name for name in ("machines.json", "costs-x.json", "compare.json"))
    file.write_text(to_json([TOY]))
    save(costs_report(), costs)
    runs = [new_run("autoregressive", statistics=detailed(STATISTICS, 0.1, []))]
    save(new_report("compare", [*runs, new_run("linear", statistics=detailed(DRAFTED, 0.1, []))]), compare)
    command = [str(file), "--name", "mine", "--costs", str(costs), "--compare", str(compare)]
    measured_machines.main(command)
    measured_machines.main(command)
    mine, toy = load_machines(file)
    assert (toy, mine.name, mine.measured) == (TOY, "mine", True)
    assert mine.verify == ((1, 0.009), (16, 0.0105), (256, 0.0345))
    assert mine.draft == ((1, 0.0091), (8, 0.0098))
    assert (mine.round_seconds, mine.level_seconds) == (0.17, 0.0255)
    assert "a processor, large, float32, commit 0123456" in mine.sources["verify"]


def test_the_shipped_machines() -> None:
    machines = load_machines(DATA / "costs.json")
    assert {machine.name for machine in machines if not machine.measured} == {"2.8b-h100-expected", "gpu-flat-expected"}
    assert all(machine.sources.keys() == TOY_FIGURES for machine in machines)
