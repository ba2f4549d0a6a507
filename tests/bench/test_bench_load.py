"""Tests `dynatree bench load`: closed and open loops on the embedded pair, figures computed by hand, and plots."""

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc
import pytest

from dynatree import embedded
from dynatree.bench.baselines import LocalModel, load_baselines, load_batches
from dynatree.bench.load import runs as load_runs_module
from dynatree.bench.load.clients import Reply
from dynatree.bench.load.figures import load_runs
from dynatree.bench.load.loads import ClosedLoop, OpenLoop, prompt_number
from dynatree.bench.load.runs import LoadBench
from dynatree.bench.methods import BASELINES
from dynatree.bench.printing import print_report, remarks
from dynatree.bench.record import load
from dynatree.bench.report import Record, sections
from dynatree.bench.table import Marked
from dynatree.bench.tables import tables
from dynatree.cli.main import main
from dynatree.client import Client, ServerError
from dynatree.common.seeds import derived_seed
from tests.support.bench_records import load_report, new_report
from tests.support.services import Services, running_services

TINY = ("--prompt-tokens", "12", "--max-new-tokens", "8", "--warmup", "0")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("sockets")
    with running_services(folder, embedded.target_path(), embedded.draft_path(), sessions=3) as running:
        yield running


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    lines = (f"On day {day} the captain had not come back to the house by the sea.\n\n" for day in range(40))
    path.write_text("".join(lines))
    return path


def bench(services: Services, prompts: Path, *more: str) -> int:
    return main(["bench", "load", "--server", services.draft_address, "--prompts", str(prompts), *TINY, *more])


# loads


def test_arrivals_are_a_poisson_process_that_the_seed_sets() -> None:
    arrivals = OpenLoop(rate=4.0, requests=4000).arrivals(7)
    gaps = [later - before for before, later in pairwise(arrivals)]
    assert (arrivals[0], len(arrivals)) == (0.0, 4000)
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert fmean(gap > 0.25 for gap in gaps) == pytest.approx(2.718281828**-1, abs=0.03)
    assert OpenLoop(4.0, 4000).arrivals(7) == arrivals
    assert OpenLoop(8.0, 4000).arrivals(7) == pytest.approx([each / 2 for each in arrivals])
    assert OpenLoop(4.0, 4000).arrivals(8) != arrivals


def test_each_repetition_goes_on_with_the_prompts() -> None:
    load = ClosedLoop(clients=2, rounds=3)
    numbers = [[prompt_number(load, repetition, request, 10) for request in range(6)] for repetition in range(2)]
    assert numbers == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 1]]


# on a pair


