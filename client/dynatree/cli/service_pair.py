"""Runs both services as child processes, for `dynatree serve`, `demo`, `audit` and `bench`."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from dynatree.cli import interrupts
from dynatree.cli.main import COMMANDS, MODEL_ENVIRONMENT, finished
from dynatree.cli.settings import SERVE_SECONDS
from dynatree.client import Client
from dynatree.common.model_info import NO_MODEL
from dynatree.engine.model.files import described

if TYPE_CHECKING:
    from dynatree.draft.settings import DraftSettings
    from dynatree.engine.settings import ModelSettings
    from dynatree.verify.settings import VerifySettings

STOP_SECONDS = 15.0  # for a service to end after its grace period, and to save what it keeps
_ERROR = b"dynatree: error: "
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)  # exit statuses, without and with a handler


@dataclass(frozen=True)
class ServicePair:
    """Two services that run as child processes: a client, the process ids, and the draft service's address."""

    client: Client
    draft_process: int
    verify_process: int
    address: str
    _children: Mapping[str, _Child] = field(default_factory=dict)
    _verify_address: str = ""

    def ended(self) -> str:
        """Return the name of a service that has ended; "" while both run."""
        return next((name for name, child in self._children.items() if child.process.poll() is not None), "")

    def was_stopped(self, name: str) -> bool:
        """Whether a service that has ended was stopped, with exit status 0 or by an interrupt, and did not fail."""
        return self._children[name].process.returncode in (0, *_INTERRUPTED)

    def reason(self, name: str) -> str:
        """Return why a service has ended."""
        child = self._children[name]
        return child.reason() or f"the {name} service has ended with exit status {child.process.returncode}"

    def serves(self) -> bool:
        """Whether the services accept requests; the check may take a second while they start, and needs no token."""
        return self.client.is_serving()


@contextmanager
def service_pair(
    verify: VerifySettings, draft: DraftSettings, start_timeout: float = SERVE_SECONDS
) -> Iterator[ServicePair]:
    """Run a verify and a draft service within the context, and wait until they are ready.

    Args:
        verify: Settings of the verify service, whose address is replaced by a private socket.
        draft: Settings of the draft service; an empty address is replaced too.
        start_timeout: Seconds within which both services must be ready.

    Raises:
        SystemExit: A service did not start; the message has the last line that it printed.
    """
    with starting_pair(verify, draft) as pair:
        _wait(pair, [each for each in (verify.model, draft.model) if each is not None], start_timeout)
        yield pair


