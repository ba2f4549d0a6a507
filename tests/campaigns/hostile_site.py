"""The site of hostile traffic: a gateway, two draft services and a verify service, and each process's resources."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc

from dynatree.client import Client
from dynatree.serving import healthcheck
from dynatree.v1 import verify_pb2
from tests.campaigns.hostile_calls import QUOTA
from tests.campaigns.hostile_targets import Target
from tests.support.certificates import Authority
from tests.support.faults import free_address
from tests.support.forked import Forked
from tests.support.processes import wait_until

SITES = ("tcp", "unix", "tls")
CLIENTS = 8
FILES = 1024  # largest number of open files of each process, as on most systems
KV = ("--kv-tokens", "8192")  # few enough that all are used before memory is measured
QUOTAS = ("--principal-sessions", "2", "--principal-queue", "4")
_NAMES = ("hostile-0", *(f"{kind}-{number}" for kind in ("good", "evader") for number in range(12)))
TOKENS = {name: f"{name}-0123456789abcdef" for name in _NAMES}


@dataclass(frozen=True)
class Held:
    """Memory in MB, peak memory, threads, open files and CPU seconds of a process."""

    megabytes: float
    peak: float
    threads: int
    files: int
    cpu: float = 0.0

    @classmethod
    def of(cls, pid: int) -> Held:
        """The current figures of process `pid`; its peak memory since `forget_peak`, and its total CPU time."""
        root = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
        size, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
        ticks = sum(map(int, (root / "stat").read_text().rpartition(")")[2].split()[11:13]))
        files = len(list((root / "fd").iterdir()))
        return cls(size, peak, int(status["Threads"]), files, ticks / os.sysconf("SC_CLK_TCK"))


def forget_peak(pid: int) -> None:
    """Reset a process's peak memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class HttpClient(HTTPConnection):
    """An HTTP connection to a target, over TCP, TLS or a unix socket."""

    def __init__(self, target: Target, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._target = target

    def connect(self) -> None:
        self.sock = self._target.connect(protocol="http/1.1")
        self.sock.settimeout(self.timeout)


@dataclass(frozen=True)
class Site:
    """Running services.

    Attributes:
        name: One of `SITES`.
        targets: Ports by name; "quota draft" gives each principal `QUOTA` tokens a minute.
        processes: Processes by name.
        logs: Log files by name.
    """

    name: str
    targets: dict[str, Target]
    processes: dict[str, Forked]
    logs: dict[str, Path]

    def client(self, number: int) -> Client:
        """A well-behaved gRPC client."""
        draft = self.targets["draft"]
        known: dict[str, Any] = {"principal": f"good-{number}"}
        if draft.ca is not None:
            known = {"ca": draft.ca, "token": TOKENS[f"good-{number}"]}
        return Client(draft.address, timeout=60.0, **known)

    def http(self, number: int) -> tuple[HttpClient, dict[str, str]]:
        """A connection and headers of a well-behaved HTTP client; without tokens, its bodies must name the user."""
        gateway = self.targets["gateway"]
        headers = {"Content-Type": "application/json"}
        if gateway.ca is not None:
            headers["Authorization"] = f"Bearer {TOKENS[f'good-{number}']}"
        return HttpClient(gateway, 60.0), headers

    def health(self, name: str, timeout: float) -> str:
        """Check a port's health over a new connection; return the reason why it fails, or "" if it is healthy."""
        target = self.targets[name]
        if name in ("gateway", "draft metrics", "verify metrics"):
            try:
                connection = HttpClient(target, timeout)
                connection.request("GET", "/health" if name == "gateway" else "/metrics")
                answer = connection.getresponse()
                answer.read()
                connection.close()
            except OSError as error:
                return str(error) or type(error).__name__
            return "" if answer.status == 200 else str(answer.status)
        credentials = None if target.ca is None else grpc.ssl_channel_credentials(target.ca.read_bytes())
        return healthcheck.failure(target.address, timeout, credentials=credentials) or ""

    def held(self) -> dict[str, Held]:
        """The current figures of each running process."""
        return {name: Held.of(process.pid) for name, process in self.processes.items() if process.poll() is None}

    def forget_peaks(self) -> None:
        """Reset the peak memory of all processes."""
        for process in self.processes.values():
            forget_peak(process.pid)


@contextmanager
def running_site(name: str, folder: Path) -> Iterator[Site]:
    """Run the embedded pair behind a gateway.

    Args:
        name: "tcp" or "unix" for plain connections, or "tls" for TLS over TCP with tokens.
        folder: Folder of sockets, logs and certificates.
    """
    ca, tls, secured, channel = None, list[str](), list[str](), list[str]()
    if name == "tls":
        authority = Authority(folder)
        pair = authority.pair("server")
        ca = authority.file
        (folder / "tokens").write_text("".join(f"{who}:{token}\n" for who, token in TOKENS.items()))
        (folder / "token").write_text(TOKENS["good-0"])
        tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
        secured = [*tls, "--token-file", str(folder / "tokens")]
        channel = ["--verify-ca", str(ca), "--verify-token-file", str(folder / "token")]
    hostile, evaders = (
        tuple(token for who, token in TOKENS.items() if ca and who.startswith(prefix)) for prefix in ("hos", "eva")
    )
    listen = (lambda who: f"unix:{folder}/{who.replace(' ', '-')}.sock") if name == "unix" else lambda _: free_address()
    ports = ("gateway", "draft", "quota draft", "verify")
    address = {who: listen(who) for who in ports}
    metrics = {who: free_address() for who in ("draft", "verify")}
    draft = [
        "draft",
        "--draft-model",
        "embedded",
        "--verify",
        address["verify"],
        "--threads",
        "1",
        *KV,
        *channel,
        *secured,
    ]
    commands = {
        "verify": [
            *("verify", "--target-model", "embedded", "--threads", "1", *KV, *secured, "--metrics", metrics["verify"])
        ],
        "draft": [*draft, *QUOTAS, "--metrics", metrics["draft"]],
        "quota draft": [*draft, "--principal-tokens", str(QUOTA)],
        "gateway": [*("gateway", "--server", address["draft"], *(["--ca", str(ca)] if ca else []), *tls)],
    }
    processes, logs = {}, {}
    with ExitStack() as stack:
        for who, command in commands.items():
            logs[who] = folder / f"{who}.log"
            with _few_files():
                processes[who] = Forked([*command, "--listen", address[who]], logs[who])
            stack.callback(_end, processes[who])
        known = {who: evaders if who == "quota draft" else hostile for who in ports}
        targets = {who: Target(who, at, ca, known[who]) for who, at in address.items()}
        targets |= {f"{who} metrics": Target(f"{who} metrics", at, ca) for who, at in metrics.items()}
        site = Site(name, targets, processes, logs)
        for who in ports:
            wait_until(lambda who=who: not site.health(who, 1.0) or _ended(site, who))
        with targets["verify"].channel() as asked:
            ask = asked.unary_unary("/dynatree.v1.VerifyService/GetModelInfo")
            answer = ask(b"", metadata=targets["verify"].metadata(), timeout=10.0)
        model = verify_pb2.VerifyServiceGetModelInfoResponse.FromString(answer).model.SerializeToString()
        targets["verify"] = Target("verify", address["verify"], ca, hostile, model)
        yield site


def _ended(site: Site, who: str) -> bool:
    if site.processes[who].poll() is not None:
        raise RuntimeError(f"{who} has ended:\n{site.logs[who].read_text()[-2000:]}")
    return False


def _end(process: Forked) -> None:
    process.terminate()
    try:
        process.wait(15.0)
    except Exception:
        process.kill()
        process.wait()


@contextmanager
def _few_files() -> Iterator[None]:
    """Limit open files while the fork server starts, so that the services forked from it inherit a usual limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
