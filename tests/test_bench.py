"""`dynatree bench`: cutting prompts, counting ranks, files and their tables, and every measurement on the pair."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import EmbeddedServices

from dynatree.bench import command, runs, tables
from dynatree.bench.methods import ABLATION, COUPLING, PLAIN, Case, Method, parse_method
from dynatree.bench.prompts import Selection, Tokenizer, cut_text, read_prompts
from dynatree.bench.ranks import add_ranks, count_ranks, sequoia_settings
from dynatree.bench.report import Report, load, save
from dynatree.cli.main import main
from dynatree.client import RoundTrace

TEXT = "".join(
    f" = Title {part} = \n \n" + " ".join(f"word{part}x{i}" for i in range(60)) + " \n \n" for part in range(4)
)


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ord(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


# prompts


def test_windows_start_at_paragraphs_and_do_not_overlap() -> None:
    windows = [decode(window) for window in cut_text("\n" + TEXT, 4, 40, encode)]
    assert [window[:12] for window in windows] == [f" = Title {part} =" for part in range(4)]
    assert all(len(window) == 40 for window in windows)


def test_windows_start_at_words_where_there_is_no_paragraph() -> None:
    text = " ".join(f"word{number}" for number in range(1000))
    windows = [decode(window) for window in cut_text(text, 3, 50, encode)]
    assert windows[0].startswith("word0 word1")
    assert all(window.startswith(" word") for window in windows[1:])


def test_windows_of_any_number_of_characters_a_token() -> None:
    """A token of 100 characters needs more text than a first guess; what was cut does not spoil the window."""
    words = "a" * 99 + " "

    def coarse(text: str) -> list[int]:
        return [len(text[i : i + 100]) for i in range(0, len(text), 100)]

    assert cut_text(words * 60, 2, 20, coarse) == [(100,) * 20] * 2


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="too short for 5 prompts of 900 tokens"):
        cut_text(TEXT, 5, 900, encode)


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"id": 1, "prompt": "Once"}, "prompt"),
        ({"prefix": "Once", "gold_completion": "upon"}, "prefix"),
        ({"text": "Once", "question": "?"}, "text"),
        ({"question_id": 1, "turns": ["Once", "Twice"]}, "turns"),
        ({"question": "Once", "answer": "No"}, "question"),
    ],
)
def test_the_field_of_json_lines_is_found(tmp_path: Path, entry: dict[str, Any], field: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(entry) + "\n\n")
    prompts = read_prompts(path, Selection(1, 3), encode)
    assert (prompts.field, [decode(each) for each in prompts.token_ids]) == (field, ["Onc"])


def test_entries_are_evenly_spaced_and_may_be_short(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(json.dumps({"say": f"entry {number}"}) + "\n" for number in range(10)))
    prompts = read_prompts(path, Selection(4, 100, "jsonl", "say"), encode)
    assert [decode(each) for each in prompts.token_ids] == ["entry 0", "entry 2", "entry 5", "entry 7"]
    assert (prompts.file, len(prompts.sha256)) == ("prompts.txt", 64)


@pytest.mark.parametrize(
    ("name", "content", "selection", "message"),
    [
        ("a.txt", b"\xff", Selection(1, 1), "is not UTF-8: invalid start byte at byte 0"),
        ("a.txt", b"word", Selection(1, 1, field="x"), "--field is for JSON Lines"),
        ("a.txt", b"word", Selection(2, 4), "too short for 2 prompts of 4 tokens"),
        ("a.jsonl", b'{"text": "a"}', Selection(2, 1), "it has 1 prompts, expected at least 2"),
        ("a.jsonl", b'\n{"text": "a"', Selection(1, 1), "line 2 is not JSON"),
        ("a.jsonl", b"[]", Selection(1, 1), "line 1 is not a JSON object"),
        ("a.jsonl", b'{"id": 1}', Selection(1, 1), "line 1 has none of prompt, prefix, text, turns, question"),
        ("a.jsonl", b'{"text": 1}', Selection(1, 1), "line 1: text is no text"),
        ("a.jsonl", b'{"turns": []}', Selection(1, 1), "line 1: turns is no text"),
        ("a.jsonl", b'{"text": ""}', Selection(1, 1), "line 1: text is empty"),
        ("a.jsonl", b'{"text": "a"}\n{}', Selection(2, 1), "line 2 has no text"),
    ],
)
def test_files_that_have_no_such_prompts(
    tmp_path: Path, name: str, content: bytes, selection: Selection, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as error:
        read_prompts(tmp_path / name, selection, encode)
    assert message in str(error.value)
    assert name in str(error.value)


# methods


def test_methods_are_named_as_they_were_given() -> None:
    assert parse_method("fixed:depth=5,tau=0.5") == Method(
        "fixed:depth=5,tau=0.5", "fixed", (("depth", 5.0), ("tau", 0.5))
    )
    assert parse_method("linear") == Method("linear", "linear")


@pytest.mark.parametrize("text", ["", ":a=1", "fixed:", "fixed:depth", "fixed:depth=x", "fixed:=1", "fixed:a=1,a=2"])
def test_methods_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", "--prompts", "x", "--policy", text]) == 2
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
        a_round([-1, -1, -1], [1]),  # the second guess
        a_round([-1, -1, -1], []),  # none of them
        a_round([], []),  # nothing was guessed
        a_round([-1, -1, 0, 0, 1, 1], [1, 4]),  # below the root the second, below that the first
        a_round([-1, -1, -1, -1], [3]),  # the fourth, of which three are asked for
    ]
    counts = count_ranks(rounds, 3)
    assert counts == {"trials": 5, "hits": [1, 2, 0]}
    both = add_ranks([counts, {"trials": 1, "hits": [0, 1, 0]}])
    assert both == {"trials": 6, "hits": [1, 3, 0]}
    assert sequoia_settings(both) == {"p1": 0.1666, "p2": 0.5, "p3": 0.0}


# files and tables


def a_run(label: str, **changes: Any) -> dict[str, Any]:
    statistics = {
        "rounds": 10,
        "draft_n": 0,
        "acceptance_rate": 0.0,
        "tokens_per_round": 1.0,
        "mean_path_length": 0.0,
        "nodes_per_round": 0.0,
        "committed_per_level": 0.0,
    }
    run = {
        "label": label,
        "policy": label,
        "settings": {},
        "temperature": 0,
        "scheme": None,
        "seed": None,
        "prompt": 0,
        "repetition": 0,
        "tokens": 20,
        "equal": True,
        "wall_seconds": 2.0,
    }
    return (
        run
        | {name: value for name, value in changes.items() if name in (*run, "ranks")}
        | {"statistics": statistics | {name: value for name, value in changes.items() if name in statistics}}
    )


def a_report(name: str, all_runs: list[dict[str, Any]], **changes: Any) -> Report:
    model = {"name": "small", "dtype": "float32", "device": "cpu", "parameters": 7, "version": "1"}
    report: Any = {
        "schema_version": 1,
        "command": name,
        "started": "2026-01-02T03:04:05+00:00",
        "complete": True,
        "versions": {"dynatree": "1", "torch": None, "transformers": None, "python": "3"},
        "git": None,
        "machine": {"platform": "Linux", "cpu_count": 2},
        "models": {"target": model | {"name": "large [x]"}, "draft": model},
        "prompts": {"file": "a.txt", "sha256": "0", "field": None, "count": 2, "tokens": [3, 4]},
        "options": {"max_new_tokens": 20, "repetitions": 1},
        "skipped": [],
        "runs": all_runs,
    }
    return report | changes


def show(path: Path, report: Report, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[list[str]], str]:
    """The exit status of `show` on a saved report, the cells of its tables' rows, and all that it printed."""
    save(report, path)
    status = main(["bench", "show", str(path)])
    out = capsys.readouterr().out
    return status, rows_of(out), out


