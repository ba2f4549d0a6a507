"""Tests SIGHUP: a draft service reloads its model, and a process whose terminal is closed ends."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from dynatree.client import Client
from dynatree.serving import healthcheck
from tests.conftest import EmbeddedServices
from tests.support.forked import Forked, context
from tests.support.processes import START_SECONDS, wait_until

HANDLING = """
import asyncio
from dynatree.common.shutdown import on_hangup, on_shutdown

async def main():
    came = asyncio.Queue()
    with on_shutdown(came.put_nowait), on_hangup(lambda: came.put_nowait("hangup")):
        print("ready", flush=True)
        for _ in range(2):
            print(await came.get(), flush=True)

asyncio.run(main())
"""


def test_a_draft_service_reloads_its_model(embedded_services: EmbeddedServices) -> None:
    log = Path(embedded_services.draft_address.removeprefix("unix:")).with_name("draft.log")
    with Client(embedded_services.draft_address) as client:
        expected = client.generate("Once upon a time", max_new_tokens=40).token_ids
        os.kill(embedded_services.draft_process, signal.SIGHUP)
        wait_until(lambda: "SIGHUP: " in log.read_text())
        assert "SIGHUP: new requests get the draft embedded" in log.read_text()
        assert client.generate("Once upon a time", max_new_tokens=40).token_ids == expected


def _reloading_for_ever(arguments: list[str], begun: Event) -> NoReturn:
    """Run a command whose second load of a model begins and never ends."""
    from dynatree.cli.main import main
    from dynatree.draft import serve_draft

    load, loads = serve_draft.load_engine, count()

    def load_once(settings: Any) -> Any:
        if next(loads):
            begun.set()
            threading.Event().wait()
        return load(settings)

    sys.argv = ["dynatree", *arguments]  # the command checks this to know that it is the program
    with patch.object(serve_draft, "load_engine", load_once):
        sys.exit(main(arguments))


def test_a_draft_service_that_is_told_to_stop_while_it_reloads_ends(
    embedded_services: EmbeddedServices, tmp_path: Path
) -> None:
    address, begun = f"unix:{tmp_path}/draft.sock", context().Event()
    arguments = ["--draft-model", "embedded", "--verify", embedded_services.verify_address, "--listen", address]
    process = context().Process(target=_reloading_for_ever, args=(["draft", *arguments], begun))
    process.start()
    assert process.pid is not None
    try:
        wait_until(lambda: healthcheck.failure(address, timeout=1.0) is None, START_SECONDS)
        os.kill(process.pid, signal.SIGHUP)
        assert begun.wait(60)
        process.terminate()
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_a_draft_service_that_is_not_ready_ignores_the_signal(tmp_path: Path) -> None:
    absent, log = f"unix:{tmp_path}/verify.sock", tmp_path / "draft.log"
    process = Forked(
        ["draft", "--draft-model", "none", "--verify", absent, "--listen", f"unix:{tmp_path}/draft.sock"], log
    )
    try:
        wait_until(lambda: f"for the verify service at {absent}" in log.read_text())
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: process.poll() is not None or "SIGHUP is ignored" in log.read_text())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_whose_terminal_is_closed_ends() -> None:
    terminal, own_side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", HANDLING],
        stdin=own_side,
        stdout=subprocess.PIPE,
        stderr=own_side,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(own_side)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "hangup\n"
        os.close(terminal)
        assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    assert process.returncode == 0
