"""`dynatree bench report`: its sections and what they show, from made-up records of both versions."""

import base64
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench_records import (
    DRAFTED,
    STATISTICS,
    baseline,
    costs_report,
    detailed,
    load_report,
    new_report,
    new_run,
    old_report,
    old_run,
)

from dynatree.bench.figures import Spread
from dynatree.bench.record import Report, save
from dynatree.bench.report.charts import Bars, HeatMap, Lines, Reference, Stacked
from dynatree.bench.report.command import SECTIONS, build, read_records, write_report
from dynatree.bench.report.content import Content, Section
from dynatree.bench.report.costs import memory, round_times, verify_costs
from dynatree.bench.report.observations import Record
from dynatree.bench.report.speed import by_length, by_prompt_length, matrix, throughput
from dynatree.bench.report.trees import acceptance, sweeps
from dynatree.bench.tables.table import Marked, Table
from dynatree.cli.main import main

TITLES = [
    "What was measured",
    "Throughput and speedup",
    "Speedup by data set",
    "Speedup by length of the output",
    "Speedup by length of the prompt",
    "Many clients",
    "Settings",
    "Acceptance by depth",
    "Time of a round",
    "Cost of verifying and drafting",
    "Memory",
    "Tables by file",
]
TIMED = {"total_seconds": 1.1, "time_to_first_token_seconds": 0.1}


def point(value: float) -> Spread:
    return Spread(value, value, value)


def records(*reports: Report) -> list[Record]:
    return [Record(f"{number}.json", report) for number, report in enumerate(reports)]


def only_block(section: Section) -> Any:
    """The section's one block, of its one group."""
    [blocks] = section.groups.values()
    [block] = blocks
    return block


def comparison(data_set: str = "tales", prompt_tokens: int = 4, seconds: Sequence[float] = (1.0, 0.5)) -> Report:
    """Plain decoding, transformers and two policies, 20 tokens each: the policies take so many seconds."""
    report = new_report(
        "compare",
        [
            new_run("autoregressive"),
            baseline("transformers", 4.0),
            *(
                new_run(label, each, step=5, statistics=detailed(DRAFTED | TIMED, 0.1, [0.9, 0.5]))
                for label, each in zip(("linear", "dynatree"), seconds, strict=True)
            ),
        ],
    )
    report["prompts"] |= {"data_set": data_set, "tokens": [prompt_tokens] * 2}
    return report


def sweep() -> Report:
    def tried(policy: str, seconds: float, **settings: float) -> Any:
        label = policy + ":" + ",".join(f"{name}={value:g}" for name, value in settings.items())
        return new_run(label, seconds, policy=policy, settings=settings, statistics=DRAFTED)

    return new_report(
        "sweep",
        [
            new_run("autoregressive"),
            *(tried("fixed", 4 / (d * b), depth=float(d), breadth=float(b)) for d in (2, 4) for b in (1, 2)),
            *(tried("linear", 2 / depth, depth=float(depth)) for depth in (1, 4)),
            tried("dynatree", 1.0, tau_high=0.8),
            tried("dynatree", 0.5, tau_high=0.9),
            tried("dynatree", 0.25, tau_high=0.9, window=5.0),
        ],
    )


def save_all(folder: Path) -> Path:
    """A folder with a record of every kind, and JSON that is none."""
    long = new_report(
        "compare",
        [
            *(new_run(label, seconds, tokens=300) for label, seconds in (("autoregressive", 3.0), ("dynatree", 1.0))),
            baseline("transformers", 4.0, tokens=300),
        ],
    )
    written = {
        "compare": comparison(),
        "longer-prompts": comparison(prompt_tokens=8),
        "long": long,
        "sweep": sweep(),
        "costs": costs_report(),
        "load": load_report(),
        "version-1": old_report("ablation", [old_run("autoregressive")]),
    }
    for name, report in written.items():
        save(report, folder / f"{name}.json")
    (folder / "other.json").write_text("[]")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_all(tmp_path)


@dataclass(frozen=True)
class Written:
    """A report that the command wrote, and what it said."""

    folder: Path
    status: int
    said: str
    remarked: str


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """One report for all tests that only look: its plots take seconds."""
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
    assert len(SECTIONS) == len(TITLES)
    anchors = re.findall('href="#(.*?)"', page)
    assert anchors == re.findall('<section id="(.*?)">', page)
    shown = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert sorted(shown) == sorted(f"plots/{path.name}" for path in (out / "plots").iterdir())
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in shown)
    assert page.count("<img ") == len(shown) > 10


def test_the_page_needs_nothing_else(written: Written) -> None:
    page = (written.folder / "report.html").read_text()
    assert "<script" not in page
    assert not re.search('(src|href)="(?!data:|#)', page)
    assert "default-src 'none'" in page


