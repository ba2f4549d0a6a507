"""Tests `dynatree bench report`: its sections and their contents, from hand-made records."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dynatree.bench.record import Report, save
from dynatree.bench.report import Record, Section, cost_curve, read_records, sections, write_report
from dynatree.bench.table import Marked, Table
from dynatree.cli.main import main
from tests.support.bench_records import DRAFTED, baseline, costs_report, detailed, load_report, new_report, new_run

pytestmark = pytest.mark.early

TITLES = [
    "What was measured",
    "Speed",
    "Speed by length of the output",
    "Many clients",
    "Acceptance by depth",
    "Time of a round",
    "Cost of verifying and drafting",
    "Tables by file",
]


def records(*reports: Report) -> list[Record]:
    return [Record(f"{number}.json", report) for number, report in enumerate(reports)]


def section(title: str, *reports: Report) -> Section:
    [found] = [each for each in sections(records(*reports)) if each.title == title]
    return found


def drawn(found: Section) -> list[Figure]:
    return [block[1] for block in found.blocks if isinstance(block, tuple)]


def lines_of(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line of a plot by its name in the legend."""
    [axes] = figure.axes
    handles, names = axes.get_legend_handles_labels()
    points = [handle[0] if isinstance(handle, tuple) else handle for handle in handles]
    return {
        name: list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for name, line in zip(names, points, strict=True)
    }


def comparison(data_set: str = "tales", seconds: Sequence[float] = (1.0, 0.5)) -> Report:
    """Return a record of plain decoding, transformers and two policies, with 20 tokens and these seconds each."""
    report = new_report(
        "compare",
        [
            new_run("autoregressive"),
            baseline("transformers", 4.0),
            *(
                new_run(label, each, step=5, statistics=detailed(DRAFTED, 0.1, [0.9, 0.5]))
                for label, each in zip(("linear", "dynatree"), seconds, strict=True)
            ),
        ],
    )
    report["prompts"]["data_set"] = data_set
    return report


def long_comparison() -> Report:
    """Return a record of a method four times as fast as plain decoding (100 tokens/s) up to 100 tokens, then equal."""
    runs = [
        new_run("autoregressive", 3.0, tokens=300),
        baseline("transformers", 6.0, tokens=300),
        new_run("quick", 2.25, tokens=300, arrivals=[(1, 0.01), (100, 0.25), (200, 1.25), (300, 2.25)]),
    ]
    report = new_report("compare", runs)
    report["options"]["max_new_tokens"] = 300
    return report


def save_all(folder: Path) -> Path:
    """Save records for every section, and a JSON file that is not a record."""
    written = {"compare": comparison(), "long": long_comparison(), "costs": costs_report(), "load": load_report()}
    for name, report in written.items():
        save(report, folder / f"{name}.json")
    (folder / "other.json").write_text("[]")
    return folder


