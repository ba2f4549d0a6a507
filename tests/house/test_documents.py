"""Tests that every command, option, file and extra in README and docs exists."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest

from dynatree.cli.main import COMMANDS
from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.policies import create_policy
from tests.support.benchmark_modules import module
from tests.support.paths import ROOT

documents = module("try_commands", ROOT / "docs")
PAGES = [documents.read(page) for page in documents.pages()]

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILE = re.compile(r"(?:(?:benchmarks|deploy|docs|examples|tests)/|(?:docker-compose|constraints)[\w.]*$)")
OPTION = re.compile(r"--[a-z][a-z-]*")
OTHERS = {"--version", "--model"}  # options of `dynatree` itself and of lm_eval


@cache
def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one subcommand, as `dynatree` makes it."""
    made = argparse.ArgumentParser(prog=f"dynatree {name}", allow_abbrev=False, exit_on_error=False)
    importlib.import_module(COMMANDS[name][1]).add_arguments(made)
    return made


def below(parsed: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a command's own subcommands by name."""
    actions = (action for action in parsed._actions if isinstance(action, argparse._SubParsersAction))
    return next((dict(action.choices) for action in actions), {})


def every_option() -> set[str]:
    """Return the options of all subcommands."""
    parsers = [parser(name) for name in COMMANDS]
    parsers += [each for made in parsers for each in below(made).values()]
    return {option for made in parsers for option in made._option_string_actions}


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """Yield place and words of each command in the shell blocks."""
    for page in PAGES:
        for snippet in page.shell:
            yield from ((snippet.place, words) for words in snippet.commands() if words[0] == program)


def sentences(*beginnings: str) -> Iterator[tuple[str, list[str]]]:
    """Yield place and words of code in sentences that begins so; it may omit arguments."""
    for page in PAGES:
        for snippet in page.inline:
            if snippet.text.startswith(beginnings):
                yield snippet.place, snippet.text.split()


def check(kind: Callable[[list[str]], str | None], found: Sequence[tuple[str, list[str]]], at_least: int) -> None:
    """Fail with all faults at once."""
    assert len(found) >= at_least
    assert [f"{place}\n    {fault}" for place, words in found if (fault := kind(words))] == []


def test_what_a_page_shows_as_code() -> None:
    text = (
        "Say `dynatree\n draft`:\n\n```sh\n"
        "A=1 dynatree x 'y z' \\\n  --b < in  # c\nfor a in b c; do\n  d $a\ndone\n```\n"
        "\n    make a | b\n\n```python\nimport a\n\nb()\n```\n```text\n    make b\n```\n"
    )
    page = documents.read(ROOT / "README.md", text)
    assert [list(snippet.commands()) for snippet in page.shell] == [
        [["dynatree", "x", "y z", "--b"]],
        [["for", "a", "in", "b", "c"], ["do"], ["d", "$a"], ["done"]],
        [["make", "a"], ["b"]],
    ]
    assert [snippet.line for snippet in page.shell] == [5, 7, 12]
    assert [(snippet.line, snippet.text) for snippet in page.python] == [(15, "import a\n\nb()")]
    assert [snippet.text for snippet in page.inline] == ["dynatree  draft"]


def wrong_command(words: list[str]) -> str | None:
    """Return the error of the command line's own parser, or of the policy about its settings."""
    if words[1:] == ["--version"]:
        return None
    if words[1] not in COMMANDS:
        return "no such subcommand"
    try:
        options = parser(words[1]).parse_args(words[2:])
        if isinstance(policy := getattr(options, "policy", None), str) and words[1] != "bench":
            create_policy(policy, options.policy_settings)
    except (argparse.ArgumentError, InvalidArgumentError, SystemExit) as error:
        return str(error)
    return None


def test_every_dynatree_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    check(wrong_command, list(commands("dynatree")), 40)


def wrong_options(words: list[str]) -> str | None:
    """Return the options in inline code that its command, or every command, lacks; the code may omit arguments."""
    known = every_option()
    if words[0] == "dynatree" and len(words) > 1 and words[1] in COMMANDS:
        made = parser(words[1])
        made = below(made).get(words[2], made) if len(words) > 2 else made
        known = set(made._option_string_actions)
    unknown = {word for word in words if OPTION.fullmatch(word)} - known - OTHERS
    return f"not among its options: {sorted(unknown)}" if unknown else None


def test_every_option_in_a_sentence_is_one() -> None:
    check(wrong_options, list(sentences("dynatree ", "--")), 100)


def wrong_target(words: list[str]) -> str | None:
    """Return targets and variables that the Makefile lacks."""
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
    variables = re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE)
    unknown = [word for word in words[1:] if word.partition("=")[0] not in (*targets, *variables)]
    return f"not in the Makefile: {unknown}" if unknown else None


