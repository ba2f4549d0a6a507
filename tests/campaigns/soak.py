"""Many clients on services that are killed again and again: `python -m tests.campaigns.soak [--minutes 20]`.

Two verify services, two draft services and a gateway in front of them run over TLS, with tokens and quotas. At regular
intervals one of the services is killed and restarted. Clients over gRPC and over HTTP compare every completion with the
completion made without a fault; some cancel midway, and one principal asks for more than its quota. After a sixth of
the time, only the second service of each kind is killed, so that the first shows whether memory grows in the second
half. The campaign prints the failures, and the memory and open files of each process.

Memory that an allocator keeps for later is no leak. The clients' process has 45 threads, whose caches in glibc's malloc
fill during the whole time, as do Python's lists of free tuples: it grew by 1.5 % without any more objects. So it runs
with one arena of malloc and without these caches, and collects garbage, which empties the lists, before its memory is
measured. Its allocated bytes are then constant, also when services are killed. The services keep the defaults.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import signal
import ssl
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from statistics import median
from typing import Any

from dynatree.client import Client, DynaTreeError, ServerBusyError
from dynatree.serving import healthcheck
from tests.support.certificates import Authority
from tests.support.faults import Process, free_address, outcome
from tests.support.forked import Forked
from tests.support.processes import wait_until

EARLY = 1 / 6  # share of the time in which every service may be killed
FULL = (0.4, 0.6)  # shares of the time between which caches are full; memory that grows afterwards leaks
GROWTH = 0.01  # largest relative growth of memory thereafter
PLAIN_MALLOC = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"
GAUGES = ("dynatree_num_requests_", "dynatree_kv_cache_usage_perc", "dynatree_verify_replicas")
PROMPTS = ("Call me", "It was a bright cold morning, and the captain", "The sea", "She said that", "1, 2, 3,")
PRINCIPALS = 8  # principals that keep to their quotas
QUOTAS = ("--principal-sessions", "6", "--principal-queue", "8", "--principal-tokens", "24000")
KV = ("--kv-tokens", "16384")  # few enough that all are used before memory is measured
BOUNDS = (*KV, *QUOTAS, "--history-tokens", "16384")  # few histories for the same reason
GREEDY = "greedy"  # the principal that exceeds its quota
GREEDY_CLIENTS = 4
ROUNDING = 1e-3  # tolerance of a log-probability
CLOSED_SECONDS = 60.0  # time in which unused files are closed, and killed services are connected again
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7},
    {"repetition_penalty": 1.2},
    {"stop": ["the"]},
    {"temperature": 0.7, "seed": 3, "n": 2, "log_probs": True},
    {"top_log_probs": 3, "prompt_log_probs": True, "temperature": 0.6, "seed": 14},
)


def token_of(principal: str) -> str:
    """The bearer token of a principal."""
    return f"{principal}-0123456789abcdef"


def options_of(number: int) -> dict[str, Any]:
    """The options of completion `number`; there are only a few, so that all outcomes can be computed beforehand."""
    return {"max_new_tokens": 16 + 8 * (number % 4), "ignore_eos": True} | KINDS[number % len(KINDS)]


def body_of(prompt: str, number: int) -> dict[str, Any]:
    """The body of the same completion over HTTP."""
    options = {"temperature": 0.0, "return_token_ids": True, **options_of(number)}
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": options.pop("max_new_tokens")}
    if options.pop("prompt_log_probs", False):
        body["echo"] = True
    if "top_log_probs" in options or "log_probs" in options:
        body["logprobs"] = options.pop("top_log_probs", 0)
        options.pop("log_probs", None)
    return body | options


def same(one: Any, other: Any) -> bool:
    """Whether two answers are equal, up to the rounding of log-probabilities in shared passes."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=ROUNDING)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return bool(one == other)


