"""Run as a program: interrupt `verify`, `draft` and `serve` at many moments of their starts.

Each command is started many times, and interrupted at a different moment each time, by SIGINT to the whole process
group, as a terminal sends it, or by SIGTERM. The campaign prints the exit statuses. No start may print a traceback, or
leave a process or a folder behind; those that do are printed.

    python -m tests.campaigns.interrupted_starts [--moments 40] [--step 0.05] [--spread] [--signal INT|TERM] [COMMAND]
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

COMMAND = [str(Path(sys.executable).with_name("dynatree"))]  # not `-m`: during runpy, Python itself has no handler
PAIR = ["--target-model", "embedded", "--draft-model", "embedded"]
END_SECONDS = 60.0
COMMANDS = ("verify", "draft", "serve")
READY = {"verify": "dynatree verify: ", "draft": "dynatree draft: ", "serve": "Try "}


@dataclass(frozen=True)
class Ended:
    """The end of an interrupted start.

    Attributes:
        moment: Time of the signal, in seconds since the start.
        status: Exit status; if negative, minus the signal's number.
        ready: Whether the command was ready before it ended.
        errors: Output of the command.
        left: Processes of its group and files of its temporary folder that are left.
    """

    moment: float
    status: int
    ready: bool
    errors: str
    left: list[str]

    @property
    def good(self) -> bool:
        """Whether the status is expected, no error was printed and nothing is left."""
        expected = (0,) if self.ready else (0, 130, 143, -2, -15)
        return (
            self.status in expected and "Traceback" not in self.errors and "rror" not in self.errors and not self.left
        )


def arguments(name: str, folder: Path, verify: str) -> list[str]:
    """The arguments of a command that serves on sockets in this folder."""
    draft = ["--draft-model", "embedded", "--verify", verify, "--listen", f"unix:{folder}/draft.sock"]
    return {
        "verify": ["verify", "--target-model", "embedded", "--listen", f"unix:{folder}/verify.sock"],
        "draft": ["draft", *draft],
        "serve": ["serve", *PAIR, "--listen", "127.0.0.1:0"],
    }[name]


def interrupted(
    name: str, moment: float | None, verify: str, number: signal.Signals = signal.SIGINT, after: str = ""
) -> Ended:
    """Start a command, and signal it `moment` seconds after it has printed `after`; None means once it is ready."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job ignores it, and so would children
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
    """Run a verify service for the draft services; yield its address."""
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
    """Interrupt starts at all moments; exit with status 1 if any end is bad."""
    parser = argparse.ArgumentParser(description="Interrupt starts of the services at many moments.")
    parser.add_argument("commands", nargs="*", default=COMMANDS, metavar="COMMAND")
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.05)
    parser.add_argument(
        "--spread", action="store_true", help="spread the moments over a whole start, instead of by --step"
    )
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