@dataclass(frozen=True)
class Written:
    """A report that the command has written, and its output."""

    folder: Path
    status: int
    said: str
    remarked: str


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write one report for all tests that only read it, since its plots take seconds."""
    folder = save_all(tmp_path_factory.mktemp("records"))
    out, said, remarked = folder / "deep" / "report", io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(remarked):
        status = main(["bench", "report", str(folder), "--out", str(out), "--title", "A title"])
    return Written(out, status, said.getvalue(), remarked.getvalue())


# the whole


def test_a_report_has_all_sections(written: Written) -> None:
    out = written.folder
    assert written.status == 0
    assert written.said.strip() == str(out / "report.html")
    assert re.fullmatch(r"left out: .*other\.json is not a file of dynatree bench: .*\n", written.remarked)
    page, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert "<h1>A title</h1>" in page
    assert re.findall("<h2>(.*)</h2>", page) == re.findall("^## (.*)$", markdown, re.MULTILINE) == TITLES
    shown = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert sorted(shown) == sorted(f"plots/{path.name}" for path in (out / "plots").iterdir())
    assert all("<svg" in (out / name).read_text() for name in shown)
    assert page.count("<img ") == len(shown) > 8
    assert page.count("<table>") == markdown.count("\n|:")


def test_the_page_needs_nothing_else(written: Written) -> None:
    page = (written.folder / "report.html").read_text()
    assert "<script" not in page
    assert not re.search('(src|href)="(?!plots/)', page)
    assert "default-src 'none'" in page


@pytest.mark.long
def test_the_same_records_make_the_same_report(written: Written, tmp_path: Path) -> None:
    write_report(save_all(tmp_path), tmp_path / "again", "A title")
    files = sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    assert len(files) > 8
    assert all((written.folder / each).read_bytes() == (tmp_path / "again" / each).read_bytes() for each in files)


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> & $x^$ |*_"
    report = comparison(data_set=evil)
    report["runs"][2]["label"] = evil
    report["models"]["target"]["name"] = evil
    report["machine"]["cpu"] = evil
    save(report, tmp_path / "<b>.json")
    write_report(tmp_path, tmp_path / "report", evil)
    page = (tmp_path / "report" / "report.html").read_text()
    pictures = [path.read_text() for path in (tmp_path / "report" / "plots").iterdir()]
    assert "<script" not in "".join((page, *pictures))
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x^$ |*_") > 5
    assert "&lt;b&gt;.json" in page
    assert "<script" not in (tmp_path / "report" / "report.md").read_text().replace("\\<script", "")


def test_a_report_stands_beside_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(comparison(), tmp_path / "compare.json")
    assert main(["bench", "report", str(tmp_path), "--title", "A title"]) == 0
    assert "<h1>A title</h1>" in (tmp_path / "report" / "report.html").read_text()
    assert main(["bench", "report", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().err.endswith("has no measurement of dynatree bench (*.json)\n")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"there is no folder {tmp_path}/none"):
        read_records(tmp_path / "none")


def test_a_folder_without_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"has no measurement of dynatree bench"):
        read_records(tmp_path)
    assert "left out: " in capsys.readouterr().err


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = save_all(tmp_path)
    with pytest.raises(SystemExit, match=r"compare\.json.* cannot be written"):
        write_report(folder, folder / "compare.json", "A title")


def test_a_copy_of_a_measurement_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_all(tmp_path)
    before = read_records(folder)
    (folder / "zzz.json").write_bytes((folder / "compare.json").read_bytes())
    capsys.readouterr()
    assert read_records(folder) == before
    assert "zzz.json is a copy of compare.json" in capsys.readouterr().err


# sections


def test_speedups_by_data_set_mark_what_is_slower_than_plain_decoding() -> None:
    """Plain decoding has 10 tokens/s, linear 20 and 5, dynatree 40 and 80."""
    found = section("Speed", comparison(), comparison("poems", (4.0, 0.25)))
    [table] = [block for block in found.blocks if isinstance(block, Table)]
    assert "large with small, float32 on cpu, a processor; temperature 0, greedy; 20 new tokens" in table.title
    assert list(table.frame) == ["method", "tales, 4 tokens", "poems, 4 tokens"]
    assert table.rows == [
        ["dynatree", "4.00", "8.00"],
        ["linear", "2.00", "0.50"],
        ["autoregressive", "1.00", "1.00"],
        ["transformers", "0.50", "0.50"],
    ]
    assert [[isinstance(cell, Marked) for cell in row] for row in table.rows] == [
        [False, False, False],
        [False, False, True],
        [False, False, False],
        [False, True, True],
    ]
    [figure] = drawn(found)
    bars = [float(bar.get_width()) for bar in figure.axes[0].patches]
    assert bars == [4.0, 2.0, 1.0, 0.5, 8.0, 0.5, 1.0, 0.5] or sorted(bars) == [0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 4.0, 8.0]


def test_measurements_that_may_not_be_compared_are_kept_apart() -> None:
    other = comparison()
    other["options"]["max_new_tokens"] = 64
    sixteen = new_report("compare", [new_run("autoregressive")], dtype="bfloat16")
    assert len(drawn(section("Speed", comparison(), other, sixteen))) == 3


def test_speedup_by_length_of_the_output() -> None:
    over_plain, over_transformers = drawn(section("Speed by length of the output", long_comparison()))
    assert lines_of(over_plain)["quick"] == [
        (100.0, pytest.approx(4.0)),
        (200.0, pytest.approx(1.6)),
        (300.0, pytest.approx(3 / 2.25)),
    ]
    assert lines_of(over_transformers)["quick"][0] == (100.0, pytest.approx(8.0))


def test_acceptance_is_weighted_by_rounds_and_leaves_out_what_few_reached() -> None:
    def accepted(rounds: int, *shares: float, prompt: int) -> Any:
        statistics = detailed(DRAFTED | {"rounds": rounds}, 0.1, shares)
        return new_run("linear", prompt=prompt, statistics=statistics)

    runs = [accepted(30, 0.9, 0.4, prompt=0), accepted(10, 0.5, prompt=1), accepted(10, 0.5, 0.2, 0.1, prompt=2)]
    [figure] = drawn(section("Acceptance by depth", new_report("compare", [new_run("autoregressive"), *runs])))
    [line] = figure.axes[0].get_lines()[:1]
    assert [float(y) for y in line.get_ydata()] == pytest.approx([0.74, 0.35])


def test_the_time_of_a_round_by_part() -> None:
    """The rounds of 250 ms take 1 s together; each part takes 100 ms of it. Detokenizing is not shown."""
    statistics = detailed(DRAFTED, 0.1, [])
    run = new_run("linear", arrivals=[(1, 0.5), (20, 1.5)], statistics=statistics)
    [figure] = drawn(section("Time of a round", new_report("compare", [run, baseline("transformers", 1.0)])))
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["linear"]
    names = axes.get_legend_handles_labels()[1]
    assert names == ["draft forward", "grow", "verify forward", "accept", "commit", "wire", "other"]
    assert [float(bar.get_width()) for bar in axes.patches] == pytest.approx([25.0] * 6 + [100.0])


def test_the_curves_of_costs() -> None:
    lines = lines_of(cost_curve(costs_report(), "nodes", "a title"))
    assert lines["round"] == [(0.0, pytest.approx(12.0)), (15.0, pytest.approx(13.5)), (255.0, pytest.approx(37.5))]
    assert {y for _, y in lines["plain step"]} == {10.0}
    assert {y for _, y in lines["floor"]} == {4.0}
    by_context = lines_of(cost_curve(costs_report(), "context", "a title"))
    assert [x for x, _ in by_context["round, 15 nodes"]] == [128.0, 512.0]


def test_missing_statistics_leave_nothing_but_speed() -> None:
    run = new_run("autoregressive", statistics=None, arrivals=[], peak_memory=None)
    found = [each.title for each in sections(records(new_report("compare", [run])))]
    assert found == ["What was measured", "Speed", "Tables by file"]
