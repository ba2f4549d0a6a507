"""Tests the table of limits in docs/guides/security.md against the code, in both directions."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from dynatree.common import limits
from tests.support.paths import ROOT

GUIDE = ROOT / "docs" / "guides" / "security.md"
# The packages that receive data from strangers. Limits of the engine and of benchmarks bound their own work.
PACKAGES = (
    ROOT / "common" / "dynatree" / "common",
    ROOT / "common" / "dynatree" / "serving",
    ROOT / "draft_service" / "dynatree" / "draft",
    ROOT / "verify_service" / "dynatree" / "verify",
    ROOT / "client" / "dynatree" / "gateway",
)
COMMANDS = ("draft", "verify", "gateway", "serve")
UNITS = {"": 1, "s": 1, "h": 3600, "KiB": 2**10, "MiB": 2**20}
NO_LIMITS = {"ALL_LAYERS"}  # in limits.py, but it stands for "all"


class Row(NamedTuple):
    """A row of the table."""

    where: str
    what: str
    limit: str
    set_by: str
    beyond: str

    @property
    def names(self) -> list[str]:
        """The constants and options that set the limit."""
        return re.findall(r"`([^`]+)`", self.set_by)

    @property
    def figure(self) -> float | None:
        """The limit, in seconds or bytes if it has a unit; None means no limit."""
        if self.limit == "none":
            return None
        number, _, unit = self.limit.partition(" ")
        return float(number.replace(",", "")) * UNITS[unit]


def table() -> list[Row]:
    section = GUIDE.read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines[2:]]


def constants() -> dict[str, set[float]]:
    """Return the values of every number named in capitals, by name, since modules may share a name."""
    found: dict[str, set[float]] = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            for name in _assigned(ast.parse(path.read_text())):
                value = getattr(importlib.import_module(_module(path, package)), name)
                if isinstance(value, (int, float)):
                    found.setdefault(name, set()).add(float(value))
    return found


def _assigned(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (each.id for each in names if isinstance(each, ast.Name) and re.fullmatch(r"[A-Z_]+", each.id))


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def options() -> dict[str, tuple[set[Any], str]]:
    """Return the default of every option of the services, and its metavar."""
    found: dict[str, tuple[set[Any], str]] = {}
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"dynatree.cli.{command}").add_arguments(parser)
        for action in parser._actions:
            for name in action.option_strings:
                found.setdefault(name, (set(), str(action.metavar)))[0].add(
                    action.default if isinstance(action.default, (int, float)) else None
                )
    return found


CONSTANTS, OPTIONS = constants(), options()


@pytest.mark.parametrize("row", table(), ids=lambda row: row.set_by)
def test_a_row_has_the_figure_of_the_code(row: Row) -> None:
    assert row.names
    for name in row.names:
        values = OPTIONS[name][0] if name.startswith("--") else CONSTANTS[name]
        assert values == {row.figure}, name
    assert row.where or row.what
    codes = {code.name for code in grpc.StatusCode}
    assert {word for word in re.findall(r"\b[A-Z_]{4,}\b", row.beyond) if word != "HTTP"} <= codes


def is_limit(name: str, metavar: str = "") -> bool:
    """Whether a name is that of a limit on data, connections or time of others."""
    if name.startswith("--"):
        bounds = re.match(r"--(max-|principal-|queue$|kv-tokens$)", name)
        return metavar == "SECONDS" or bounds is not None
    return re.match("(MAX|MOST|LONGEST)_", name) is not None or (hasattr(limits, name) and name not in NO_LIMITS)


def test_every_limit_has_a_row() -> None:
    there = {name for name in CONSTANTS if is_limit(name)}
    there |= {name for name, (_, metavar) in OPTIONS.items() if is_limit(name, metavar)}
    assert len(there) > 50
    assert there <= {name for row in table() for name in row.names}


def test_no_limit_has_two_rows() -> None:
    names = [name for row in table() for name in row.names]
    assert len(names) == len(set(names))
