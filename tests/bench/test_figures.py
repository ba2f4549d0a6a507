"""Tests the scripts of benchmarks/ that write figures from JSON into documents, and the suite that makes the JSON."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dynatree.bench.record import Report, save
from tests.support.bench_records import DRAFTED, baseline, costs_report, load_report, new_report, new_run
from tests.support.benchmark_modules import BENCHMARKS, module

COG = "cog.outl(figures.headline())"
BLOCK = f"Before.\n\n<!-- [[[cog {COG} ]]] -->\n{{table}}<!-- [[[end]]] -->\n\nAfter.\n"


def comparison() -> Report:
    """Return a record of two prompts: plain 10, transformers 8 and 5, assisted 10, throughput 20 and 40 tokens/s."""
    runs = [
        *(new_run("autoregressive", prompt=prompt) for prompt in range(2)),
        *(baseline("transformers", 2.5 * (1 + 0.6 * prompt), prompt=prompt) for prompt in range(2)),
        *(baseline("transformers assisted", 2.0, prompt=prompt, equal=not prompt) for prompt in range(2)),
        *(new_run("throughput", 1.0 / (1 + prompt), prompt=prompt, statistics=DRAFTED) for prompt in range(2)),
        *(new_run("linear:depth=5", 1.0, prompt=prompt, statistics=DRAFTED) for prompt in range(2)),
    ]
    runs[5]["margin"] = 0.125
    return new_report("compare", runs, dtype="bfloat16")


def beside_llama_cpp(name: str = "llama.cpp") -> Report:
    """Return a record of two prompts: plain 10, llama.cpp 8, 12.5 and 16, throughput 20 and 40 tokens/s."""
    runs = [
        new_run(label, seconds, prompt=prompt)
        for prompt in range(2)
        for label, seconds in (
            ("autoregressive", 2.0),
            (name, 2.5),
            (f"{name}, drafting 3", 1.6),
            (f"{name}, drafting 5", 1.25),
            ("throughput", 1.0 / (1 + prompt)),
        )
    ]
    runs[3]["own_equal"], runs[8]["own_equal"] = True, False  # drafting 5
    return new_report("compare", runs, dtype="bfloat16")


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with hand-made results."""
    found = module("figures")
    for name in found.TEXTS:
        save(comparison(), tmp_path / f"{name}.json.gz")
    for name in ("wikitext-2", "book"):
        save(beside_llama_cpp(), tmp_path / f"llama-cpp-{name}.json.gz")
        for kind in found.QUANTISED:
            save(beside_llama_cpp(f"llama.cpp {kind}"), tmp_path / f"llama-cpp-{name}-{kind}.json.gz")
    save(costs_report(), tmp_path / "costs.json.gz")
    save(load_report(), tmp_path / "many-clients.json.gz")
    monkeypatch.setattr(found, "RESULTS", tmp_path)
    for cached in (found.report, found.runs, found.best_drafting):
        cached.cache_clear()
    yield found
    for cached in (found.report, found.runs, found.best_drafting):
        cached.cache_clear()


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_drafting_server_parts_from_its_own_plain_decoding(figures: ModuleType) -> None:
    _, _, *body = rows(figures.of("llama-cpp-book", "llama.cpp"))
    assert {row[0]: row[-1] for row in body if "llama.cpp" in row[0]} == {
        "llama.cpp": "0 of 2",
        "llama.cpp, drafting 3": "0 of 2",
        "llama.cpp, drafting 5": "1 of 2 from its own",
    }


def test_the_headline(figures: ModuleType) -> None:
    _, _, *body = rows(figures.headline())
    assert {row[0]: row[1:3] for row in body} == {
        "transformers": ["6.5", "0.7 (0.5-0.8)"],
        "transformers, assisted": ["10.0", "1.0"],
        "llama.cpp": ["8.0", "0.8"],
        "llama.cpp, drafting 5": ["16.0", "1.6"],
        "plain decoding": ["10.0", "1.0"],
        "**DynaTree** (`throughput`)": ["30.0", "3.0 (2.0-4.0)"],
    }
    assert "the median over 2 prompts of a text (2 for llama.cpp). " in figures.headline_conditions()
    assert "best of llama.cpp's draft lengths, which were 3, 5 tokens." in figures.headline_conditions()
    assert "3.0 to 3.0 times as fast as its own plain decoding" in figures.headline_summary()
    assert "1.9 to 1.9 times as fast as llama.cpp with the same draft" in figures.headline_summary()
    assert "in 8 and 4 bits, it is 1.9 to 1.9 times as fast as llama.cpp with weights of" in figures.headline_summary()