def test_closed_loops_beside_transformers(
    services: Services, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["--clients", "1,3", "--repetitions", "2", "--count", "12", "--policy", "linear:depth=3"]
    assert bench(services, text, *options, "--baseline", "transformers", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    report = load(out)
    assert (report["complete"], report["failures"]) == (True, [])
    assert {name: report["options"][name] for name in ("clients", "rounds", "rates")} == {
        "clients": [1, 3],
        "rounds": 2,
        "rates": [],
    }
    # all methods in turn, in reverse order every second time
    labels = ["autoregressive", "transformers", "linear:depth=3"]
    cells = list(dict.fromkeys((run["load"]["clients"], run["repetition"], run["label"]) for run in report["runs"]))
    turns = [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert cells == [(*turn, label) for turn in turns for label in (labels[::-1] if turn[1] else labels)]
    for clients, repetition, label in cells:
        place = clients, repetition, label
        runs = [run for run in report["runs"] if (run["load"]["clients"], run["repetition"], run["label"]) == place]
        first = 2 * clients * repetition
        assert sorted(run["prompt"] for run in runs) == [number % 12 for number in range(first, first + 2 * clients)]
        for client in range(clients):
            own = [run for run in runs if run["load"]["client"] == client]
            starts = [run["load"]["start_seconds"] for run in own]
            assert len(own) == 2
            assert starts[1] >= starts[0] + own[0]["wall_seconds"] - 1e-3
    for run in report["runs"]:
        assert (run["equal"], run["agrees"], run["tokens"], run["load"]["rate"]) == (True, 8, 8, None)
        assert run["arrivals"][-1][0] == 8
        assert 0 < run["arrivals"][0][1] <= run["arrivals"][-1][1] <= run["wall_seconds"] + 1e-6
        assert (run["statistics"] is None) is (run["label"] == "transformers")
        assert not run["statistics"] or run["statistics"]["cached_tokens"] == 0, "no load finds another's prompts"
    together = {one.label: one.per_pass("sessions_per_pass") for one in load_runs(report) if one.clients == 3}
    assert (together["autoregressive"] or 0) > 1
    assert "equal to plain decoding: all of 48 outputs" in printed
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_open_loops_with_the_default_policy(services: Services, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--rate", "30,60", "--requests", "5", "--count", "5", "--temperature", "0.7", "--seed", "3"]
    assert bench(services, text, *options, "--out", str(out)) == 0
    report = load(out)
    with Client(services.draft_address) as client:
        default = client.model_info().policies[0]
    cells = list(dict.fromkeys((run["load"]["rate"], run["label"]) for run in report["runs"]))
    assert cells == [(30.0, "autoregressive"), (30.0, default), (60.0, default), (60.0, "autoregressive")]
    for rate, label in cells:
        runs = [run for run in report["runs"] if (run["load"]["rate"], run["label"]) == (rate, label)]
        starts = sorted(run["load"]["start_seconds"] for run in runs)
        assert starts == pytest.approx(OpenLoop(rate, 5).arrivals(derived_seed(3, 0)), abs=1e-5), (
            "the same for every method"
        )
        assert sorted(run["prompt"] for run in runs) == [0, 1, 2, 3, 4]
    for run in report["runs"]:
        assert (run["scheme"], run["seed"], run["equal"]) == ("gumbel", derived_seed(3, run["prompt"], 0), True)
        assert (run["load"]["clients"], run["load"]["client"]) == (None, None)


def test_refusals_are_counted(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one session and no queue, at least one of three clients is refused, which does not count as a failure."""
    out = tmp_path / "out.json"
    pair = embedded.target_path(), embedded.draft_path()
    options = ["--clients", "3", "--rounds", "1", "--count", "3", "--policy", "autoregressive", "--out", str(out)]
    with running_services(tmp_path, *pair, sessions=1, queue=0) as services:
        assert bench(services, text, *options) == 0
    report = load(out)
    assert len(report["failures"]) >= 1
    assert len(report["runs"]) + len(report["failures"]) == 3
    assert {failure["code"] for failure in report["failures"]} == {"RESOURCE_EXHAUSTED"}
    assert "; the first: every session is in use" in capsys.readouterr().out


@pytest.fixture
def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every second request of policy linear fail."""
    drive = load_runs_module.drive

    async def failing(service: Any, case: Any, *arguments: Any) -> list[Reply]:
        replies = await drive(service, case, *arguments)
        if case.method.policy == "linear":
            error = ServerError(grpc.StatusCode.INTERNAL, "broken", token_ids=[1, 2])
            replies[::2] = [Reply(each.prompt, each.client, each.start, 0.5, error) for each in replies[::2]]
        return replies

    monkeypatch.setattr(load_runs_module, "drive", failing)


@pytest.mark.usefixtures("_failing")
def test_a_request_that_fails_is_a_failure(
    services: Services, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert bench(services, text, "--clients", "2", "--count", "4", "--policy", "linear", "--out", str(out)) == 1
    failures = load(out)["failures"]
    assert [(each["label"], each["code"], each["tokens"]) for each in failures] == [("linear", "INTERNAL", 2)] * 2
    assert "requests that ended in INTERNAL: 2 (linear); the first: broken" in capsys.readouterr().out


def test_what_was_measured_before_an_interrupt_is_kept(
    services: Services, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes while the event loop waits for the second method's completions."""
    out = tmp_path / "out.json"
    drive = load_runs_module.drive

    async def interrupted(service: Any, case: Any, *arguments: Any) -> list[Reply]:
        if case.method.policy == "linear":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(60)
        return await drive(service, case, *arguments)

    monkeypatch.setattr(load_runs_module, "drive", interrupted)
    options = ["--clients", "2", "--rounds", "1", "--count", "2", "--policy", "linear", "--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        assert bench(services, text, *options) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    report = load(out)
    assert ([run["label"] for run in report["runs"]], report["complete"]) == (["autoregressive"] * 2, False)
    print_report(report)


def test_every_load_is_kept_as_soon_as_it_ended(
    services: Services, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    measure = LoadBench.measure
    kept = []

    def watched(*arguments: Any) -> Any:
        for cell in measure(*arguments):
            yield cell
            kept.append(len(load(out)["runs"]))

    monkeypatch.setattr(LoadBench, "measure", watched)
    options = ["--clients", "1,2", "--rounds", "1", "--count", "2", "--policy", "linear", "--out", str(out)]
    assert bench(services, text, *options) == 0
    assert kept == [1, 2, 4, 6]


def test_a_batch_has_the_tokens_of_its_prompts_alone(services: Services) -> None:
    with Client(services.draft_address) as client:
        target = LocalModel(str(embedded.target_path()), client.model_info().target)
    draws = random.Random(1)
    prompts = [[draws.randrange(5, 1000) for _ in range(length)] for length in (3, 17, 9)]
    alone = load_baselines([BASELINES["transformers"]], target, target).decoders["transformers"]
    outputs = load_batches(target)(prompts, 6)
    assert [output.token_ids for output in outputs] == [alone(prompt, 6).token_ids for prompt in prompts]
    for output in outputs:
        assert [tokens for tokens, _ in output.arrivals] == [1, 2, 3, 4, 5, 6]
        assert output.seconds >= output.arrivals[-1][1]


# command lines


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "expected --clients, --rate or both"),
        (["--clients", "2,0"], "'0' is not a whole number of at least 1"),
        (["--clients", "2,2"], "'2,2' has a number twice"),
        (["--clients", ""], "'' is not a whole number of at least 1"),
        (["--rate", "0"], "'0' is not a number of requests a second above 0"),
        (["--rate", "inf"], "'inf' is not a number of requests"),
        (["--rate", "1", "--rounds", "2"], "--rounds requires --clients"),
        (["--clients", "1", "--requests", "2"], "--requests requires --rate"),
        (["--rate", "1", "--baseline", "transformers"], "expected --clients as well"),
        (["--clients", "1", "--baseline", "transformers-assisted"], "invalid choice: 'transformers-assisted'"),
        (["--clients", "1", "--baseline", "transformers", "--temperature", "1"], "temperature 0 only"),
        (["--clients", "1", "--temperature", "warm"], "'warm' is not a temperature"),
        (["--clients", "1", "--max-sessions", "2"], "--max-sessions: not allowed with --server"),
        (["--clients", "1", "--scheme", "gumbel"], "unrecognized arguments: --scheme"),
    ],
)
def test_wrong_command_lines(text: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "--server", "localhost:1", "--prompts", str(text), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_policy_that_the_server_refuses_is_one_line(
    services: Services, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(services, text, "--clients", "1", "--count", "1", "--policy", "none") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "unknown policy 'none'" in err


# tables and plots


def test_the_tables_of_loads() -> None:
    closed, closed_passes, opened, opened_passes = tables(load_report())
    assert [table.title for table in (closed, opened_passes)] == [
        "Load, closed loop, temperature 0, greedy",
        "Passes, open loop, temperature 0, greedy",
    ]
    # plain: 40 tokens in 4 s, then in 2 s; 3 of 4 requests take 2 s and 100 ms a token, one takes twice that
    assert closed.rows == [
        ["2", "autoregressive", "15.0 (10.0-20.0)", "1.00", "100", "197", "100", "200", "2.00", "3.94", "yes"],
        ["2", "linear", "40.0", "2.67", "50.0", "50.0", "50.0", "50.0", "1.00", "1.00", "yes"],
    ]
    # linear: 40 nodes in 4 rounds, 6 of them accepted, 8 not verified
    assert closed_passes.rows == [
        ["2", "autoregressive", "0", "970", "1000", "1.50", "3.00", "0.00", "0.80", "-"],
        ["2", "linear", "0", "0", "0", "1.50", "3.00", "10.00", "2.00", "15.0"],
    ]
    # the second request is due at 2 s and ends 4 s later; linear's is refused after 10 ms
    assert list(opened.frame)[-2:] == ["refused", "equal to plain"]
    assert opened.rows == [
        ["0.5", "autoregressive", "6.7", "1.00", "150", "199", "150", "200", "3.00", "3.98", "-", "yes"],
        ["0.5", "linear", "10.0", "1.49", "50.0", "50.0", "50.0", "50.0", "1.00", "1.00", "1", "yes"],
    ]
    assert isinstance(opened.rows[1][-2], Marked)


def test_remarks_say_what_was_refused_and_what_differs() -> None:
    report = load_report()
    report["runs"][2]["equal"] = False
    assert list(remarks(report)) == [
        "NOT EQUAL to plain decoding: linear, temperature 0, prompt 0",
        "requests that ended in RESOURCE_EXHAUSTED: 1 (linear); the first: every session is in use",
    ]


def test_a_load_of_which_every_request_failed_has_no_figures() -> None:
    failures = load_report()["failures"]
    [speeds, passes] = tables(new_report("load", [], failures=failures))
    assert speeds.rows == [["0.5", "linear", "0.0", "1"]]
    assert passes.rows == []


def test_the_plots_of_loads() -> None:
    found = sections([Record("load.json", load_report()), Record("none.json", new_report("load", []))])
    [clients] = [section for section in found if section.title == "Many clients"]
    throughput, ttft = [block[1].axes[0] for block in clients.blocks if isinstance(block, tuple)]
    assert (throughput.get_xlabel(), throughput.get_ylabel()) == ("clients", "tokens/s")
    lines = {name: line[0] for line, name in zip(*throughput.get_legend_handles_labels(), strict=True)}
    assert {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in lines.items()} == {
        "autoregressive": ([2], [15.0]),
        "linear": ([2], [40.0]),
    }
    assert ttft.get_xlabel() == "requests a second"
    handles, names = ttft.get_legend_handles_labels()
    assert names == [f"{label}, TTFT p{percent}" for label in ("autoregressive", "linear") for percent in (50, 99)]
    assert list(handles[0][0].get_ydata()) == pytest.approx([150.0])
