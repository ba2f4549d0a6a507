"""Run as a program: interrupt `verify`, `draft` and `serve` at many moments of their starts.

Each is started so often, and gets SIGINT, as a terminal sends it to the whole group, or SIGTERM, so many seconds later.
It prints the statuses, and what came with a traceback or left a process or a folder behind: nothing may.

    python tests/interrupted_starts.py [--moments 40] [--step 0.05] [--spread] [--signal INT|TERM] [COMMAND ...]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("dynatree"))]  # in runpy, which -m takes, Python itself has no handler
PAIR = ["--target-model", "embedded", "--draft-model", "embedded"]
END_SECONDS = 60.0
COMMANDS = ("verify", "draft", "serve")
READY = {"verify": "dynatree verify: ", "draft": "dynatree draft: ", "serve": "Try "}


@dataclass(frozen=True)
class Ended:
    """How a start that was interrupted ended.

    Attributes:
        moment: When the signal came, in seconds.
        status: The exit status; below 0, the signal.
        ready: Whether it served before.
        errors: What it wrote to standard error.
        left: Processes of its group, and files of its temporary folder.
    """

    moment: float
    status: int
    ready: bool
    errors: str
    left: list[str]

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with it."""
        expected = (0,) if self.ready else (0, 130, 143, -2, -15)
        return (
            self.status in expected and "Traceback" not in self.errors and "rror" not in self.errors and not self.left
        )


def arguments(name: str, folder: Path, verify: str) -> list[str]:
    """The command line of a service on sockets of this folder."""
    draft = ["--draft-model", "embedded", "--verify", verify, "--listen", f"unix:{folder}/draft.sock"]
    return {
        "verify": ["verify", "--target-model", "embedded", "--listen", f"unix:{folder}/verify.sock"],
        "draft": ["draft", *draft],
        "serve": ["serve", *PAIR, "--listen", "127.0.0.1:0"],
    }[name]


def interrupted(
    name: str, moment: float | None, verify: str, number: signal.Signals = signal.SIGINT, after: str = ""
) -> Ended:
    """Start a command, and send it the signal `moment` seconds after it has written `after`; None: once it is ready."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job, and so would its children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="starts-") as place:
        folder = Path(place)
        temporary = folder / "tmp"
        temporary.mkdir()
        log = folder / "log"
        with log.open("wb") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                [*COMMAND, *arguments(name, folder, verify)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(temporary)},
                start_new_session=True,
            )
        try:
            words = READY[name] if moment is None else after
            _wait(lambda: words in log.read_text() or process.poll() is not None)
            time.sleep(moment or 0.0)
            came = time.monotonic() - began
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            status = process.wait(END_SECONDS)
            left = [f"process {line}" for line in _group(process.pid)] + [
                each.name for each in temporary.glob("dynatree-*")
            ]
            return Ended(came, status, READY[name] in log.read_text(), log.read_text(), left)
        finally:
            if _group(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def _group(leader: int) -> list[str]:
    listed = subprocess.run(["ps", "-ww", "-o", "pid=,stat=,args=", "-g", str(leader)], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if " Z" not in line]


@contextmanager
def verify_service() -> Iterator[str]:
    """The address of a verify service, for drafts."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/verify.sock"
        command = [*COMMAND, "verify", "--target-model", "embedded", "--listen", address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            while READY["verify"] not in process.stderr.readline():
                assert process.poll() is None
            try:
                yield address
            finally:
                process.kill()


def main() -> None:
    """Interrupt at all moments; exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="interrupt starts")
    parser.add_argument("commands", nargs="*", default=COMMANDS, metavar="COMMAND")
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument("--spread", action="store_true", help="over a whole start, instead of by --step")
    parser.add_argument("--signal", default="INT", choices=["INT", "TERM"])
    options = parser.parse_args()
    number = signal.Signals[f"SIG{options.signal}"]
    bad = 0
    with verify_service() as verify:
        for name in options.commands:
            ready = interrupted(name, None, verify, number)
            step = 1.1 * ready.moment / options.moments if options.spread else options.step
            ends = [interrupted(name, step * each, verify, number) for each in range(options.moments)]
            for when, some in (("starting", [e for e in ends if not e.ready]), ("ready", [e for e in ends if e.ready])):
                print(f"{name} {when}: {len(some)} moments, statuses {dict(Counter(e.status for e in some))}")
            for end in (ready, *ends):
                if not end.good:
                    bad += 1
                    print(f"  BAD at {end.moment:.2f} s: {end.status} {end.left}\n{end.errors}")
            traced = sum("Traceback" in end.errors for end in ends)
            print(
                f"{name}: {traced} tracebacks; ready after {ready.moment:.2f} s, then status {ready.status}", flush=True
            )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
