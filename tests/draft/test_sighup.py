"""Tests SIGHUP: a draft service reloads its model, and a process whose terminal is closed ends."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

from dynatree.client import Client
from tests.conftest import EmbeddedServices
from tests.support.forked import Forked
from tests.support.processes import wait_until

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