@dataclass(frozen=True)
class Secured:
    """Services over TLS.

    Attributes:
        verifies: The verify services.
        drafts: The draft services.
        gateway: Address of the gateway, `host:port`.
        ca: Certificate of the authority that signed every certificate.
        before: The gateway's process.
    """

    verifies: list[Process]
    drafts: list[Process]
    gateway: str
    ca: Path
    before: Forked

    @property
    def services(self) -> list[Process]:
        """The services that may be killed."""
        return [*self.verifies, *self.drafts]

    def client(self, addresses: list[str], principal: str, **settings: Any) -> Client:
        """A gRPC client of some draft services."""
        return Client(",".join(addresses), ca=self.ca, token=token_of(principal), **settings)

    def http(self, principal: str) -> tuple[HTTPSConnection, dict[str, str]]:
        """A connection to the gateway, and the headers of its requests."""
        context = ssl.create_default_context(cafile=self.ca)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token_of(principal)}"}
        return HTTPSConnection(self.gateway, timeout=120.0, context=context), headers


@contextmanager
def secured_cluster(folder: Path) -> Iterator[Secured]:
    """Run two services of each kind, of the embedded pair, and a gateway."""
    authority = Authority(folder)
    pair = authority.pair("server")
    principals = ["drafts", GREEDY, *(f"client-{number}" for number in range(PRINCIPALS))]
    (folder / "tokens").write_text("".join(f"{each}:{token_of(each)}\n" for each in principals))
    (folder / "token").write_text(token_of("drafts"))
    tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    secured = [*tls, "--token-file", str(folder / "tokens")]
    verify = ["verify", "--target-model", "embedded", *KV, *secured]
    at = [free_address() for _ in range(5)]
    channel = ["--verify-ca", str(authority.file), "--verify-token-file", str(folder / "token")]
    draft = ["draft", "--draft-model", "embedded", "--verify", ",".join(at[:2]), *channel, *secured, *BOUNDS]
    names = ("verify a", "verify b", "draft 1", "draft 2")
    processes = [
        Process(name, draft if "draft" in name else verify, at[place], folder / f"{name}.log", free_address())
        for place, name in enumerate(names)
    ]
    with ExitStack() as stack:
        for process in processes:
            process.ca = authority.file
            stack.callback(process.end)
            process.start()
        for process in processes:
            process.wait()
        drafts = ",".join(at[2:4])
        gateway = ["gateway", "--server", drafts, "--ca", str(authority.file), *tls, "--listen", at[4]]
        before = Forked(gateway, folder / "gateway.log")
        stack.callback(before.kill)
        wait_until(lambda: healthcheck.http_failure(f"https://{at[4]}", 1.0, authority.file) is None)
        yield Secured(processes[:2], processes[2:], at[4], authority.file, before)


