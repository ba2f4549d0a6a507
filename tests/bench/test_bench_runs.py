"""Tests every measurement of `dynatree bench` on the embedded pair."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import EmbeddedServices

from dynatree.bench import command
from dynatree.bench.decoding import Decoders, Output
from dynatree.bench.methods import ABLATION, COUPLING, LINEAR, PLAIN, Case
from dynatree.bench.printing import print_report
from dynatree.bench.prompts import Tokenizer
from dynatree.bench.ranks import add_ranks
from dynatree.bench.record import Report, load, save
from dynatree.bench.runs import RunSettings, plan, warm_up
from dynatree.cli.main import main
from dynatree.common.seeds import derived_seed
from tests.bench.test_bench_prompts import encode

TINY = ("--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "8")


def rows_of(out: str) -> list[list[str]]:
    """Return the rows below each table's rule, up to the next empty line."""
    rows, inside = [], False
    for line in out.splitlines():
        inside = "──" in line or (inside and bool(line.strip()))
        if inside and "──" not in line:
            rows.append(re.split(r"\s{2,}", line.strip()))
    return rows


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(
        "It was a dark and stormy night, and the captain had not come back to the house by the sea.\n\n"
        "My dear sister, I write to you in haste, for the ship is to sail in the morning, and I must go.\n\n" * 2
    )
    return path


def bench(measurement: str, services: EmbeddedServices, prompts: Path, *more: str) -> int:
    return main(["bench", measurement, "--server", services.draft_address, "--prompts", str(prompts), *TINY, *more])


@pytest.mark.long
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
    assert labels[0] == "autoregressive"
    assert {"dynatree", "fixed", "linear", "sequoia", "throughput"} < set(labels)
    assert len(all_runs) == len(labels) * 2 * 2 * 2
    # all methods in turn for each prompt and repetition
    turns = [(run["prompt"], run["repetition"]) for run in all_runs]
    assert turns == sorted(turns)
    # plain decoding comes first; the method after it changes
    rows = [[run for run in all_runs if (run["prompt"], run["repetition"]) == turn] for turn in dict.fromkeys(turns)]
    others = [[(run["label"], run["temperature"]) for run in row[2:]] for row in rows]
    assert all(run["label"] == "autoregressive" for row in rows for run in row[:2])
    assert others == [others[0][turn:] + others[0][:turn] for turn in range(4)]
    assert all(run["equal"] for run in all_runs)
    assert {(run["temperature"], run["scheme"], run["seed"]) for run in all_runs} == {
        (0.0, None, None),
        *((0.7, "gumbel", derived_seed(5, prompt, repetition)) for prompt in range(2) for repetition in range(2)),
    }
    assert all(run["tokens"] == run["statistics"]["generated_tokens"] == 8 for run in all_runs)
    assert all(run["agrees"] == 8 for run in all_runs)
    for run in all_runs:
        tokens, seconds = zip(*run["arrivals"], strict=True)
        assert tokens[-1] == 8
        assert list(tokens) == sorted(set(tokens))
        assert list(seconds) == sorted(seconds)
        assert 0 < seconds[-1] <= run["wall_seconds"] + 1e-6
        # the first token and each round's tokens arrive one after another
        assert len(tokens) == run["statistics"]["rounds"] + 1
        assert run["peak_memory"]["draft"] is run["peak_memory"]["verify"] is None
    assert report["machine"]["read_bandwidth"] is report["machine"]["threads"] is None
    assert report["prompts"]["tokens"] == [12, 12]
    assert (report["prompts"]["file"], report["prompts"]["data_set"]) == ("story.txt", "story")
    assert str(tmp_path) not in out.read_text()
    assert report["models"]["target"]["parameters"] > report["models"]["draft"]["parameters"]
    assert report["complete"]
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_no_completion_finds_the_prompt_of_another(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path
) -> None:
    """All methods complete the same prompts; a cached prefix would spare later methods the prefill."""
    options = ["--prompt-tokens", "24", "--temperature", "0", "--repetitions", "2", "--out", str(tmp_path / "out.json")]
    assert bench("compare", embedded_services, text, "--policy", "linear", *options) == 0
    runs = load(tmp_path / "out.json")["runs"]
    assert len(runs) == 8
    assert [run["statistics"]["cached_tokens"] for run in runs] == [0] * 8