def test_quantised_weights_are_beside_the_fastest_of_llama_cpp(figures: ModuleType) -> None:
    _, _, *body = rows(figures.quantised())
    assert [row[0] for row in body] == [each for each in ("int8, Q8_0", "int4, Q4_K_M", "int4, Q4_0") for _ in range(2)]
    for row in body:
        assert row[2:6] == ["8.0", "16.0, drafting 5", "10.0", "30.0 (20.0-40.0)"]
        assert row[-2:] == ["0 of 2", "1 of 2 from its own"]


def test_tuned_methods_have_one_row_over_all_texts(figures: ModuleType) -> None:
    _, _, *body = rows(figures.by_text("autoregressive"))
    assert [row[0] for row in body] == [
        "plain decoding",
        "transformers",
        "transformers, assisted",
        "**DynaTree** (`throughput`)",
        "tuned chain",
    ]
    assert body[4][1:] == ["2.00"] * 5


def test_outputs_that_part_are_counted_with_their_margins(figures: ModuleType) -> None:
    table = {row[0]: row[1:] for row in rows(figures.parting())[2:]}
    assert table["transformers, assisted"] == ["10", "5", "0.125 to 0.125"]
    assert table["**DynaTree** (`throughput`)"] == ["26", "0", "-"]


def test_where_it_was_measured(figures: ModuleType) -> None:
    assert "on 2 cores of a processor" in figures.machine()
    assert "at commit 0123456789ab" in figures.machine()


@pytest.mark.parametrize(
    "line", ["It makes 12 tokens/s.", "3.4 x plain", "2 times as fast", "a step takes 158 ms", "34 GB/s"]
)
def test_a_figure_in_prose_is_found(line: str) -> None:
    check = module("check_figures")
    table = "It is 4.0 x plain\n"
    text = BLOCK.format(table=table)
    assert list(check.outside(text)) == []
    assert list(check.outside(text + line)) == [(text.count("\n") + 1, line)]


def test_a_changed_digit_is_found(tmp_path: Path) -> None:
    """`make figures` finds it, run on a document of the test."""
    script = "import figures; figures.headline = lambda: '| 3.25 |'"
    cog = [sys.executable, "-m", "cogapp", "-I", str(BENCHMARKS), "-p", script, "-e", "--check"]
    page = tmp_path / "page.md"
    for table, status in (("| 3.25 |\n", 0), ("| 3.26 |\n", 5)):
        page.write_text(BLOCK.format(table=table))
        done = subprocess.run([*cog, str(page)], capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr


# the suite


def test_the_suite_says_how_long_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("A story.")
    suite = module("suite")
    suite.main(["--texts", str(tmp_path), "--out", str(tmp_path / "out"), "--plan"])
    out = capsys.readouterr().out
    assert "left out: wikitext-2, for want of" in out
    assert out.splitlines()[-1].startswith(f"0 of {len(suite.MEASUREMENTS)} measurements are there; ")


def test_the_suite_mixes_no_machines(tmp_path: Path) -> None:
    suite = module("suite")
    save(costs_report(), tmp_path / "costs.json.gz")
    with pytest.raises(SystemExit, match="is of other code or another processor"):
        suite.main(["--texts", str(tmp_path), "--out", str(tmp_path), "--plan"])


def test_the_suite_needs_texts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no folder .*/none of texts; The folder of texts holds"):
        module("suite").main(["--texts", str(tmp_path / "none"), "--plan"])


def test_the_fastest_chain_and_tree_are_taken_from_the_sweep(tmp_path: Path) -> None:
    suite = module("suite")
    seconds = {
        "linear:depth=3": 1.0,
        "linear:depth=5": 0.8,
        "fixed:depth=3,breadth=2": 0.5,
        "fixed:depth=5,breadth=2": 0.9,
    }
    runs = [new_run("autoregressive"), *(new_run(label, each) for label, each in seconds.items())]
    save(new_report("sweep", runs), tmp_path / "sweep.json.gz")
    place = suite.Suite(tmp_path, "large", "small", tmp_path, tmp_path)
    assert suite.best_static(place) == ["linear:depth=5", "fixed:depth=3,breadth=2"]
