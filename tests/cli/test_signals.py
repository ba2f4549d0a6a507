"""Signals and killed parents: services end with the command that started them."""

import inspect
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import further_draft, service_pair, starting_pair
from dynatree.cli.settings import SERVE_SECONDS
from dynatree.client import Client
from tests.support.processes import first_process, is_running, wait_until

pytestmark = pytest.mark.early
COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


@pytest.mark.parametrize("command", ["demo", pytest.param("bench", marks=pytest.mark.long)])
def test_services_end_with_the_command_that_started_them(tmp_path, command):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("It was a dark and stormy night, and nobody was about. " * 40)
    options = ["--count", "1", "--max-new-tokens", "500", "--repetitions", "99", "--temperature", "0", "--warmup", "0"]
    arguments = {
        "demo": ["demo", "--max-new-tokens", "1500"],
        "bench": ["bench", "compare", "--prompts", str(prompts), "--policy", "linear", *options],
    }
    process = subprocess.Popen([*COMMAND, *arguments[command]], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(children := child_processes(process.pid)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no way to end the children of a killed parent")
def test_services_end_with_a_command_that_is_killed():
    process = subprocess.Popen([*COMMAND, "demo", "--max-new-tokens", "1500"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(child_processes(process.pid)) == 2)
        children = child_processes(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(map(is_running, children)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no way to end the children of a killed parent")
def test_a_service_ends_whose_command_was_killed_before_it_could_ask_for_that():
    code = "from dynatree.cli.service_pair import _end_with_parent; _end_with_parent({}); print('it lives')"
    own, dead = os.getpid(), 2**22 + 1  # larger than any process id
    results = [subprocess.run([sys.executable, "-c", code.format(pid)], capture_output=True) for pid in (own, dead)]
    assert [(result.returncode, result.stdout) for result in results] == [(0, b"it lives\n"), (1, b"")]


def test_an_interrupt_while_services_start_is_an_interrupt():
    process = subprocess.Popen(
        [*COMMAND, "demo"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=own_terminal
    )
    wait_until(lambda: len(child_processes(process.pid)) == 2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "says"),
    [("verify", ""), ("verify", "loading"), ("draft", ""), ("draft", "loading"), ("gateway", ""), ("serve", "loading")],
)
def test_a_container_that_is_stopped_while_it_starts_ends(command, says):
    """Process 1 of a container gets only signals that it handles: once a handler exists, and during torch's import."""
    arguments = {
        "verify": ["--target-model", "embedded"],
        "draft": ["--draft-model", "embedded", "--verify", "localhost:9"],
        "gateway": ["--server", "localhost:9"],
        "serve": ["--target-model", "embedded", "--draft-model", "embedded"],
    }
    alone = first_process()
    words = [*alone, *COMMAND, command, *arguments[command], "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            while says and says not in process.stderr.readline():
                assert process.poll() is None
            wait_until(lambda: all(map(heeds_termination, started(process, alone))))
            for each in started(process, alone):
                os.kill(each, signal.SIGTERM)
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM


def started(process, alone):
    """Return the command's process, which is a child if the command runs as process 1 of a namespace; wait for it."""
    if not alone:
        return [process.pid]
    wait_until(lambda: child_processes(process.pid))
    return child_processes(process.pid)


def heeds_termination(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_a_service_is_not_interrupted_before_it_can_heed_it(monkeypatch):
    """Python itself would print a traceback during its own startup."""
    start = subprocess.Popen

    def interrupted(*arguments, **options):
        process = start(*arguments, **options)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    heed_interrupts()
    with starting_pair(*pair_settings("embedded", "embedded"), shown=True) as pair:
        wait_until(lambda: all(not is_running(process) for process in (pair.draft_process, pair.verify_process)))
        assert pair.was_stopped(pair.ended())
        assert [child.process.wait() for child in pair._children.values()] == [130, 130]


def heed_interrupts():
    """Undo that background jobs of a shell, and their children, ignore interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def own_terminal():
    """Like a shell's foreground job: a process group that heeds interrupts."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_signal_that_comes_while_a_service_starts_leaves_none_behind(monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            if len(started) == 2:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    settings = pair_settings("embedded", "embedded")
    with pytest.raises(SystemExit) as stopped, service_pair(*settings):
        pytest.fail("nothing may run")
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(started) == 2
    assert [process.poll() is not None for process in started] == [True, True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("start", [service_pair, further_draft])
def test_services_may_load_as_long_as_those_of_serve(start):
    """A model that `serve` loads in half an hour can also be audited, measured and ranked."""
    assert inspect.signature(start).parameters["start_timeout"].default == SERVE_SECONDS


def test_services_have_their_grace_period_before_they_are_killed(monkeypatch):
    monkeypatch.setattr("dynatree.cli.service_pair.STOP_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        with service_pair(*pair_settings("embedded", "embedded", grace=60.0)) as pair:
            client = stack.enter_context(Client(pair.address, resume=False))
            stream = client.stream([5, 6, 7], max_new_tokens=120, ignore_eos=True, policy="autoregressive")
            next(stream)
            rest = pool.submit(list, stream)
        assert rest.result()
        assert stream.completion.finish_reason == "length"


def child_processes(parent):
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