def test_the_warm_up_completes_the_first_prompts() -> None:
    """Like the authors' scripts, DynaTree's warm-up W = 2 completes one prompt per run, starting over at the end."""
    completed = []

    class Counting(Decoders):
        def complete(self, prompt: Any, case: Case, **options: Any) -> Output:
            completed.append((prompt, case.method.label, options["seed"]))
            return Output((1,), ((1, 1.0),), 1.0)

    settings = RunSettings(max_new_tokens=8, seed=3, repetitions=1, warmup=3)
    cases = plan([PLAIN, LINEAR], [0.0], ["gumbel"])
    assert len(list(warm_up(Counting("nowhere"), [(1,), (2,)], cases, settings))) == 6
    assert [each[:2] for each in completed] == [((p,), case.method.label) for p in (1, 2, 1) for case in cases]
    assert not {each[2] for each in completed} & {settings.seed_of(prompt) for prompt in range(2)}


def test_compare_with_residual_sampling_leaves_out_what_it_does_not_allow(
    embedded_services: EmbeddedServices, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = ["--policy", "linear:depth=3", "--policy", "opt-tree"]
    assert bench("compare", embedded_services, text, *policies, "--scheme", "residual") == 0
    out = capsys.readouterr().out
    assert "scheme residual does not allow them: opt-tree" in out
    greedy, drawn = ("autoregressive", "linear:depth=3", "opt-tree"), ("autoregressive", "linear:depth=3")
    assert [row[0] for row in rows_of(out)] == [*3 * greedy, *3 * drawn]  # in three tables


def test_a_sweep_runs_every_combination(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    policies = ["--policy", "fixed:depth=1/2,breadth=1/2", "--policy", "linear"]
    assert bench("sweep", embedded_services, text, *policies, "--out", str(out), "--name", "tale") == 0
    report = load(out)
    fixed = [f"fixed:depth={depth},breadth={breadth}" for depth in (1, 2) for breadth in (1, 2)]
    others = [*fixed, "linear"]
    rows = [["autoregressive", *others[turn:], *others[:turn]] for turn in range(2)]
    assert [run["label"] for run in report["runs"]] == [label for row in rows for label in row]
    assert report["runs"][2]["settings"] == {"depth": 1, "breadth": 2}
    assert {run["temperature"] for run in report["runs"]} == {0}
    assert (report["command"], report["prompts"]["data_set"]) == ("sweep", "tale")
    assert "best of fixed: fixed:depth=" in capsys.readouterr().out


@pytest.fixture
def _wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make policy linear continue another prompt."""
    complete = Decoders.complete

    def wrong(decoders: Decoders, prompt: Any, case: Case, **options: Any) -> Output:
        other = [*prompt[:-1], prompt[0]] if case.method.policy == "linear" else prompt
        return complete(decoders, other, case, **options)

    monkeypatch.setattr(Decoders, "complete", wrong)


@pytest.mark.usefixtures("_wrong_drafts")
def test_an_output_that_differs_is_a_failure(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--policy", "linear", "--temperature", "0", "--out", str(out)]
    assert bench("compare", embedded_services, text, *options) == 1
    assert "NOT EQUAL to plain decoding: linear, temperature 0, prompt 0" in capsys.readouterr().out
    plain, linear = load(out)["runs"][:2]
    assert (plain["equal"], plain["agrees"]) == (True, 8)
    assert linear["equal"] is False
    assert linear["agrees"] is not None
    assert linear["agrees"] < 8


@pytest.mark.long
@pytest.mark.usefixtures("shared_pair")
def test_what_only_the_machine_of_the_services_knows_is_measured(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--policy", "linear", "--temperature", "0", "--threads", "1", "--out", str(out)]
    assert main(["bench", "compare", "--prompts", str(text), *TINY, *options]) == 0
    report = load(out)
    assert report["machine"]["threads"] == 1
    assert report["machine"]["read_bandwidth"] > 1e8
    for run in report["runs"]:
        assert min(run["peak_memory"][name] for name in ("draft", "verify", "client")) > 50e6


@pytest.mark.long
@pytest.mark.usefixtures("_wrong_drafts")
def test_services_of_its_own_in_16_bits(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In 16 bits a difference is not a failure. Services that the command starts are measured too."""
    out = tmp_path / "out.json"
    options = ["--policy", "linear", "--temperature", "0", "--dtype", "bfloat16", "--threads", "1", "--out", str(out)]
    assert main(["bench", "compare", "--prompts", str(text), *TINY, *options]) == 0
    assert "2 of 4 outputs part from plain decoding" in capsys.readouterr().out
    report = load(out)
    target = report["models"]["target"]
    assert (target["dtype"], target["weight_bytes"]) == ("bfloat16", 2 * (target["parameters"] - 2048 * 320))
    assert report["machine"]["threads"] == 1
    assert report["machine"]["read_bandwidth"] > 1e8
    for run in report["runs"]:
        assert min(run["peak_memory"][name] for name in ("draft", "verify", "client")) > 50e6


def test_ablation(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert bench("ablation", embedded_services, text, "--out", str(out)) == 0
    assert len(load(out)["runs"]) == 2 * len(ABLATION)
    printed = capsys.readouterr().out
    for words in ("(Table 4)", "(Table 3)", "+ history adaptation", "Accept.", "delta vs fixed", "+0.0 %"):
        assert words in printed


@pytest.mark.long
def test_coupling(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert bench("coupling", embedded_services, text, "--out", str(out), "--warmup", "0") == 0
    assert len(load(out)["runs"]) == 2 * 2 * (1 + 3 * len(COUPLING))
    rows = rows_of(capsys.readouterr().out)
    assert [row[:-4] for row in rows] == [[method.label, t] for t in ("0.7", "1") for method in COUPLING]


@pytest.mark.usefixtures("shared_pair")
def test_ranks(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "16", "--threads", "1"]
    assert main(["bench", "ranks", "--prompts", str(text), *arguments, "--out", str(out)]) == 0
    counts = add_ranks([run["ranks"] for run in load(out)["runs"]])
    accepted = sum(run["statistics"]["draft_n_accepted"] for run in load(out)["runs"])
    assert sum(counts["hits"]) == accepted
    assert counts["hits"][0] == max(counts["hits"]) > 0
    assert "--policy sequoia --set rates=0." in capsys.readouterr().out


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
    print_report(report)


def test_every_run_is_kept_as_soon_as_it_ended(
    embedded_services: EmbeddedServices, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    measure = command.measure
    kept = []

    def watched(*arguments: Any) -> Any:
        for run in measure(*arguments):
            yield run
            kept.append(len(load(out)["runs"]))

    monkeypatch.setattr(command, "measure", watched)
    assert bench("compare", embedded_services, text, "--policy", "linear", "--out", str(out)) == 0
    assert kept == list(range(1, len(kept) + 1))
    assert load(out)["complete"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out.json")] == ["out.json"]


def test_a_measurement_goes_where_a_link_points(tmp_path: Path) -> None:
    report = cast(Report, {"command": "compare", "runs": []})
    target, link = tmp_path / "target.json", tmp_path / "link.json"  # like /dev/stdout
    target.write_text("")
    link.symlink_to(target)
    save(report, link)
    assert link.is_symlink()
    assert json.loads(target.read_text()) == report


def test_a_measurement_can_go_to_a_pipe(tmp_path: Path) -> None:
    report = cast(Report, {"command": "compare", "runs": []})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=save, args=(report, pipe))
    writer.start()
    assert json.loads(pipe.read_text()) == report
    writer.join()
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policy", "fixed:dept=3"], "policy fixed has no setting dept"),
        (["--policy", "none"], "unknown policy 'none'"),
        (["--max-new-tokens", "3000"], "do not fit into the context of embedded-"),
        (["--target-model", "/no/such/model"], "there is no model at /no/such/model"),
        (["--target-model", "no such model"], "no tokenizer could be loaded for model 'no such model'"),
        (["--prompts", "/no/such/file"], "there is no file /no/such/file"),
        (["--prompts", "nofile"], "there is no file nofile, and no data set"),
        (["--count", "100"], "too short for 100 prompts"),
        (["--out", "/no/such/folder/out.json"], "cannot be written"),
        (["--server", "nowhere"], "'nowhere' is not an address; expected host:port, unix:PATH or dns:///name:port"),
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
            "--draft-model, --threads: not allowed with --server",
        ),
        (["--baseline", "transformers-assisted"], "expected --draft-model as well"),
        (["--baseline", "transformers", "--draft-model", "embedded"], "--draft-model: not allowed with --server"),
        (["--baseline", "transformers", "--temperature", "0.5"], "baselines decode at temperature 0 only"),
        (["--baseline", "none"], "--baseline"),
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


@pytest.mark.parametrize(
    ("measurement", "policy", "message"),
    [
        ("compare", "medusa", "--policy medusa: unknown policy 'medusa', expected one of autoregressive, "),
        ("compare", "linear:depth=99", "--policy linear:depth=99: depth is 99, expected a number in [1, 64]"),
        ("coupling", "fixed:dept=3", "--policy fixed:dept=3: policy fixed has no setting dept"),
        ("sweep", "linear:depth=8/99", "--policy linear:depth=99: depth is 99"),
    ],
)
def test_no_service_is_started_for_a_policy_that_it_would_refuse(
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    measurement: str,
    policy: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "service_pair", None)
    assert main(["bench", measurement, "--prompts", str(text), *TINY, "--policy", policy]) == 1
    assert message in capsys.readouterr().err


def test_a_sweep_needs_a_policy(
    embedded_services: EmbeddedServices, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("sweep", embedded_services, text) == 2
    assert "required: --policy" in capsys.readouterr().err


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
