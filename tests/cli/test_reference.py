"""Tests that the tables of docs/ match the code: names, defaults and kinds. Each test compares a whole table."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynatree.cli.main import COMMANDS
from dynatree.client import Statistics
from dynatree.common.errors import EX_SOFTWARE
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.metrics import DraftMetrics
from dynatree.draft.policies import registry
from dynatree.gateway.metrics import GatewayMetrics
from dynatree.gateway.requests import ChatRequest, CompletionRequest
from dynatree.verify.metrics import VerifyMetrics
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
CODE = re.compile(r"`([^`]+)`")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def tables(name: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the head and the rows of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n)+", page(name), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in block.splitlines()]
        yield head, rows


def rows_of(name: str, *head: str) -> list[list[str]]:
    """Return the rows of all tables of a page whose head begins with these cells."""
    found = [rows for shown, rows in tables(name) if shown[: len(head)] == list(head)]
    assert found, f"{name} has no table that begins with {head}"
    return [row for rows in found for row in rows]


def codes(cell: str) -> list[str]:
    return CODE.findall(cell)


def number(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def value_of(default: Any) -> Any:
    """Parse a default, in the code or on a page: numbers as floats, words unchanged."""
    if isinstance(default, tuple):
        return tuple(map(float, default))
    if isinstance(default, str):
        return number(default) if re.fullmatch(r"[\d./]+", default) else str(default)
    return float(default)


def documented_settings(cell: str) -> dict[str, Any]:
    """Parse settings and defaults as the page writes them: `a` 1, `b` (1, 2), `c` word; switches `d`, `e`, both 0."""
    found: dict[str, Any] = {}
    for names, value in re.findall(r"((?:`\w+`(?:, | and )?)+),? (?:all |both )?(\([\d., ]+\)|[\d./]+|[a-z]+)", cell):
        values = tuple(map(float, value.strip("()").split(","))) if value.startswith("(") else value_of(value)
        found |= dict.fromkeys(codes(names), values)
    return found


def test_settings_of_policies_and_their_defaults() -> None:
    rows = rows_of("reference/policies.md", "policy", "tree")
    shown = {codes(row[0])[0]: documented_settings(row[2]) for row in rows}
    have = {
        name: {each.name: value_of(each.default) for each in fields(entry.settings)}
        for name, entry in registry._REGISTRY.items()
    }
    assert shown == have


def test_every_default_of_a_policy_has_a_source() -> None:
    shown: dict[tuple[str, str], Any] = {}
    for policies, settings, source in rows_of("reference/provenance.md", "policy", "settings (defaults)"):
        found = {
            (policy, name): value for policy in codes(policies) for name, value in documented_settings(settings).items()
        }
        assert found
        assert source
        assert not found.keys() & shown.keys(), "one line for each default"
        shown |= found
    assert shown == {
        (policy, each.name): value_of(each.default)
        for policy, entry in registry._REGISTRY.items()
        for each in fields(entry.settings)
    }


def test_every_constant_of_the_controller_has_its_source() -> None:
    shown = {
        name: (value, source)
        for constants, source in rows_of("reference/provenance.md", "constants", "from")
        for name, value in documented_settings(constants).items()
    }
    have = {each.name: (value_of(each.default), each.metadata["source"]) for each in fields(ControlSettings)}
    assert shown == have


def registered(made: type[Any], *arguments: object) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return kind and labels of a service's metrics by their Prometheus names."""
    collected = CollectorRegistry()
    made(collected, *arguments)
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for collector in set(collected._collector_to_names):
        for family in collector.collect():
            end = "_total" if family.type == "counter" else ""
            found[family.name + end] = (family.type, tuple(getattr(collector, "_labelnames", ())))
    return found


@pytest.mark.parametrize(
    ("title", "made", "arguments"),
    [
        ("Of the draft service:", DraftMetrics, 3),
        ("Of the verify service:", VerifyMetrics, 1),
        ("Of the gateway:", GatewayMetrics, 0),
    ],
)
def test_metrics(title: str, made: type[Any], arguments: int) -> None:
    idle = SimpleNamespace(running=0, waiting=0, usage=0.0, all=[], tokens=0, hits=0)
    _, rows = next(tables_behind("guides/operate.md", title))
    shown = {codes(row[0])[0]: (row[1], tuple(codes(row[2]))) for row in rows}
    assert shown == registered(made, *[idle] * arguments)