@pytest.mark.long
def test_the_same_records_make_the_same_report(written: Written, folder: Path, tmp_path: Path) -> None:
    write_report(folder, tmp_path / "again", "A title")
    files = sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    assert len(files) > 10
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
    pictures = [base64.b64decode(each).decode() for each in re.findall('svg[+]xml;base64,(.*?)"', page)]
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


def test_what_cannot_be_written_is_one_line(folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"compare\.json.* cannot be written"):
        write_report(folder, folder / "compare.json", "A title")


def test_without_matplotlib_the_extra_is_named(folder: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from dynatree.bench.report.command import write_report\n"
        "write_report(Path(sys.argv[1]), Path(sys.argv[1], 'report'), 'A title')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "a report needs matplotlib: pip install 'dynatree[bench]'\n")
    assert not (folder / "report").exists()


def test_records_of_version_1_have_the_sections_that_they_can(tmp_path: Path) -> None:
    content = build(records(old_report("compare", [old_run("autoregressive"), old_run("linear")])), "A title")
    assert titles(content) == ["What was measured", "Throughput and speedup", "Speedup by data set", "Tables by file"]


def titles(content: Content) -> list[str]:
    return [section.title for section in content.sections]


# speed


def test_speedups_and_throughput_by_data_set() -> None:
    """Plain 10 tokens/s; linear 20 and 5, dynatree 40 and 80."""
    section = throughput(records(comparison(), comparison("poems", seconds=(4.0, 0.25))))
    [(setting, [speedups, rates, *by_data_set])] = section.groups.items()
    assert setting == "large with small, float32 on cpu, a processor, threads: 1; temperature 0, greedy; 20 new tokens"
    labels = ["dynatree", "linear", "autoregressive", "transformers"]
    assert speedups == Bars(
        "Speedup over plain decoding",
        "speedup",
        labels,
        {
            "poems": [point(8.0), point(0.5), point(1.0), point(0.5)],
            "tales": [point(4.0), point(2.0), point(1.0), point(0.5)],
        },
        Reference("plain decoding", 1.0),
    )
    assert isinstance(rates, Bars)
    assert rates.series["poems"] == [point(80.0), point(5.0), point(10.0), point(5.0)]
    poems, tales = by_data_set
    assert isinstance(poems, Table)
    assert isinstance(tales, Table)
    assert (poems.title, tales.title) == ("poems", "tales")
    assert list(tales.rows[0]) == ["dynatree", "1", "40.0", "40.0-40.0", "4.00", "4.00-4.00", "8.00", "8.00-8.00"]


def test_the_matrix_marks_what_is_slower_than_plain_decoding() -> None:
    table = only_block(matrix(records(comparison(), comparison("poems", seconds=(4.0, 0.25)))))
    assert list(table.headings) == ["method", "poems", "tales"]
    assert table.rows == [
        ["dynatree", "8.00", "4.00"],
        ["linear", "0.50", "2.00"],
        ["autoregressive", "1.00", "1.00"],
        ["transformers", "0.50", "0.50"],
    ]
    assert [[isinstance(cell, Marked) for cell in row] for row in table.rows] == [
        [False, False, False],
        [False, True, False],
        [False, False, False],
        [False, True, True],
    ]


def test_measurements_that_may_not_be_compared_are_kept_apart() -> None:
    other = comparison()
    other["options"]["max_new_tokens"] = 64
    sixteen = new_report("compare", [new_run("autoregressive")], dtype="bfloat16")
    assert len(throughput(records(comparison(), other, sixteen)).groups) == 3


def test_speedup_by_length_of_the_output() -> None:
    """A method that is four times as fast up to 100 tokens and then as slow as plain decoding, 100 tokens/s."""
    arrivals = [[1, 0.01], [100, 0.25], [200, 1.25], [300, 2.25]]
    report = new_report(
        "compare",
        [
            new_run("autoregressive", 3.0, tokens=300),
            baseline("transformers", 6.0, tokens=300),
            new_run("quick", 2.25, tokens=300, arrivals=arrivals),
        ],
    )
    [[over_plain, over_transformers]] = by_length(records(report)).groups.values()
    assert isinstance(over_plain, Lines)
    assert isinstance(over_transformers, Lines)
    assert over_plain.lines["quick"] == [
        (100.0, point(pytest.approx(4.0))),
        (200.0, point(pytest.approx(1.6))),
        (300.0, point(pytest.approx(3 / 2.25))),
    ]
    assert over_transformers.lines["quick"][0] == (100.0, point(pytest.approx(8.0)))
    assert over_transformers.references == [Reference("transformers", 1.0)]


def test_speedup_by_length_of_the_prompt() -> None:
    lines = only_block(by_prompt_length(records(comparison(prompt_tokens=8, seconds=(2.0, 1.0)), comparison()))).lines
    assert lines["linear"] == [(4, point(2.0)), (8, point(1.0))]
    assert not by_prompt_length(records(comparison(), comparison("poems", 8))).groups


# trees


def test_a_sweep_of_shapes_is_a_map_and_of_one_setting_a_line() -> None:
    [[shapes, linear, threshold]] = sweeps(records(sweep())).groups.values()
    cells = {(2.0, 1.0): 1.0, (2.0, 2.0): 2.0, (4.0, 1.0): 2.0, (4.0, 2.0): 4.0}
    assert shapes == HeatMap("fixed: speedup", "depth", "breadth", cells)
    assert isinstance(linear, Lines)
    assert linear.lines == {"linear: depth": [(1.0, point(1.0)), (4.0, point(4.0))]}
    assert isinstance(threshold, Lines)
    assert threshold.lines == {"dynatree: tau_high": [(0.8, point(2.0)), (0.9, Spread(6.0, 5.0, 7.0))]}


def test_acceptance_is_weighted_by_rounds_and_leaves_out_what_few_reached() -> None:
    def accepted(rounds: int, *shares: float, prompt: int) -> Any:
        statistics = detailed(DRAFTED | {"rounds": rounds}, 0.1, shares)
        return new_run("linear", prompt=prompt, statistics=statistics)

    all_runs = [accepted(30, 0.9, 0.4, prompt=0), accepted(10, 0.5, prompt=1), accepted(10, 0.5, 0.2, 0.1, prompt=2)]
    lines = only_block(acceptance(records(new_report("compare", all_runs)))).lines
    assert lines["linear"] == [(1, point(pytest.approx(0.74))), (2, point(pytest.approx(0.35)))]


# costs


def test_the_time_of_a_round_by_part() -> None:
    """Rounds of 250 ms, all together 1 s; each part took 100 ms of it, and detokenizing is not shown."""
    statistics = detailed(DRAFTED, 0.1, [])
    run = new_run("linear", arrivals=[[1, 0.5], [20, 1.5]], statistics=statistics)
    chart = only_block(round_times(records(new_report("compare", [run, baseline("transformers", 1.0)]))))
    assert isinstance(chart, Stacked)
    assert list(chart.labels) == ["linear"]
    parts = ["draft forward", "grow", "verify forward", "accept", "commit", "wire", "other"]
    assert list(chart.parts) == parts
    assert [value for [value] in chart.parts.values()] == pytest.approx([25.0] * 6 + [100.0])


def test_the_curves_of_costs() -> None:
    [[nodes, context, sessions, draft, *tables]] = verify_costs(records(costs_report())).groups.values()
    assert isinstance(nodes, Lines)
    assert nodes.references == [Reference("plain step", 10.0), Reference("floor", 4.0)]
    assert nodes.lines["round"][1] == (15, Spread(*map(pytest.approx, (13.5, 12.5, 14.5))))
    assert nodes.lines["forward"][2] == (255, point(pytest.approx(34.5)))
    assert isinstance(context, Lines)
    assert list(context.lines) == ["round, 0 nodes", "forward, 0 nodes", "round, 15 nodes", "forward, 15 nodes"]
    assert [x for x, _ in context.lines["round, 15 nodes"]] == [128, 512]
    assert isinstance(sessions, Lines)
    assert [x for x, _ in sessions.lines["round"]] == [1, 2]
    assert isinstance(draft, Lines)
    assert draft.lines == {"forward": [(1, point(pytest.approx(9.1))), (8, point(pytest.approx(9.8)))]}
    assert len(tables) == 4


def test_memory_is_the_largest_peak_of_each_process() -> None:
    peaks = [{"draft": 1_000_000, "verify": size, "client": None} for size in (5_000_000, 7_000_000)]
    all_runs = [new_run("linear", prompt=number, peak_memory=peak) for number, peak in enumerate(peaks)]
    chart = only_block(memory(records(new_report("compare", [*all_runs, new_run("dyspec", peak_memory=None)]))))
    assert chart.labels == ["linear", "dyspec"]
    assert chart.series == {
        "verify service": [point(7.0), None],
        "draft service": [point(1.0), None],
        "client": [None, None],
    }


def test_missing_statistics_leave_nothing_but_speed() -> None:
    run = new_run("linear", statistics=STATISTICS, arrivals=[], peak_memory=None)
    found = titles(build(records(new_report("compare", [run])), "A title"))
    assert found == ["What was measured", "Throughput and speedup", "Speedup by data set", "Tables by file"]


def test_a_copy_of_a_measurement_counts_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_records(folder)
    first = next(folder.glob("[!o]*.json"))
    (folder / "zzz.json").write_bytes(first.read_bytes())
    capsys.readouterr()
    assert read_records(folder) == before
    assert f"zzz.json is a copy of {first.name}" in capsys.readouterr().err