class Soak:
    """The work of the clients, and its results."""

    def __init__(self, cluster: Secured, seconds: float, cancelled: float, prompts: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, object]] = []
        self.seconds = seconds
        self._cluster = cluster
        self._cancelled = cancelled
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._keys = list(itertools.product(PROMPTS[:prompts], range(12)))
        self._expected: dict[Any, Any] = {}
        connection, headers = cluster.http("client-0")
        with cluster.client([cluster.drafts[0].address], "client-0") as client:
            for prompt, number in self._keys:
                self._expected[prompt, number] = outcome(client.generate(prompt, **options_of(number)))
                self._expected[prompt, number, "http"] = self._asked(connection, headers, prompt, number)
        connection.close()
        self._started = time.monotonic()

    @property
    def share(self) -> float:
        """Share of the time that has passed; 1 at the end."""
        return (time.monotonic() - self._started) / self.seconds

    def _next(self, generator: random.Random) -> tuple[str, int]:
        with self._lock:
            number = next(self._numbers)
        return generator.choice(self._keys)[0], number % 12

    def work(self, seed: int) -> None:
        """Run one gRPC client's completions one after the other."""
        generator = random.Random(seed)
        addresses = [draft.address for draft in self._cluster.drafts]
        generator.shuffle(addresses)
        patience = {"timeout": 120.0, "resume_timeout": 60.0, "connect_timeout": 60.0}
        with self._cluster.client(addresses, f"client-{seed % PRINCIPALS}", **patience) as client:
            while self.share < 1:
                prompt, number = self._next(generator)
                try:
                    if generator.random() < self._cancelled:
                        with client.stream(prompt, **options_of(number)) as stream:
                            for _ in itertools.islice(stream, generator.randrange(1, 4)):
                                pass
                        self.counts["cancelled"] += 1
                        continue
                    completion = client.generate(prompt, **options_of(number))
                except DynaTreeError as error:
                    self._failed(prompt, number, error)
                    continue
                self.counts["resumes"] += completion.stats.resumes
                self._compare((prompt, number), outcome(completion))

    def work_over_http(self, seed: int) -> None:
        """Run one HTTP client's completions one after the other."""
        generator = random.Random(seed)
        connection, headers = self._cluster.http(f"client-{seed % PRINCIPALS}")
        while self.share < 1:
            prompt, number = self._next(generator)
            try:
                if generator.random() < self._cancelled:
                    connection.request("POST", "/v1/completions", json.dumps(body_of(prompt, number)), headers)
                    time.sleep(generator.uniform(0.0, 0.1))
                    connection.close()
                    self.counts["cancelled over HTTP"] += 1
                    continue
                answer = self._asked(connection, headers, prompt, number)
            except (OSError, HTTPException) as error:
                connection.close()
                self._failed(prompt, number, error)
                continue
            self._compare((prompt, number, "http"), answer)
        connection.close()

    def ask_for_more(self, seed: int) -> None:
        """Make requests that may each use the greedy principal's whole quota, and leave them after a few tokens."""
        generator = random.Random(f"greedy {seed}")
        with self._cluster.client([self._cluster.drafts[0].address], GREEDY, resume=False) as client:
            while self.share < 1:
                prompt = [generator.randrange(5, 1000) for _ in range(100)]
                try:
                    with client.stream(prompt, max_new_tokens=1500, n=16, timeout=60.0) as stream:
                        for _ in itertools.islice(stream, 5):
                            pass
                    self.counts["greedy, admitted"] += 1
                except ServerBusyError:
                    self.counts["greedy, refused"] += 1
                except DynaTreeError:
                    self.counts["greedy, failed"] += 1  # its service was killed
                time.sleep(0.2)

    def _asked(self, connection: HTTPSConnection, headers: dict[str, str], prompt: str, number: int) -> Any:
        connection.request("POST", "/v1/completions", json.dumps(body_of(prompt, number)), headers)
        answer = connection.getresponse()
        told = answer.read()
        if answer.status != 200:
            raise HTTPException(f"{answer.status}: {told[:300].decode()}")
        return json.loads(told)["choices"]

    def _compare(self, key: tuple[Any, ...], got: Any) -> None:
        self.counts["completed over HTTP" if len(key) == 3 else "completed"] += 1
        if not same(got, self._expected[key]):
            self.counts["wrong"] += 1
            self.wrong.append({"prompt": key[0], "options": options_of(key[1]), "got": repr(got)[:500]})

    def _failed(self, prompt: str, number: int, error: Exception) -> None:
        self.counts[f"failed: {type(error).__name__}"] += 1
        self.wrong.append({"prompt": prompt, "options": options_of(number), "share": self.share, "error": str(error)})

    def kill(self, every: float) -> None:
        """Kill and restart one service after the other; the next is killed once the last is up again."""
        generator, due = random.Random(0), time.monotonic()
        while self.share < 1:
            due += every
            time.sleep(max(0.0, due - time.monotonic()))
            groups = (self._cluster.verifies, self._cluster.drafts)
            process = generator.choice([each for group in groups for each in group[self.share > EARLY :]])
            process.signal(signal.SIGKILL)
            self.counts[f"killed {process.name}"] += 1
            process.restore()
            process.wait()


@dataclass(frozen=True)
class Held:
    """Resident memory and open files of a process."""

    megabytes: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Held | None:
        """The current figures of process `pid`; None if it has ended."""
        root = Path(f"/proc/{pid}")
        try:
            status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
            return cls(int(status["VmRSS"].split()[0]) / 1024, len(list((root / "fd").iterdir())))
        except (OSError, KeyError):
            return None


def gauges(cluster: Secured, process: Process) -> dict[str, float]:
    """The gauges of a service that show its requests, KV cache usage and replicas."""
    context = ssl.create_default_context(cafile=cluster.ca)
    with urllib.request.urlopen(f"https://{process.metrics}/metrics", timeout=10, context=context) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith(GAUGES))}


