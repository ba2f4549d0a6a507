"""A gateway as its command line starts it, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_ADDRESS = re.compile(r"as HTTP on (\S+)")
_STOP_SECONDS = 20.0


@dataclass
class Gateway:
    """A running gateway: where it is, and what it has printed."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "".join(self.lines)


@contextmanager
def running_gateway(server: str, *options: str) -> Iterator[Gateway]:
    """A gateway in front of the draft service at `server`, on a free port unless the options name one."""
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
    command = [sys.executable, "-m", "dynatree.cli.main", "gateway", "--server", server, *listen, *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    gateway = Gateway("", process)
    assert process.stderr is not None
    for line in process.stderr:
        gateway.lines.append(line)
        if found := _ADDRESS.search(line):
            gateway.url = found[1]
            break
    reading = threading.Thread(target=lambda: gateway.lines.extend(process.stderr or ()), daemon=True)
    reading.start()
    try:
        assert gateway.url, gateway.log
        yield gateway
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reading.join(_STOP_SECONDS)
        process.stderr.close()