def rows_of(out: str) -> list[list[str]]:
    """What stands below each table's rule, up to the next empty line."""
    rows, inside = [], False
    for line in out.splitlines():
        inside = "──" in line or (inside and bool(line.strip()))
        if inside and "──" not in line:
            rows.append(re.split(r"\s{2,}", line.strip()))
    return rows


DRAFTED = {
    "draft_n": 40,
    "rounds": 4,
    "tokens_per_round": 2.5,
    "nodes_per_round": 10.0,
    "acceptance_rate": 0.15,
    "committed_per_level": 1.25,
    "mean_path_length": 1.5,
}


def test_the_table_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates: plain 10 and 5 tokens/s, drafted 20 and 20, so the speedups are 2 and 4."""
    drawn: dict[str, Any] = {"temperature": 0.7, "scheme": "residual", "seed": 0, "equal": None}
    report = a_report(
        "compare",
        [
            a_run("autoregressive"),
            a_run("fixed:depth=[2]", wall_seconds=1.0, **DRAFTED),
            a_run("autoregressive", prompt=1, wall_seconds=4.0),
            a_run("fixed:depth=[2]", prompt=1, wall_seconds=1.0, **DRAFTED | {"rounds": 5, "acceptance_rate": 0.25}),
            a_run("autoregressive", **drawn),
        ],
        skipped=[{"label": "ngram", "scheme": "residual", "reason": "no"}],
    )
    status, rows, out = show(tmp_path / "a.json", report, capsys)
    assert (status, load(tmp_path / "a.json")) == (0, report)
    assert rows == [
        ["autoregressive", "1.00", "0.0", "-", "-", "10.0", "7.5", "6.2-8.8", "1.00", "yes"],
        ["fixed:depth=[2]", "2.50", "10.0", "20.0", "1.25", "4.5", "20.0", "20.0-20.0", "3.00", "yes"],
        ["autoregressive", "1.00", "0.0", "-", "-", "10.0", "10.0", "-", "1.00", "-"],
    ]
    assert "target large [x] (float32, cpu), draft small (float32, cpu); prompts: 2 from a.txt, of 3 to 4 tokens" in out
    assert "temperature 0, greedy" in out
    assert "temperature 0.7, scheme residual" in out
    assert "scheme residual does not allow them: ngram" in out
    assert "equal to plain decoding: all of 4 outputs" in out


def test_outputs_that_differ_and_an_interruption_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong: dict[str, Any] = {"temperature": 0.7, "scheme": "gumbel", "seed": 1, "equal": False}
    all_runs = [a_run("linear", prompt=number, **wrong) for number in range(12)]
    _, rows, out = show(tmp_path / "a.json", a_report("compare", all_runs, complete=False), capsys)
    assert rows[0][-2:] == ["-", "NO (12 of 12 differ)"]
    assert "NOT EQUAL to plain decoding: linear, temperature 0.7, gumbel, seed 1, prompt 0" in out
    assert "and 2 more" in out
    assert "interrupted" in out
    assert "all of" not in out


def test_the_tables_of_the_ablation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [2.0, 1.0, 1.0, 1.25, 1.0, 0.8, 0.5]
    all_runs = [
        a_run(method.label, prompt=prompt, wall_seconds=(1 + prompt) * wall, **({} if method == PLAIN else DRAFTED))
        for prompt in range(2)
        for method, wall in zip(ABLATION, seconds, strict=True)
    ]
    _, rows, _ = show(tmp_path / "a.json", a_report("ablation", all_runs), capsys)
    assert rows == [
        ["fixed (D = 5, B = 2, tau = 0.1)", "12.0 ± 5.7", "1.60", "-20.0 %"],
        ["fixed (D = 5, B = 2, tau = 0.05)", "15.0 ± 7.1", "2.00", "+0.0 %"],
        ["+ dynamic tree breadth and depth", "18.8 ± 8.8", "2.50", "+25.0 %"],
        ["+ history adaptation (DynaTree)", "30.0 ± 14.1", "4.00", "+100.0 %"],
        ["autoregressive", "-", "1.00", "-", "10"],
        ["linear (K = 8)", "125.0 %", "2.50", "1.50", "4"],
        ["fixed (D = 8, B = 3, tau = 0.1)", "125.0 %", "2.50", "1.50", "4"],
        ["DynaTree", "125.0 %", "2.50", "1.50", "4"],
    ]


def test_the_table_of_couplings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(label: str, scheme: str, tokens_per_round: float) -> dict[str, Any]:
        equal = None if scheme == "residual" else True
        return a_run(label, temperature=1.0, scheme=scheme, seed=0, equal=equal, tokens_per_round=tokens_per_round)

    all_runs = [
        drawn("autoregressive", "gumbel", 1.0),
        drawn("linear", "gumbel", 2.0),
        drawn("linear", "residual", 1.5),
        drawn("opt-tree", "gumbel", 3.0),
    ]
    _, rows, out = show(tmp_path / "a.json", a_report("coupling", all_runs), capsys)
    assert rows == [["linear", "1", "2.00", "1.50", "yes"], ["opt-tree", "1", "3.00", "-", "yes"]]
    assert re.search("policy +T +gumbel +residual +plain", out)


def test_the_table_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_runs = [a_run("guesses", equal=None, prompt=n, ranks={"trials": 4, "hits": [2, n]}) for n in range(2)]
    _, rows, out = show(tmp_path / "a.json", a_report("ranks", all_runs), capsys)
    assert rows == [
        ["p1", "4", "0.5000"],
        ["p2", "1", "0.1250"],
        ["none of them", "3", "0.3750"],
        ["all", "8", "1.0000"],
    ]
    assert "--policy sequoia --set p1=0.5 --set p2=0.125" in out
    assert "--policy sequoia:p1=0.5,p2=0.125" in out


def test_the_table_of_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = a_report("ranks", [a_run("guesses", ranks={"trials": 0, "hits": [0]})])
    _, rows, out = show(tmp_path / "a.json", report, capsys)
    assert rows[-1] == ["all", "0", "-"]
    assert "sequoia" not in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "the file is not an object"),
        ("{}", "the file has no schema_version"),
        ('{"schema_version": 2, "command": "compare"}', "schema_version 2, command 'compare' are not known"),
        ('{"schema_version": 1, "command": "no"}', "schema_version 1, command 'no' are not known"),
        ('{"schema_version": NaN}', "NaN is not a JSON number"),
        (json.dumps(a_report("compare", [a_run("x", wall_seconds=0)])), "wall_seconds has the wrong type or value"),
        (json.dumps(a_report("compare", [a_run("x", equal="yes")])), "equal has the wrong type or value"),
        (json.dumps(a_report("compare", [a_run("x") | {"statistics": 1}])), "statistics is not an object"),
        (json.dumps(a_report("ranks", [a_run("x")])), "runs[0] has no ranks"),
        (json.dumps(a_report("compare", [], runs={})), "runs is not a list"),
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


# the measurements


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(
        "It was a dark and stormy night, and the captain had not come back to the house by the sea.\n\n"
        "My dear sister, I write to you in haste, for the ship is to sail in the morning, and I must go.\n\n" * 2
    )
    return path


def bench(measurement: str, services: EmbeddedServices, prompts: Path, *more: str) -> int:
    tiny = ["--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "8"]
    return main(["bench", measurement, "--server", services.draft_address, "--prompts", str(prompts), *tiny, *more])


def test_compare_every_policy(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert (
        bench(
            "compare", embedded_services, text, "--repetitions", "2", "--out", str(out), "--seed", "5", "--warmup", "0"
        )
        == 0
    )
    printed = capsys.readouterr().out
    report = load(out)
    all_runs = report["runs"]
    labels = list(dict.fromkeys(run["label"] for run in all_runs))
    assert labels[:2] == ["autoregressive", "dynatree"]
    assert {"fixed", "linear", "sequoia", "throughput"} < set(labels)
    assert len(all_runs) == len(labels) * 2 * 2 * 2
    # for each prompt and each repetition all methods in turn
    turns = [(run["prompt"], run["repetition"]) for run in all_runs]
    assert turns == sorted(turns)
    assert all(run["equal"] for run in all_runs)
    assert {(run["temperature"], run["scheme"], run["seed"]) for run in all_runs} == {
        (0.0, None, None),
        (0.7, "gumbel", 5),
        (0.7, "gumbel", 6),
    }
    assert all(run["tokens"] == run["statistics"]["generated_tokens"] == 8 for run in all_runs)
    assert report["prompts"]["tokens"] == [12, 12]
    assert (report["prompts"]["file"], str(tmp_path) in out.read_text()) == ("story.txt", False)
    assert report["models"]["target"]["parameters"] > report["models"]["draft"]["parameters"]
    assert report["complete"]
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_compare_with_residual_sampling_leaves_out_what_it_does_not_allow(
    embedded_services: EmbeddedServices, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ["--policy", "linear:depth=3", "--policy", "opt-tree"]
    assert bench("compare", embedded_services, text, *policies, "--scheme", "residual") == 0
    out = capsys.readouterr().out
    assert "scheme residual does not allow them: opt-tree" in out
    assert [row[0] for row in rows_of(out)] == [
        *("autoregressive", "linear:depth=3", "opt-tree"),  # greedy
        *("autoregressive", "linear:depth=3"),
    ]


def test_an_output_that_differs_is_a_failure(
    embedded_services: EmbeddedServices, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = runs._complete

    def wrong(client: Any, prompt: Any, case: Case, settings: Any, number: int) -> Any:
        other = [*prompt[:-1], prompt[0]] if case.method.policy == "linear" else prompt
        return complete(client, other, case, settings, number)

    monkeypatch.setattr(runs, "_complete", wrong)
    assert bench("compare", embedded_services, text, "--policy", "linear", "--temperature", "0") == 1
    assert "NOT EQUAL to plain decoding: linear, temperature 0, prompt 0" in capsys.readouterr().out


def test_ablation(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert bench("ablation", embedded_services, text, "--out", str(out)) == 0
    assert len(load(out)["runs"]) == 2 * len(ABLATION)
    printed = capsys.readouterr().out
    for words in ("(Table 4)", "(Table 3)", "+ history adaptation", "Accept.", "delta vs fixed", "+0.0 %"):
        assert words in printed


def test_coupling(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert bench("coupling", embedded_services, text, "--out", str(out), "--warmup", "0") == 0
    assert len(load(out)["runs"]) == 2 * 2 * (1 + 3 * len(COUPLING))
    rows = rows_of(capsys.readouterr().out)
    assert [row[:-4] for row in rows] == [[method.label, t] for t in ("0.7", "1") for method in COUPLING]


def test_ranks_on_services_of_its_own(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "16", "--threads", "1"]
    assert main(["bench", "ranks", "--prompts", str(text), *arguments, "--out", str(out)]) == 0
    counts = add_ranks([run["ranks"] for run in load(out)["runs"]])
    accepted = sum(run["statistics"]["draft_n_accepted"] for run in load(out)["runs"])
    assert sum(counts["hits"]) == accepted
    assert counts["hits"][0] == max(counts["hits"]) > 0
    assert "--policy sequoia --set p1=0." in capsys.readouterr().out


def test_what_was_measured_before_a_failure_is_kept(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    measure = command.measure

    def interrupted(*arguments: Any) -> Any:
        yield next(measure(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    assert bench("compare", embedded_services, text, "--policy", "linear", "--out", str(out)) == 130
    report = load(out)
    assert (len(report["runs"]), report["complete"]) == (1, False)
    tables.print_report(report)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "fixed:dept=3"], "policy fixed has no setting dept"),
        (["--policy", "none"], "unknown policy 'none'"),
        (["--max-new-tokens", "3000"], "do not fit into the context of embedded-"),
        (["--target-model", "/no/such/model"], "no tokenizer could be loaded"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read: No such file or directory"),
        (["--count", "100"], "too short for 100 prompts"),
        (["--out", "/no/such/folder/out.json"], "cannot be written"),
        (["--server", "nowhere"], "an address is host:port or unix:PATH"),
    ],
)
def test_mistakes_are_one_line(
    embedded_services: EmbeddedServices, text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("compare", embedded_services, text, *more) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--draft-model", "embedded", "--threads", "1"],
            "--draft-model, --threads: only for services that are started",
        ),
        (["--count", "0"], "'0' is not a whole number of at least 1"),
        (["--max-new-tokens", "1"], "'1' is not a whole number of at least 2"),
        (["--temperature", "warm"], "'warm' is not a temperature"),
        (["--scheme", "none"], "--scheme"),
    ],
)
def test_wrong_command_lines(
    embedded_services: EmbeddedServices, text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("compare", embedded_services, text, *more) == 2
    assert message in capsys.readouterr().err


def test_another_tokenizer_is_refused(
    embedded_services: EmbeddedServices, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_tokenizer", lambda model: Tokenizer(encode, "another"))
    assert bench("compare", embedded_services, text) == 1
    assert "the tokenizer of embedded is not that of the server's target embedded-target" in capsys.readouterr().err


def test_the_prompts_are_not_overwritten(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = text.read_text()
    assert main(["bench", "compare", "--prompts", str(text), "--out", str(text)]) == 1
    assert "holds the prompts" in capsys.readouterr().err
    assert text.read_text() == before
