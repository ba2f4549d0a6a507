"""Tests the `dynatree` command, in this process where possible, and as a child process for signals and pipes."""

import argparse
import gc
import importlib
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import grpc
import pytest

from dynatree.bench import methods
from dynatree.bench.arguments import MEASUREMENTS
from dynatree.cli.arguments import SCHEMES
from dynatree.cli.imports import without_collection
from dynatree.cli.main import COMMANDS, main
from dynatree.cli.parser import Parser, with_commands
from dynatree.cli.settings import serve_settings
from dynatree.client import SamplingScheme
from dynatree.common.limits import ALL_LAYERS
from dynatree.v1 import tree_pb2
from tests.support.fake_draft_service import (  # noqa: F401 - fixtures
    Fail,
    FakeDraftService,
    Hang,
    last,
    message,
    scored,
    service_fixture,
    traced,
)

COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


def start(*arguments: str) -> subprocess.Popen[str]:
    heed_interrupts()
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def heed_interrupts() -> None:
    """Undo that background jobs of a shell, and their children, ignore interrupts.

    This is not done between fork and exec, because gRPC may log to the child's stderr in a fork of this process.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def with_command(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Make `dynatree demo` call `run`."""
    monkeypatch.setitem(COMMANDS, "demo", ("a stand-in", "stand_in"))
    monkeypatch.setitem(
        sys.modules, "stand_in", SimpleNamespace(EXAMPLE="", add_arguments=lambda parser: None, run=run)
    )


# generate


def test_text_is_printed_as_it_arrives(service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    with start("generate", "Once", "--server", service.address) as process:
        assert process.stdout
        assert process.stdout.read(2) == "Hé"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=10)
    assert (process.returncode, rest, errors) == (130, "\n", "")
    assert service.abandoned.wait(5)


def test_text_ends_with_one_newline(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once", "--server", service.address]) == 0
    assert capsys.readouterr() == ("Héllo\n", "")
    assert not service.requests[0].HasField("max_new_tokens")


def test_json_is_one_object_and_nothing_else(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once", "--server", service.address, "--json"]) == 0
    out, err = capsys.readouterr()
    completion = json.loads(out)
    assert list(completion) == ["text", "token_ids", "prompt_tokens", "finish_reason", "stats"]
    assert completion["text"] == "Héllo"
    assert "Héllo" in out
    assert (out.count("\n"), err) == (1, "")


def test_every_option_reaches_the_server(service: FakeDraftService) -> None:
    options = "--max-new-tokens 7 --temperature 0.5 --top-k 3 --top-p 0.75 --seed 9 --stop a --stop b --ignore-eos"
    policy = "--policy linear --set depth=8 --set widths=1,1,3 --set root=single --timeout 30"
    new = "--min-p 0.25 --repetition-penalty 1.5 --logit-bias 5=-2 --logit-bias 6=0.5 --scheme independent"
    counted = "--frequency-penalty -0.5 --presence-penalty 1.25"
    ends = "--stop-token-id 4 --stop-token-id 8"
    words = " ".join((options, policy, new, counted, ends)).split()
    assert main(["generate", "Once", "--server", service.address, *words]) == 0
    (request,) = service.requests
    assert (request.text, request.max_new_tokens, list(request.stop)) == ("Once", 7, ["a", "b"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 9)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 1.25)
    assert dict(sampling.logit_bias) == {5: -2.0, 6: 0.5}
    assert sampling.scheme == tree_pb2.SAMPLING_SCHEME_INDEPENDENT
    assert list(request.stop_token_ids) == [4, 8]
    assert (request.n, request.log_probs, request.trace) == (1, False, False)
    assert request.ignore_eos
    assert (request.policy.name, dict(request.policy.settings)) == ("linear", {"depth": 8.0})
    assert list(request.policy.list_settings["widths"].values) == [1.0, 1.0, 3.0]
    assert dict(request.policy.word_settings) == {"root": "single"}


def test_several_completions_have_a_heading_each(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1), message("llo", 2), last(), message("Good", 3, index=1), last(index=1)]
    assert main(["generate", "Once", "--server", service.address, "--n", "2"]) == 0
    assert capsys.readouterr() == ("--- completion 0\nHéllo\n--- completion 1\nGood\n", "")
    assert service.requests[0].n == 2


def test_several_completions_are_one_json_object(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1), last(), message("Good", 3, index=1), last(index=1)]
    assert main(["generate", "Once", "--server", service.address, "--n", "2", "--json"]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert [completion["text"], *(each["text"] for each in completion["alternatives"])] == ["Hé", "Good"]


def test_json_has_log_probs_on_request(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1, 2, log_probs=[-0.5, -1.5]), last()]
    assert main(["generate", "Once", "--server", service.address, "--json", "--log-probs"]) == 0
    assert json.loads(capsys.readouterr().out)["log_probs"] == [-0.5, -1.5]
    assert service.requests[0].log_probs


