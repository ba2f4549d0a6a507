"""The `dynatree` command: its subcommands, its exit statuses, and its errors in one line."""

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynatree.cli.imports import without_collection
from dynatree.cli.main import COMMANDS, main
from dynatree.cli.parser import with_commands


def with_command(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Make `dynatree demo` call `run`."""
    monkeypatch.setitem(COMMANDS, "demo", ("a stand-in", "stand_in"))
    monkeypatch.setitem(
        sys.modules, "stand_in", SimpleNamespace(EXAMPLE="", add_arguments=lambda parser: None, run=run)
    )


@pytest.mark.parametrize(("line", "known"), [("dynatree verify --ma", "--max-sessions"), ("dynatree ver", "--version")])
def test_a_shell_gets_the_options_of_the_command_that_it_completes(
    monkeypatch: pytest.MonkeyPatch, line: str, known: str
) -> None:
    """A stand-in for argcomplete, which is not installed here, reads the parser and ends the process."""

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


def test_an_interrupt_of_source_that_is_executed_is_status_130(tmp_path: Path) -> None:
    """`python -m` itself would end by SIGINT; dataclasses and named tuples execute source while they are imported."""
    work = "lambda: exec('raise KeyboardInterrupt')"
    code = f"import sys; from dynatree.cli.main import finished; sys.exit(finished(None, {work}))"
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_long_import_that_fails_leaves_garbage_collection_on() -> None:
    def import_it() -> None:
        with without_collection():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        import_it()
    assert gc.isenabled()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become a user who may not enter a folder")
def test_a_model_in_a_folder_that_one_may_not_enter_is_refused_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "closed" / "model"
    model.mkdir(parents=True)
    model.parent.chmod(0o700)
    code = """
import os, sys
from dynatree.cli.main import main
main(["verify", "--target-model", "/missing"])  # imports all that the user cannot read
os.setuid(65534)
sys.exit(main(["verify", "--target-model", sys.argv[1]]))
"""
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [f"dynatree: error: {model}: Permission denied"]
