"""`dynatree` commands in processes forked from one that has imported torch, transformers and what the gateway needs.

They run the same `main()` with the same options, signals, exit status and log, without the seconds of CPU time that the
imports take. Tests of a command's start itself start it as a shell does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from unittest.mock import patch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["dynatree.draft.serve_draft", "dynatree.gateway.serve_gateway", "dynatree.verify.serve_verify"]
)


def context() -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported torch; that one is started if needed."""
    from dynatree.cli.main import MODEL_ENVIRONMENT

    with patch.dict(os.environ, MODEL_ENVIRONMENT):  # libraries read these when they are loaded
        ensure_running()
    return _CONTEXT


class Forked:
    """A running command, with the interface of `subprocess.Popen`; its output is appended to `log`.

    Like a shell's job, it leads a process group.
    """

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        log.touch()
        self.log = log
        self._process = context().Process(target=_run, args=(tuple(arguments), dict(os.environ), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, the negated signal number if a signal ended the process, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return the exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def _run(arguments: tuple[str, ...], environment: Mapping[str, str], log: Path) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["dynatree", *arguments]  # the command checks this to know that it is the program
    try:
        from dynatree.cli.main import main

        sys.exit(main(arguments))
    finally:
        atexit._run_exitfuncs()