def main() -> int:
    """Run the campaign and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--clients", type=int, default=32, help="number of clients, a quarter of them over HTTP (default: 32)"
    )
    parser.add_argument("--cancelled", type=float, default=0.3, help="share of cancelled completions (default: 0.3)")
    parser.add_argument(
        "--kill-every",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="interval of kills; 0 means never (default: %(default)g)",
    )
    parser.add_argument(
        "--growth",
        type=float,
        default=GROWTH,
        help="relative growth of memory that is no leak; inf means any (default: %(default)g)",
    )
    parser.add_argument(
        "--prompts", type=int, default=len(PROMPTS), help=f"number of prompts, at most {len(PROMPTS)} (default: all)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, secured_cluster(Path(folder)) as cluster:

        def all_gauges() -> dict[str, dict[str, float]]:
            return {each.name: gauges(cluster, each) for each in cluster.services}

        soak = Soak(cluster, 60 * options.minutes, options.cancelled, options.prompts)
        before = all_gauges()
        works = [soak.work_over_http if seed % 4 == 3 else soak.work for seed in range(options.clients)]
        threads = [threading.Thread(target=work, args=(seed,)) for seed, work in enumerate(works)]
        threads += [threading.Thread(target=soak.ask_for_more, args=(seed,)) for seed in range(GREEDY_CLIENTS)]
        if options.kill_every:
            threads.append(threading.Thread(target=soak.kill, args=(options.kill_every,)))
        samples: dict[str, list[tuple[float, Held]]] = {}

        def sample() -> None:
            gc.collect()
            pids = {each.name: each.process.pid for each in cluster.services if each.process}
            for name, pid in (pids | {"gateway": cluster.before.pid, "clients": os.getpid()}).items():
                if held := Held.of(pid):
                    samples.setdefault(name, []).append((soak.share, held))

        def files(name: str) -> bool:
            """Whether a process has as many open files as at first."""
            held = [each.files for _, each in samples[name]]
            return held[-1] == held[0]

        lived = ("verify a", "draft 1", "gateway", "clients")
        sample()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(10.0, soak.seconds / 30))
            sample()
        until, after = time.monotonic() + CLOSED_SECONDS, all_gauges()
        while not (after == before and all(map(files, lived))) and time.monotonic() < until:
            time.sleep(1.0)  # connections close, and a service that was killed last is found again
            healthcheck.http_failure(f"https://{cluster.gateway}", 5.0, cluster.ca)  # the gateway connects when asked
            sample()
            after = all_gauges()
    grown = report(samples)
    for name in before:
        print(f"{name}: gauges {json.dumps(before[name])} before, {json.dumps(after[name])} after")
    for each in soak.wrong[:20]:
        print(json.dumps(each))
    print(json.dumps(soak.counts))
    failures = [f"{len(soak.wrong)} completions are wrong or failed"] * bool(soak.wrong)
    failures += [f"{name} has other gauges" for name in before if before[name] != after[name]]
    failures += [f"{name} has other files" for name in lived if not files(name)]
    failures += [f"{name} grew by {share:.1%}" for name, share in grown.items() if share > options.growth]
    failures += ["no quota was reached"] * (not soak.counts["greedy, refused"])
    failures += ["nothing was resumed"] * (bool(options.kill_every) and not soak.counts["resumes"])
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def report(samples: dict[str, list[tuple[float, Held]]]) -> dict[str, float]:
    """Print each process's memory and files; return the relative growth of those that were not killed late."""
    grown = {}
    for name, each in samples.items():
        early = median(held.megabytes for share, held in each if FULL[0] <= share <= FULL[1])
        late = median(held.megabytes for share, held in each if 1 - EARLY / 2 <= share <= 1)
        files = [held.files for _, held in each]
        print(
            f"{name}: {early:.1f} MB half-way, {late:.1f} MB late ({late / early - 1:+.2%}), "
            f"files {files[0]} before, {max(files)} at most, {files[-1]} after"
        )
        if not name.endswith(("b", "2")):  # those may have been restarted
            grown[name] = late / early - 1
    return grown


if __name__ == "__main__":
    if os.environ.pop("GLIBC_TUNABLES", None) != PLAIN_MALLOC:  # read when a process starts
        os.execve(sys.executable, sys.orig_argv, os.environ | {"GLIBC_TUNABLES": PLAIN_MALLOC})
    sys.exit(main())
