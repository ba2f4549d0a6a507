"""Both services as child processes on private sockets: for `dynatree demo` and `dynatree audit`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dynatree.client import Client, ServerUnavailableError

STOP_SECONDS = 15.0


@contextmanager
def service_pair(
    target_model: str, draft_model: str, options: Sequence[str] = (), start_timeout: float = 300.0
) -> Iterator[Client]:
    """A client of a verify and a draft service that live as long as the context.

    Args:
        target_model: What `dynatree verify --target-model` takes.
        draft_model: What `dynatree draft --draft-model` takes.
        options: Further options that both services get.
        start_timeout: Seconds within which both must serve.

    Raises:
        SystemExit: A service did not start; with what it printed last.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynatree-")))  # made with mode 0700
        verify, draft = f"unix:{folder}/verify.sock", f"unix:{folder}/draft.sock"
        timeout = ["--verify-timeout", str(start_timeout)]
        commands = {
            "verify": ["--target-model", target_model, "--listen", verify, *options],
            "draft": ["--draft-model", draft_model, "--verify", verify, "--listen", draft, *timeout, *options],
        }
        children = [stack.enter_context(_child(folder, name, args)) for name, args in commands.items()]
        client = stack.enter_context(Client(draft, connect_timeout=1.0))
        _wait(client, children, start_timeout)
        yield client


@contextmanager
def _child(folder: Path, name: str, arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "dynatree.cli.main", name, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(client: Client, children: Sequence[tuple[subprocess.Popen[bytes], Path]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        for process, log in children:
            if process.poll() is not None:
                raise SystemExit(_last_line(log) or f"a service ended with exit status {process.returncode}")
        try:
            client.model_info()
            return
        except ServerUnavailableError:
            if time.monotonic() > deadline:
                raise SystemExit(f"the services did not start within {timeout:g} s") from None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("dynatree: error: ") if lines else ""