def test_every_make_target_is_one() -> None:
    check(wrong_target, [*commands("make"), *sentences("make ")], 20)


def wrong_script(words: list[str]) -> str | None:
    """Return a script or module that does not exist, or lacks an option."""
    if words[1] == "-c" or words[1:3] == ["-m", "venv"]:
        return None
    if words[1] == "-m":
        relative = words[2].replace(".", "/")
        ends = (".py", "/__main__.py")
        paths = [path for end in ends for start in ("", "*/") for path in ROOT.glob(f"{start}{relative}{end}")]
    else:
        paths = [ROOT / words[1]]
    if not paths or not paths[0].is_file():
        return "no such script"
    unknown = [word for word in words if OPTION.fullmatch(word) and f'"{word}"' not in paths[0].read_text()]
    return f"not among its options: {unknown}" if unknown else None


def test_every_script_is_one() -> None:
    check(wrong_script, [*commands("python"), *sentences("python ")], 10)


def wrong_extra(words: list[str]) -> str | None:
    """Return the mistake of an installation: an extra that the project lacks, or an index, which has no release."""
    extras = {extra for word in words for found in re.findall(r"\[([\w,]+)\]$", word) for extra in found.split(",")}
    if unknown := extras - set(PROJECT["project"]["optional-dependencies"]):
        return f"no such extra: {unknown}"
    return "there is no release" if any(word.startswith("dynatree") for word in words) else None


def test_every_installation_is_possible() -> None:
    check(wrong_extra, [*commands("pip"), *sentences("pip install")], 5)


def test_every_file_that_a_command_reads_is_there() -> None:
    found = [(snippet.place, list(snippet.commands())) for page in PAGES for snippet in page.shell]
    named = [(place, [word]) for place, lines in found for words in lines for word in words if FILE.match(word)]
    check(lambda words: None if any(ROOT.glob(words[0])) else "no such file", named, 10)


def test_drawings_name_a_colour_before_each_variable() -> None:
    """Programs without CSS variables, such as rsvg, would draw black otherwise."""
    found = 0
    for picture in (ROOT / "docs").rglob("*.svg"):
        declarations = re.findall(r"([\w-]+): ([^;{}]+)", picture.read_text())
        for (name, value), (then, variable) in pairwise(declarations):
            if variable.startswith("var("):
                found += 1
                assert (name, value[0]) == (then, "#"), f"{picture}: {then}: {variable}"
    assert found >= 8


def test_what_the_trial_leaves_out_or_replaces_is_there() -> None:
    """A pattern that matches no command any more must be removed."""
    shown = [snippet.text for page in PAGES for snippet in page.shell]
    patterns = [*documents.LEFT_OUT, *documents.STAND_INS]
    assert [pattern for pattern in patterns if not any(re.search(pattern, text) for text in shown)] == []


@pytest.mark.early
@pytest.mark.long
def test_the_commands_of_the_quickstart_run() -> None:
    command = [sys.executable, str(ROOT / "docs/try_commands.py"), str(ROOT / "docs/quickstart.md")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("    ok in ") >= 8


def test_every_block_of_python_compiles() -> None:
    blocks = [snippet for page in PAGES for snippet in page.python]
    assert len(blocks) >= 10
    for block in blocks:
        compile(block.text, block.place, "exec")