@contextmanager
def further_draft(
    pair: ServicePair, draft: DraftSettings, start_timeout: float = SERVE_SECONDS
) -> Iterator[ServicePair]:
    """Run another draft service for the verify service of a pair within the context, and wait until it is ready.

    Raises:
        SystemExit: As `service_pair`.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynatree-")))
        address = f"unix:{folder}/draft.sock"
        child = stack.enter_context(_child(folder, "draft", _connected(draft, pair._verify_address, address), False))
        further = replace(
            pair,
            client=stack.enter_context(Client(address, connect_timeout=1.0)),
            draft_process=child.process.pid,
            address=address,
            _children={**pair._children, "draft": child},
        )
        _wait(further, [draft.model] if draft.model else [], start_timeout)
        yield further


def _wait(pair: ServicePair, models: Sequence[ModelSettings], start_timeout: float) -> None:
    """Wait until a pair is ready to serve.

    Raises:
        SystemExit: A service has ended, or is not ready in time.
    """
    from rich.console import Console

    until = time.monotonic() + start_timeout
    loading = f"loading {', and '.join(described(each.model) for each in models) or NO_MODEL}"
    with Console(stderr=True).status(loading):  # on a terminal
        while not pair.serves():
            if ended := pair.ended():
                if pair.was_stopped(ended):  # Ctrl-C reaches the services too, and they may end first
                    raise KeyboardInterrupt
                raise SystemExit(pair.reason(ended))
            if time.monotonic() > until:
                raise SystemExit(f"the services did not start within {start_timeout:g} s")


@contextmanager
def starting_pair(verify: VerifySettings, draft: DraftSettings, shown: bool = False) -> Iterator[ServicePair]:
    """Run both services like `service_pair`, but do not wait until they are ready.

    `shown` says whether their logs are copied to standard error.
    """
    interrupts.raise_interrupts()
    with ExitStack() as stack:
        stack.enter_context(_orderly_termination())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynatree-")))  # made with mode 0700
        between, address = f"unix:{folder}/verify.sock", draft.operation.address or f"unix:{folder}/draft.sock"
        verify = replace(verify, operation=replace(verify.operation, address=between))
        draft = _connected(draft, between, address)
        children = {
            name: stack.enter_context(_child(folder, name, settings, shown))
            for name, settings in (("verify", verify), ("draft", draft))
        }
        client = stack.enter_context(Client(address, connect_timeout=1.0))
        yield ServicePair(
            client, children["draft"].process.pid, children["verify"].process.pid, address, children, between
        )


def _connected(draft: DraftSettings, verify: str, address: str) -> DraftSettings:
    """Return the settings of a draft service at `address` for the verify service at `verify`."""
    services, operation = replace(draft.verify, addresses=verify), replace(draft.operation, address=address)
    return replace(draft, verify=services, operation=operation)


@contextmanager
def _orderly_termination() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that no child process is left running."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals on the main thread only
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@dataclass
class _Child:
    """A service as a child process.

    Attributes:
        process: The child process.
        log: File that receives its output.
        shown: Thread that copies its log to standard error; None if the log is not shown.
        error: Its error message, if the log is shown.
    """

    process: subprocess.Popen[bytes]
    log: Path
    shown: threading.Thread | None = None
    error: str = ""

    def show(self) -> None:
        """Copy the child's lines to standard error, except its error, which is kept for `reason`."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                if line.startswith(_ERROR):
                    self.error = line.removeprefix(_ERROR).decode(errors="replace").strip()
                else:
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    def reason(self) -> str:
        """Return the child's error or its last line; "" without either."""
        if self.shown is not None:
            self.shown.join()
            return self.error
        lines = self.log.read_bytes().strip().splitlines()
        return lines[-1].removeprefix(_ERROR).decode(errors="replace") if lines else ""


@contextmanager
def _child(folder: Path, name: str, settings: VerifySettings | DraftSettings, shown: bool) -> Iterator[_Child]:
    log = folder / f"{name}.log"
    # No preexec_fn: between fork and exec, gRPC's fork handlers can break the child of a process that has channels.
    command = [sys.executable, "-m", "dynatree.cli.service_pair", str(os.getpid()), name]
    command.append(settings.model.model if settings.model else NO_MODEL)  # shown by `ps`
    child: _Child | None = None
    try:
        with log.open("wb") as output, _held_back(signal.SIGINT, signal.SIGTERM):
            into = subprocess.PIPE if shown else output
            environment = {**MODEL_ENVIRONMENT, **os.environ}
            with interrupts.blocked():
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=into, env=environment)
            child = _Child(process, log)
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as words:  # the child may have been interrupted
                pickle.dump(settings, words)
            if shown:
                child.shown = threading.Thread(target=child.show, name=f"{name}-log", daemon=True)
                child.shown.start()
        yield child
    finally:
        if child is not None:
            _end(child.process, settings.operation.grace + STOP_SECONDS)
            if child.shown is not None:
                child.shown.join()


@contextmanager
def _held_back(*numbers: int) -> Iterator[None]:
    """Delay signals to the end of the context: a signal while a child starts would leave the child running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _end_with_parent(parent: int) -> None:
    """Make Linux send SIGTERM to this child when its parent dies, even by SIGKILL; exit if it has died already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(1)


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    _end_with_parent(int(sys.argv[1]))
    service = sys.argv[2]
    sys.exit(finished(service, lambda: import_module(COMMANDS[service][1]).serve(pickle.load(sys.stdin.buffer))))
