"""Runs every program of examples/, and the notebook's cells, against services of the shipped pair."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynatree import embedded
from dynatree.client import Client
from tests.draft.test_tools_in_chats import HERMES
from tests.support.gateways import running_gateway
from tests.support.paths import ROOT
from tests.support.services import running_services

EXAMPLES = ROOT / "examples"
Run = Callable[..., tuple[str, str]]


@dataclass(frozen=True)
class Served:
    """Addresses of the shipped pair, whose models have got a chat template."""

    address: str
    url: str


@pytest.fixture(scope="module", name="served")
def served_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("examples")
    target = shutil.copytree(embedded.target_path(), folder / "story-target")
    draft = shutil.copytree(embedded.draft_path(), folder / "story-draft")
    for model in (target, draft):
        (model / "chat_template.jinja").write_text(HERMES)
    with (
        running_services(folder, target, draft, sessions=8) as services,
        running_gateway(services.draft_address) as gateway,
    ):
        yield Served(services.draft_address, f"{gateway.url}/v1")


@pytest.fixture(name="run")
def run_fixture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a program in this process; return what it wrote to standard output and standard error."""

    def run(program: str, place: str, typed: str = "") -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [program, place])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return tuple(capsys.readouterr())

    return run


def test_a_chat_keeps_what_was_said(served: Served, run: Run) -> None:
    printed, _ = run("chat.py", served.url, "Who are you?\nAnd where?\n\n")

    beginning, first, second, end = printed.split("> ")
    assert beginning == "You are talking to story-target; an empty line ends the chat.\n"
    assert end == ""
    said = [
        {"role": "system", "content": "Answer in one or two sentences."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": first.removesuffix("\n")},
        {"role": "user", "content": "And where?"},
    ]
    with Client(served.address) as client:
        assert second == client.generate(said, max_new_tokens=200).text + "\n"


def test_a_chat_ends_with_its_input(served: Served, run: Run) -> None:
    assert run("chat.py", served.url)[0].endswith("\n> ")


def test_answers_follow_the_schema(served: Served, run: Run) -> None:
    lines = run("json_schema.py", served.url)[0].splitlines()

    assert len(lines) == 2
    assert all(line.startswith("Town(name=") and " climate='" in line for line in lines)


def test_the_model_calls_a_function_and_reads_its_result(served: Served, run: Run) -> None:
    called, _, answer = run("tools.py", served.url)[0].partition("\n")

    arguments, _, result = called.partition(" = ")
    assert arguments in ('weather({"town": "Oslo"})', 'weather({"town": "Rome"})')
    assert result in ("{'town': 'Oslo', 'celsius': 4}", "{'town': 'Rome', 'celsius': 21}")
    assert answer.strip()


def test_a_batch_answers_in_order_and_survives_an_error(served: Served, run: Run) -> None:
    prompts = ["Once upon a time", "word " * 3000, "It was a dark night", *["The sea"] * 9]
    printed, summary = run("batch.py", served.address, "\n".join(prompts))

    answers = [json.loads(line) for line in printed.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert [place for place, answer in enumerate(answers) if "error" in answer] == [1]
    with Client(served.address) as client:
        assert answers[2]["text"] == client.generate(prompts[2], max_new_tokens=64).text
    assert summary.startswith("12 prompts, 704 tokens, ")


def test_every_policy_gives_the_same_text(served: Served, run: Run) -> None:
    table = run("policies.py", served.address)[0].splitlines()[2:]

    with Client(served.address) as client:
        policies = client.model_info().policies
    assert [row.split()[0] for row in table] == ["policy", *policies]
    assert {row.split()[-1] for row in table[1:]} == {"yes"}


def test_the_notebook_draws_a_tree(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cells run without Jupyter; the last one's figure is what a reader sees."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("DYNATREE_ADDRESS", served.address)
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    cells = json.loads((EXAMPLES / "tree.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)

    shown = [text.get_text() for text in pyplot.gcf().axes[0].texts]
    round_ = names["round_"]
    assert len(shown) == len(round_.texts) + 1  # the nodes, and the root
    pyplot.close("all")