def test_json_has_the_likeliest_tokens_and_the_prompts_on_request(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.script = [*scored(), last()]
    options = ["--json", "--top-log-probs", "2", "--prompt-log-probs"]
    assert main(["generate", "Once", "--server", service.address, *options]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert completion["top_log_probs"][0] == [[1, -0.5], [4, -1.0]]
    assert (completion["prompt_ids"], completion["prompt_log_probs"]) == ([7, 8, 9], [-0.25, -4.0])
    assert (service.requests[0].top_log_probs, service.requests[0].prompt_log_probs) == (2, True)


@pytest.mark.parametrize("option", [["--log-probs"], ["--top-log-probs", "2"], ["--prompt-log-probs"]])
def test_log_probs_need_json(service: FakeDraftService, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    assert main(["generate", "Once", "--server", service.address, *option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: dynatree generate")
    assert err.endswith(f"error: {option[0]} needs --json\n")
    assert not service.requests


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_a_trace_has_a_line_for_each_round(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str], tmp_path: Path, json_too: list[str]
) -> None:
    path = tmp_path / "träce.jsonl"
    service.script = [message("Hé", 1), traced(0), traced(1), last(), traced(0, index=1), last(index=1)]
    arguments = ["generate", "Once", "--server", service.address, "--n", "2", "--trace", str(path), *json_too]
    assert main(arguments) == 0
    assert service.requests[0].trace
    assert "trace" not in capsys.readouterr().out
    rounds = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(round_["index"], round_["round"]) for round_ in rounds] == [(0, 0), (0, 1), (1, 0)]
    assert all(list(round_) == ["index", *traced(0).trace.DESCRIPTOR.fields_by_name] for round_ in rounds)
    assert (rounds[0]["parents"], rounds[0]["texts"]) == ([-1, 0, -1], ["a", "é", "�"])
    assert rounds[0]["parameters"] == {"depth": 4.0, "threshold": 0.375}


def test_a_trace_is_written_as_it_arrives(service: FakeDraftService, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    service.script = [traced(0), message("Hé", 1), Hang()]
    with start("generate", "Once", "--server", service.address, "--trace", str(path)) as process:
        assert process.stdout
        assert process.stdout.read(2) == "Hé"
        assert json.loads(path.read_text(encoding="utf-8"))["round"] == 0
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10) == ("\n", "")
    assert process.returncode == 130


def test_a_trace_that_cannot_be_opened_sends_nothing(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "trace.jsonl"
    assert main(["generate", "Once", "--server", service.address, "--trace", str(path)]) == 1
    assert capsys.readouterr() == ("", f"dynatree: error: cannot write {path}: No such file or directory\n")
    assert not service.requests


def test_a_refused_request_keeps_what_the_trace_file_held(service: FakeDraftService, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("before\n")
    service.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT)]
    assert main(["generate", "", "--server", service.address, "--trace", str(path)]) == 1
    assert path.read_text() == "before\n"
    service.script = [message("Hé", 1), traced(0), last()]
    assert main(["generate", "Once", "--server", service.address, "--trace", str(path)]) == 0
    assert "before" not in path.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(service: FakeDraftService, options: list[str]) -> None:
    service.script = [message("Hé", 1), last()]
    command = [*COMMAND, "generate", "Once", "--server", service.address, *options]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert process.stderr == "dynatree: error: cannot write the output: No space left on device\n"
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_trace_that_cannot_be_written_is_one_line(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.script = [message("Hé", 1), traced(0), Hang()]
    assert main(["generate", "Once", "--server", service.address, "--trace", "/dev/full"]) == 1
    assert capsys.readouterr() == ("Hé\n", "dynatree: error: cannot write /dev/full: No space left on device\n")
    assert service.abandoned.wait(5)


def test_the_prompt_is_read_whole_from_standard_input(
    service: FakeDraftService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Öncé\nupon\n".encode()), encoding="ascii"))
    assert main(["generate", "-", "--server", service.address]) == 0
    assert service.requests[0].text == "Öncé\nupon\n"


def test_standard_input_must_be_utf8(
    service: FakeDraftService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert main(["generate", "-", "--server", service.address]) == 1
    assert capsys.readouterr().err == "dynatree: error: standard input is not UTF-8: invalid start byte at byte 2\n"


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_a_refused_request_is_one_line(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str], json_too: list[str]
) -> None:
    service.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT, "temperature must not be negative")]
    assert main(["generate", "Once", "--server", service.address, "--temperature", "-1", *json_too]) == 1
    error = "dynatree: error: invalid request: temperature must not be negative\n"
    assert capsys.readouterr() == ("", error)


def test_a_failure_in_the_middle_keeps_the_text(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1), Fail(grpc.StatusCode.INTERNAL, "request 42")]
    assert main(["generate", "Once", "--server", service.address]) == 1
    error = "dynatree: error: the server failed: request 42 (tokens received: 1) [INTERNAL]\n"
    assert capsys.readouterr() == ("Hé\n", error)


def test_a_failure_in_the_middle_keeps_the_text_in_json(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.script = [message("Hé", 1), Fail(grpc.StatusCode.INTERNAL, "request 42")]
    assert main(["generate", "Once", "--server", service.address, "--json"]) == 1
    partial = json.loads(capsys.readouterr().out)
    assert (partial["text"], len(partial["token_ids"]), partial["error"]["code"]) == ("Hé", 1, "INTERNAL")


def test_a_token_file_for_services(
    service: FakeDraftService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who\nalice:0123456789abcdef\n")
    assert main(["generate", "Once", "--server", service.address, "--token-file", str(file)]) == 1
    assert capsys.readouterr() == ("", f"dynatree: error: {file} must contain exactly one token and nothing else\n")


def test_nobody_at_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    assert main(["generate", "Once", "--server", address, "--timeout", "0.3"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dynatree: error: the server is unavailable")
    assert address in err


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once", "--server", "localhost"]) == 1
    assert (
        capsys.readouterr().err
        == "dynatree: error: 'localhost' is not an address; expected host:port, unix:PATH or dns:///name:port\n"
    )


def test_an_interrupt_with_json_prints_nothing(service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    with start("generate", "Once", "--server", service.address, "--json") as process:
        while not service.requests:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=10)
    assert (process.returncode, *output) == (130, "", "")
    assert service.abandoned.wait(5)


def test_a_reader_that_goes_away_is_no_traceback(service: FakeDraftService) -> None:
    service.script = [message("x" * 100_000, 1) for _ in range(20)]
    with start("generate", "Once", "--server", service.address) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


# Modules that take time to import


SLOW = {"torch", "transformers", "numpy"}
# Run each command line in its own fork of a process that has imported only the command.
ANSWERS = """
import json, os, sys
from dynatree.cli.main import main

answers = []
for line in json.load(sys.stdin):
    read, write = os.pipe()
    if os.fork() == 0:
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        status = main(line)
        with open(write, "w") as answer:
            json.dump([status, list(sys.modules)], answer)
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        answers.append(json.load(answer))
    os.wait()
print(json.dumps(answers))
"""
PAIR = ["--target-model", "embedded", "--draft-model", "embedded"]
DRAFT = ["draft", "--draft-model", "embedded", "--verify", "localhost:1"]
VERIFY = ["verify", "--target-model", "embedded"]
LOAD = ["bench", "load", "--prompts", "book.txt"]
COMPARE = ["bench", "compare", "--prompts", "book.txt"]
HELP = [
    ["--help"],
    *([name, "--help"] for name in COMMANDS),
    *(["bench", name, "--help"] for name in (*MEASUREMENTS, "costs", "show", "report")),
]
WRONG = [
    ["--nope"],
    *([name, "--nope"] for name in COMMANDS),
    *(["bench", name, "--nope"] for name in (*MEASUREMENTS, "costs", "show", "report")),
    [*VERIFY, "--nope"],
    [*VERIFY, "--dtype", "x"],
    [*VERIFY, "--threads", "0"],
    [*VERIFY, "--threads", "100000"],
    [*VERIFY, "--grace", "long"],
    [*VERIFY, "--idle-timeout", "0"],
    [*VERIFY, "--max-context", "1"],
    [*VERIFY, "--listen", "localhost"],
    [*VERIFY, "--max-tree-nodes", "many"],
    [*VERIFY, "--fixed-rows", "many"],
    [*VERIFY, "--resident-layers", "few"],
    [*VERIFY, "--layer-cache", ""],
    [*DRAFT, "--dtype", "x"],
    [*DRAFT, "--verify", "http://localhost:50052"],
    [*DRAFT, "--policy", "nope"],
    [*DRAFT, "--set", "depth=8x"],
    [*DRAFT, "--set", "depth=8", "--set", "depth=4"],
    [*DRAFT, "--draft-ahead", "maybe"],
    [*DRAFT, "--verify-timeout", "nan"],
    ["audit", *PAIR, "--dtype", "x"],
    ["audit", *PAIR, "--max-new-tokens", "0"],
    ["demo", "--max-new-tokens", "1"],
    ["demo", "--set", "depth=8x"],
    ["generate", "Once", "--scheme", "nope"],
    ["trace", "rounds.jsonl"],
    [*COMPARE, "--dtype", "x"],
    [*COMPARE, "--policy", "linear:depth=8x"],
    [*COMPARE, "--scheme", "nope"],
    [*COMPARE, "--server", "localhost:1", "--threads", "2"],
    ["bench", "costs", "--repetitions", "0"],
    LOAD,
    [*LOAD, "--clients", "1,none"],
    [*LOAD, "--clients", "1,1"],
    [*LOAD, "--rate", "0"],
    [*LOAD, "--rate", "2", "--rounds", "3"],
    [*LOAD, "--clients", "2", "--requests", "3"],
    [*LOAD, "--rate", "2", "--baseline", "transformers"],
    [*LOAD, "--clients", "2", "--baseline", "transformers", "--temperature", "0.7"],
    [*LOAD, "--clients", "2", "--server", "localhost:1", "--max-sessions", "2"],
]
REFUSED = [
    [*DRAFT, "--policy", "linear", "--set", "depth=99"],
    [*DRAFT, "--policy", "linear", "--set", "dept=8"],
    [*DRAFT, "--policy", "linear", "--set", "depth=deep"],
    [*DRAFT, "--policy", "fixed", "--set", "root=double"],
    ["audit", *PAIR, "--prompts", "/no/such/file"],
    ["generate", "Once", "--server", "localhost"],
    [*COMPARE, "--policy", "nope"],
    [*COMPARE, "--policy", "linear:depth=99"],
    [*LOAD, "--clients", "2", "--policy", "linear:depth=99"],
    ["trace", "/no/such/file", "--html", "page.html"],
]
STATUSES = [*((line, 0) for line in HELP), *((line, 2) for line in WRONG), *((line, 1) for line in REFUSED)]


@pytest.fixture(scope="module")
def answers() -> list[tuple[int, list[str]]]:
    """The exit status of each command line of `STATUSES`, and the modules that it has imported."""
    lines = json.dumps([line for line, _ in STATUSES])
    command = [sys.executable, "-c", ANSWERS]
    output = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
    return [(status, modules) for status, modules in json.loads(output)]


@pytest.mark.parametrize("number", range(len(STATUSES)), ids=[" ".join(line) for line, _ in STATUSES])
def test_help_and_mistakes_are_answered_without_torch(answers: list[tuple[int, list[str]]], number: int) -> None:
    status, modules = answers[number]
    assert status == STATUSES[number][1]
    assert SLOW.isdisjoint(modules)


def test_generate_needs_no_package_of_the_services(answers: list[tuple[int, list[str]]]) -> None:
    for (line, _), (_, modules) in zip(STATUSES, answers, strict=True):
        if line[:1] == ["generate"]:
            assert "dynatree.cli.generate" in modules
            assert "dynatree.common" not in modules


def test_help_needs_no_grpc_but_where_it_lists_the_policies(answers: list[tuple[int, list[str]]]) -> None:
    for (line, status), (_, modules) in zip(STATUSES, answers, strict=True):
        assert status or line[0] == "draft" or "grpc" not in modules


@pytest.mark.parametrize("option", ["--max-tree-nodes", "--fixed-rows", "--max-context", "--max-sessions"])
def test_a_value_of_another_kind_is_told_in_words(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main([*VERIFY, option, "many"]) == 2
    assert re.search(r"invalid whole numbers? value: 'many'", capsys.readouterr().err)


def test_choices_are_what_the_services_take() -> None:
    assert get_args(SamplingScheme) == SCHEMES == methods.SCHEMES


# The command line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nope"],
        ["serve"],
        ["generate"],
        ["generate", "Once", "--nope"],
        ["generate", "Once", "--max-new", "3"],
        ["generate", "Once", "twice"],
        ["generate", "Once", "--top-k", "many"],
        ["generate", "Once", "--n", "many"],
        ["generate", "Once", "--stop-token-id", "END"],
        ["generate", "Once", "--scheme", "none"],
        ["generate", "Once", "--logit-bias", "5"],
        ["generate", "Once", "--logit-bias", "a=1"],
        ["generate", "Once", "--logit-bias", "5=much"],
        ["generate", "Once", "--set", "depth"],
        ["generate", "Once", "--set", "=8"],
        ["generate", "Once", "--set", "depth=8x"],
        ["generate", "Once", "--set", "root=Single"],
        ["generate", "Once", "--set", "widths=1,"],
        ["generate", "Once", "--set", "widths=1,x"],
        ["generate", "Once", "--set", "depth=8", "--set", "depth=8"],
        ["generate", "Once", "--logit-bias", "5=1", "--logit-bias", "5=2"],
        ["generate", "Once", "--timeout", "0"],
        ["generate", "Once", "--timeout", "soon"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: dynatree")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["vefify"], "there is no command 'vefify'; did you mean verify?"),
        (["quux"], "there is no command 'quux'; dynatree --help lists them"),
        (["verify", "--target-model", "x", "--max-sesions", "3"], "--max-sesions 3; did you mean --max-sessions?"),
        (["serve", *PAIR, "--model", "x"], "unrecognized arguments: --model x; did you mean --target-model?"),
        (["generate", "Once", "--max-tokens", "3"], "did you mean --max-new-tokens?"),
        (["bench", "compare", "--prompts", "x", "--polisy", "linear"], "did you mean --policy?"),
        (["gateway", "--quux"], "unrecognized arguments: --quux\n"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_what_may_have_been_meant_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str) -> None:
    assert main(arguments) == 2
    assert hint in capsys.readouterr().err


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Return a function that parses a command line with variables in the environment."""

    def parse(*arguments: str, **variables: str) -> argparse.Namespace:
        seen = []
        module = importlib.import_module(COMMANDS[arguments[0]][1])
        monkeypatch.setattr(module, "run", lambda options: seen.append(options) or 0)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(arguments) == 0
        return seen[0]

    return parse


def service_lines() -> Iterator[tuple[list[str], argparse.Action]]:
    """Yield every option of every service that a variable can set, with a command line of the service."""
    for line in (VERIFY, DRAFT, ["gateway"], ["serve", *PAIR]):
        parser = Parser()
        importlib.import_module(COMMANDS[line[0]][1]).add_arguments(parser)
        for action in parser._actions:
            if action.option_strings and action.dest not in ("help", "target_model", "draft_model", "verify"):
                yield line, action


VALUES = {"--max-context": "7", "--listen": "localhost:7", "--host": "::1", "--set": "depth=7 widths=1,2"}
VALUES |= {"--metrics": "localhost:7", "--grpc": "localhost:7", "--server": "localhost:7", "--device": "cuda:7"}


@pytest.mark.parametrize(
    ("line", "action"), list(service_lines()), ids=lambda value: value[0] if isinstance(value, list) else value.dest
)
def test_every_option_of_a_service_can_be_a_variable(
    parsed: Callable[..., argparse.Namespace], line: list[str], action: argparse.Action
) -> None:
    """The variable has the effect of the option, and the command line takes precedence."""
    option = action.option_strings[0]
    variable = "DYNATREE_" + option[2:].upper().replace("-", "_")
    value = list(action.choices)[-1] if action.choices else VALUES.get(option, "a b" if action.nargs == "+" else "1")
    if option == "--draft-device":
        value = "cuda:7"
    words = [option] if action.nargs == 0 else [option, value]
    if action.nargs == "+":
        words = [option, *value.split()]
    elif isinstance(action.default, (list, dict)):
        words = [word for each in value.split() for word in (option, each)]
    by_line = vars(parsed(*line, *words))
    by_variable = vars(parsed(*line, **{variable: value}))
    assert by_variable == by_line
    assert (
        by_variable != vars(parsed(*line, **{variable: ""})) or getattr(action, "default", None) == by_line[action.dest]
    )
    wrong = {variable: "\u2028nonsense"} if action.nargs != 0 else {variable: "1"}
    assert vars(parsed(*line, *words, **wrong)) == by_line


def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DYNATREE_QUEUE", "many")
    assert main(VERIFY) == 2
    assert "argument --queue: invalid whole number value: 'many' (set by the environment variable DYNATREE_QUEUE)" in (
        capsys.readouterr().err
    )


def test_what_kubernetes_says_of_a_service_is_no_port(parsed: Callable[..., argparse.Namespace]) -> None:
    assert parsed(*VERIFY, DYNATREE_PORT="tcp://10.0.0.1:8000").listen == "localhost:50052"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--port", "7"], "localhost:7"),
        (["--host", "0.0.0.0"], "0.0.0.0:50052"),
        (["--port", "7", "--host", "::1"], "[::1]:7"),
        (["--listen", "unix:x"], "unix:x"),
    ],
)
def test_host_and_port_are_parts_of_listen(
    parsed: Callable[..., argparse.Namespace], words: list[str], address: str
) -> None:
    assert parsed(*VERIFY, *words).listen == address


def test_serve_passes_on_what_the_services_take(parsed: Callable[..., argparse.Namespace]) -> None:
    """Every option of `verify` and `draft` is an option of `serve`, except those for addresses and authentication."""
    own = {"listen", "verify", "client_ca", "reflection", "target_model", "draft_model", "tls_cert", "tls_key"}
    names = {action.dest for line, action in service_lines() if line[0] in ("verify", "draft")}
    assert {name for name in names if not name.startswith("verify_")} - own <= set(vars(parsed("serve", *PAIR)))
    options = parsed(
        *(
            "serve",
            *PAIR,
            "--resident-layers",
            "all",
            "--fixed-rows",
            "off",
            "--set",
            "depth=3",
            "--set",
            "root=single",
            "--metrics",
            "h:7",
        ),
        *("--kv-tokens", "99", "--prefix-cache", "off", "--threads", "1", "--insecure"),
    )
    verify, draft = serve_settings(options)
    for each in (verify, draft):
        model = each.model
        assert (model.fixed_rows, model.kv_tokens, model.threads, each.limits.prefix_cache) == ((), 99, 1, False)
        each.operation.security.check_plain(each.operation.metrics)
    assert (verify.model.resident_layers, verify.operation.metrics) == (ALL_LAYERS, "h:8")
    assert (draft.policy.settings, draft.operation.metrics) == ({"depth": 3.0, "root": "single"}, "h:7")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_an_example_that_is_a_command_line(name: str, parsed: Callable[..., argparse.Namespace]) -> None:
    words = shlex.split(importlib.import_module(COMMANDS[name][1]).EXAMPLE)
    assert words[:2] == ["dynatree", name]
    assert parsed(*words[1:])


@pytest.mark.parametrize(("line", "known"), [("dynatree verify --ma", "--max-sessions"), ("dynatree ver", "--version")])
def test_a_shell_gets_the_options_of_the_command_that_it_completes(
    monkeypatch: pytest.MonkeyPatch, line: str, known: str
) -> None:
    """Argcomplete, which is not installed here, reads the parser and ends the process."""

    def autocomplete(parser: argparse.ArgumentParser) -> None:
        options = {option for each in with_commands(parser) for option in each._option_string_actions}
        raise SystemExit(7 if known in options and ("--max-sessions" in options) == ("verify" in line) else 1)

    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=autocomplete))
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", line)
    assert main([]) == 7


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dynatree 0")


def test_only_the_chosen_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(COMMANDS) - {"demo"}:
        monkeypatch.setitem(COMMANDS, name, ("not there", "no_such_module"))
    with_command(monkeypatch, lambda options: 7)
    assert main(["demo"]) == 7


@pytest.mark.parametrize("late", [False, True], ids=["on import", "in run"])
def test_missing_packages_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    def run(options: object) -> int:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    with_command(monkeypatch, run)
    if not late:
        monkeypatch.setitem(COMMANDS, "demo", ("a stand-in", "torch_that_is_missing"))
    assert main(["demo"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dynatree: error: dynatree demo needs the serving packages (no module ")
    assert err.count("\n") == 1


def test_a_missing_module_of_this_package_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "demo", ("a stand-in", "dynatree.no_such_room"))
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


def test_an_expected_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: object) -> int:
        raise SystemExit("port 50051 is in use")

    with_command(monkeypatch, run)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "dynatree: error: port 50051 is in use\n"


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: object) -> int:
        raise KeyboardInterrupt

    with_command(monkeypatch, run)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_long_import_that_fails_leaves_garbage_collection_on() -> None:
    def import_it() -> None:
        with without_collection():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        import_it()
    assert gc.isenabled()