def tables_behind(name: str, title: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Return the tables of a page after a given line."""
    before = page(name).partition(f"{title}\n")[0]
    passed = len(re.findall(r"(?:^\|.*\n)+", before, re.MULTILINE))
    yield from list(tables(name))[passed:]


def test_statistics() -> None:
    shown = [name for row in rows_of("reference/statistics.md", "name", "definition") for name in codes(row[0])]
    assert sorted(shown) == sorted(each.name for each in fields(Statistics))


def test_spans() -> None:
    shown = {codes(row[0])[0] for row in rows_of("guides/operate.md", "span", "service")}
    folders = ("client/dynatree/client", "draft_service", "verify_service")
    sources = "".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    assert shown == set(re.findall(r'\.(?:span|child|start_span)\(\s*"([^"]+)"', sources))


def test_alerts() -> None:
    rules = (ROOT / "deploy/prometheus/alerts.yaml").read_text()
    shown = [codes(row[0])[0] for row in rows_of("guides/operate.md", "alert")]
    assert shown == re.findall(r"- alert: (\w+)", rules)


def test_routes_of_the_gateway() -> None:
    shown = {code.split()[-1] for row in rows_of("guides/http.md", "route") for code in codes(row[0])}
    have = re.findall(r'\bRoute\("([^"]+)"', (ROOT / "client/dynatree/gateway/app.py").read_text())
    assert shown == {route.replace("{model:path}", "NAME") for route in have}


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest])
def test_every_field_of_a_body_is_told(body: type[Any]) -> None:
    prose = re.sub(r"(?ms)^```.*?^```", "", page("guides/http.md"))
    told = {word for code in codes(prose) for word in re.split(r"[.\s:]", code)}
    assert set(body.model_fields) - told == set()


def test_variables_of_compose() -> None:
    files = [path.read_text() for path in (ROOT / "docker-compose.yml", ROOT / "docker-compose.gpu.yml")]
    have = {name for text in files for name in re.findall(r"\$\{(\w+)", text)} | {"HF_TOKEN"}  # passed unchanged
    assert {name for row in rows_of("guides/deploy.md", "variable") for name in codes(row[0])} == have


def test_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = {codes(row[0])[0].strip("[]") for row in rows_of("quickstart.md", "extra") if row[0].startswith("`[")}
    assert shown == set(project["optional-dependencies"])


def test_exit_statuses() -> None:
    text = (DOCS / "generate.py").read_text()
    main = importlib.import_module("dynatree.cli.main")
    shown = {int(status) for status in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert shown == {0, 1, 2, EX_SOFTWARE, main._INTERRUPTED, main._BROKEN_PIPE, 128 + signal.SIGTERM}


def defaults() -> dict[str, set[str]]:
    """Return the defaults of each option, over all commands and subcommands."""
    found: dict[str, set[str]] = {}

    def add(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    add(below)
            for option in action.option_strings:
                named = re.findall(r"\(?default: ([\d.]+)", action.help or "")
                found.setdefault(option, set()).update({str(action.default), *named})

    for name, (_, module) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
        importlib.import_module(module).add_arguments(parser)
        add(parser)
    return found


def test_numbers_that_options_have_by_default() -> None:
    have = defaults()
    wrong, seen = [], 0
    for path in sorted(DOCS.rglob("*.md")):
        for head, rows in tables(str(path.relative_to(DOCS))):
            for row in rows if "default" in head[:2] else []:
                options, values = re.findall(r"--[a-z][a-z-]+", row[0]), row[1].split(", ")
                if len(options) == len(values) and all(re.fullmatch(r"\d+(\.\d+)?", value) for value in values):
                    seen += 1
                    for option, value in zip(options, values, strict=True):
                        known = {each for each in have[option] if re.fullmatch(r"[\d.]+", each)}
                        if float(value) not in map(float, known):
                            wrong.append(f"{path.name}: {option} {value}, and it has {sorted(known)}")
    assert wrong == []
    assert seen >= 5
