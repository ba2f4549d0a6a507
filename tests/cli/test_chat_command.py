"""Tests `dynatree chat` with lines of a pipe, and at a terminal with interrupts."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios

import grpc
import pytest

from dynatree.cli.main import main
from tests.support.fake_draft_service import Fail, FakeDraftService, Hang, last, message, service_fixture  # noqa: F401

COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


def said(service: FakeDraftService, request: int) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in service.requests[request].chat.messages]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch):
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"))

    return give


def test_lines_of_a_pipe_are_turns_of_one_conversation(service: FakeDraftService, lines, capsys) -> None:
    lines("Öncé?\n\nAnd then?")
    assert main(["chat", "--server", service.address, "--system", "Be brief.", "--max-new-tokens", "7"]) == 0
    assert capsys.readouterr() == ("Héllo\nHéllo\n", "")
    first = [("system", "Be brief."), ("user", "Öncé?")]
    assert said(service, 0) == first
    assert said(service, 1) == [*first, ("assistant", "Héllo"), ("user", "And then?")]
    assert service.requests[1].max_new_tokens == 7


def test_variables_of_the_template_go_with_each_turn(service: FakeDraftService, lines) -> None:
    lines("One\nTwo\n")
    assert main(["chat", "--server", service.address, "--chat-template-kwargs", '{"enable_thinking": false}']) == 0
    assert [json.loads(each.chat.template_variables) for each in service.requests] == [{"enable_thinking": False}] * 2


@pytest.mark.parametrize(
    ("variables", "problem"), [("{", "is not JSON"), ("[1]", "is not a JSON object"), ('"a"', "is not a JSON object")]
)
def test_other_variables_are_refused_at_once(service: FakeDraftService, variables, problem, capsys) -> None:
    assert main(["chat", "--server", service.address, "--chat-template-kwargs", variables]) == 2
    assert problem in capsys.readouterr().err
    assert not service.requests


def test_a_model_without_a_template_is_told_at_once(service: FakeDraftService, lines, capsys) -> None:
    service.chat_template = False
    lines("Hello\n")
    assert main(["chat", "--server", service.address]) == 1
    assert "model large has no chat template; use `dynatree generate`" in capsys.readouterr().err
    assert not service.requests


def test_a_failure_in_a_pipe_ends_it(service: FakeDraftService, lines, capsys) -> None:
    service.script = [message("Hé", 1), Fail(grpc.StatusCode.INTERNAL, "request 42")]
    lines("Hello\nAnd then?\n")
    assert main(["chat", "--server", service.address]) == 1
    out, err = capsys.readouterr()
    assert (out, len(service.requests)) == ("Hé\n", 1)
    assert "request 42" in err


class Terminal:
    """The command at its own terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()

        def take() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, again: str = "") -> None:
        """Read until the text appears; type `again` after every second of silence.

        An interrupt just before Python's `input` reads the terminal takes effect only with the next key.
        """
        while text not in self._seen:
            if again and not select.select([self._master], [], [], 1.0)[0]:
                self.type(again)
                continue
            self._seen += os.read(self._master, 4096).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_at_a_terminal_an_interrupt_ends_the_answer_and_not_the_conversation(service: FakeDraftService) -> None:
    whole, service.script = service.script, [message("Hé", 1), Hang()]
    terminal = Terminal("chat", "--server", service.address)
    try:
        terminal.wait_for("large. Ctrl-C stops an answer, Ctrl-D ends.")
        terminal.wait_for("> ")
        terminal.type("\x03")  # at the prompt
        terminal.wait_for("> ", again="\x03")
        terminal.type("Once\n")
        terminal.wait_for("Hé")
        terminal.type("\x03")
        terminal.wait_for("> ")
        assert service.abandoned.wait(5)
        service.script = [Fail(grpc.StatusCode.OUT_OF_RANGE, "too long")]
        terminal.type("More\n")
        terminal.wait_for("too long")
        terminal.wait_for("> ")
        service.script = [*whole[:-1], message(" \x1b[2J", 4), last()]
        terminal.type("Again\n")
        terminal.wait_for("Héllo \\x1b[2J")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()
    assert said(service, 2) == [("user", "Once"), ("assistant", "Hé"), ("user", "Again")]
