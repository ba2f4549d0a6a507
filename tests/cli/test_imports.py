"""Help and mistakes are answered at once: the modules that each command line imports."""

import json
import subprocess
import sys

import pytest

from dynatree.bench.arguments import MEASUREMENTS
from dynatree.cli.main import COMMANDS

SLOW = {"torch", "transformers", "numpy"}
# Run each command line in its own fork of a process that has imported only the subcommand, as `main` does first.
ANSWERS = """
import json, os, sys
from importlib import import_module
from itertools import groupby
from dynatree.cli.main import COMMANDS, main

def forked(work, *arguments):
    read, write = os.pipe()
    if os.fork() == 0:
        with open(write, "w") as answer:
            json.dump(work(*arguments), answer)
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        found = json.load(answer)
    os.wait()
    return found

def answers_of(name, lines):
    if name in COMMANDS:
        import_module(COMMANDS[name][1])
    return [forked(answer_of, line) for line in lines]

def answer_of(line):
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return [main(line), list(sys.modules)]

groups = groupby(json.load(sys.stdin), key=lambda line: line[0])
print(json.dumps([answer for name, lines in groups for answer in forked(answers_of, name, list(lines))]))
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
    [*DRAFT, "--history-tokens", "-1"],
    [*DRAFT, "--history-tokens", "1000000001"],
    [*DRAFT, "--set", "depth=8x"],
    [*DRAFT, "--set", "depth=8", "--set", "depth=4"],
    [*DRAFT, "--draft-ahead", "maybe"],
    [*DRAFT, "--verify-timeout", "nan"],
    [*DRAFT, "--record-principals", "anna,,ben"],
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
    [*DRAFT, "--record-prompts"],
    [*DRAFT, "--record", "/dev/null/texts"],
    ["audit", *PAIR, "--prompts", "/no/such/file"],
    ["generate", "Once", "--server", "localhost"],
    [*COMPARE, "--policy", "nope"],
    [*COMPARE, "--policy", "linear:depth=99"],
    [*LOAD, "--clients", "2", "--policy", "linear:depth=99"],
    ["trace", "/no/such/file", "--html", "page.html"],
]
STATUSES = sorted(
    [*((line, 0) for line in HELP), *((line, 2) for line in WRONG), *((line, 1) for line in REFUSED)],
    key=lambda each: each[0][0],  # by subcommand
)


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
