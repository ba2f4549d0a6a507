"""Tests that the client library uses nothing that macOS or Windows lacks; no test runs on these systems."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import EmbeddedServices

# What Windows lacks, which is more than what macOS lacks. gRPC and the standard library have their own way around it,
# so they are imported before it goes.
WITHOUT = """
import asyncio, logging, multiprocessing, os, signal, subprocess, sys, tempfile
import google.protobuf.json_format, google.protobuf.message, grpc, grpc.aio, grpc.experimental

for name in ("_posixsubprocess", "fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "getloadavg", "getpgid", "geteuid", "getgid", "getuid", "killpg", "mkfifo", "nice",
             "posix_spawn", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield",
             "setsid", "statvfs", "sysconf", "uname", "wait", "wait4"):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "SIGUSR2", "pthread_sigmask", "sigwait"):
    delattr(signal, name)
"""
USE = """
from dynatree.client import AsyncClient, Client

with Client(sys.argv[1]) as client:
    whole = client.generate("Once upon a time", max_new_tokens=8)
    assert "".join(chunk.text for chunk in client.stream("Once upon a time", max_new_tokens=8)) == whole.text

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        assert (await client.generate("Once upon a time", max_new_tokens=8)).text == whole.text

asyncio.run(main())
print(whole.stats.generated_tokens)
"""


def test_the_client_works_without_what_windows_lacks(embedded_services: EmbeddedServices) -> None:
    command = [sys.executable, "-c", WITHOUT + USE, embedded_services.draft_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_the_trial_sees_what_windows_lacks() -> None:
    """The command `dynatree` begins with a signal mask, so it needs Linux or macOS."""
    code = f"{WITHOUT}\nfrom dynatree.cli.interrupts import end_at_once\nend_at_once()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "has no attribute 'pthread_sigmask'" in done.stderr
