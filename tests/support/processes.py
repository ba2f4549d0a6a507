"""Services in their own processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynatree.serving import healthcheck
from tests.support.forked import Forked

START_SECONDS = 120.0
END_SECONDS = 20.0


@dataclass(frozen=True)
class EmbeddedServices:
    """Addresses and process ids of the two services of the embedded pair."""

    draft_address: str
    verify_address: str
    draft_process: int
    verify_process: int


def first_process() -> list[str]:
    """A command prefix that makes a command the first process of a PID namespace; empty if not permitted."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else []


@contextmanager
def service(
    folder: Path, name: str, *arguments: str, seconds: float = START_SECONDS
) -> Iterator[tuple[str, Forked, Path]]:
    """Run a `dynatree` process that serves on a socket; yield its address, the process and its log.

    Args:
        folder: Folder of the socket and the log.
        name: Name of both files, without suffix.
        arguments: Arguments of the command.
        seconds: Time limit of the start.
    """
    address, log = f"unix:{folder}/{name}.sock", folder / f"{name}.log"
    log.unlink(missing_ok=True)
    process = Forked([*arguments, "--listen", address], log)
    try:
        deadline = time.monotonic() + seconds
        while healthcheck.failure(address, timeout=1.0) is not None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield address, process, log
    finally:
        process.terminate()
        process.wait(END_SECONDS)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds; fail after `seconds` seconds."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def is_running(process: int) -> bool:
    """Whether the process exists and has not ended; an ended orphan may stay a zombie until its new parent reaps it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
