"""Many clients on services that are killed all the time: `python tests/soak.py [--minutes 30]`.

Two verify services and two draft services; one of them is killed every so often, and started anew. Every completion is
compared with the one that comes without a fault. After a sixth of the time only the second of each is killed, so that
the first of each shows whether memory grows. Prints what went wrong, and what each process held over time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from faults import Cluster, Process, outcome, running_cluster

from dynatree.client import Client, Completion, DynaTreeError

EARLY = 1 / 6  # of the time: memory may grow, and every service is killed
GROWTH = 0.01  # of memory, thereafter
GAUGES = ("dynatree_num_requests_", "dynatree_kv_cache_usage_perc", "dynatree_verify_replicas")
PROMPTS = ("Call me", "It was a bright cold morning, and the captain", "The sea", "She said that", "1, 2, 3,")


def options_of(number: int) -> dict[str, object]:
    """The options of completion `number`; a few kinds, so that each can be known beforehand."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 7},
        {"repetition_penalty": 1.2},
        {"stop": ["the"]},
        {"temperature": 0.7, "seed": 3, "n": 2},
        {"log_probs": True},
    ]
    return {"max_new_tokens": 16 + 8 * (number % 4), "ignore_eos": True} | kinds[number % len(kinds)]


class Soak:
    """The clients' work, and what came of it."""

    def __init__(self, cluster: Cluster, seconds: float, cancelled: float) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, object]] = []
        self.seconds = seconds
        self._cluster = cluster
        self._cancelled = cancelled
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._expected = {key: self._complete(cluster.client, *key) for key in itertools.product(PROMPTS, range(12))}
        self._started = time.monotonic()

    def _complete(self, client: Client, prompt: str, number: int) -> Completion:
        return client.generate(prompt, **options_of(number))  # type: ignore[arg-type]

    @property
    def share(self) -> float:
        """How much of the time is over; 1 at its end."""
        return (time.monotonic() - self._started) / self.seconds

    def work(self, seed: int) -> None:
        """One client's completions, one after the other."""
        generator = random.Random(seed)
        addresses = [draft.address for draft in self._cluster.drafts]
        generator.shuffle(addresses)
        with Client(",".join(addresses), timeout=120.0, resume_timeout=60.0, connect_timeout=60.0) as client:
            while self.share < 1:
                with self._lock:
                    number = next(self._numbers)
                key = generator.choice(PROMPTS), number % 12
                if generator.random() < self._cancelled:
                    self._cancel(client, *key, generator.randrange(1, 4))
                else:
                    self._check(client, *key)

    def _cancel(self, client: Client, prompt: str, number: int, chunks: int) -> None:
        try:
            with client.stream(prompt, **options_of(number)) as stream:  # type: ignore[arg-type]
                for _ in itertools.islice(stream, chunks):
                    pass
            self.counts["cancelled"] += 1
        except DynaTreeError as error:
            self.counts[f"failed: {error.code.name}"] += 1

    def _check(self, client: Client, prompt: str, number: int) -> None:
        try:
            completion = self._complete(client, prompt, number)
        except DynaTreeError as error:
            self.counts[f"failed: {error.code.name}"] += 1
            self.wrong.append({"prompt": prompt, "options": options_of(number), "error": str(error)})
            return
        self.counts["completed"] += 1
        self.counts["resumes"] += completion.stats.resumes
        if outcome(completion) != outcome(self._expected[prompt, number]):
            self.counts["wrong"] += 1
            self.wrong.append({"prompt": prompt, "options": options_of(number), "text": completion.text})

    def kill(self, every: float) -> None:
        """Kill one service after the other, and start it anew; the next is killed once that one is up."""
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
    """What a process holds."""

    megabytes: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Held | None:
        """What process `pid` holds now, None if it is gone."""
        root = Path(f"/proc/{pid}")
        try:
            status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
            return cls(int(status["VmRSS"].split()[0]) / 1024, len(list((root / "fd").iterdir())))
        except (OSError, KeyError):
            return None


def gauges(process: Process) -> dict[str, float]:
    """The gauges of a service that say what it holds."""
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith(GAUGES))}


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cancelled", type=float, default=0.3, help="share of completions (default: 0.3)")
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS", help="0: never")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), metrics=True) as cluster:
        processes = (*cluster.verifies, *cluster.drafts)
        soak = Soak(cluster, 60 * options.minutes, options.cancelled)
        before = {each.name: gauges(each) for each in processes}
        threads = [threading.Thread(target=soak.work, args=(seed,)) for seed in range(options.clients)]
        if options.kill_every:
            threads.append(threading.Thread(target=soak.kill, args=(options.kill_every,)))
        samples: dict[str, list[tuple[float, Held]]] = {}

        def sample() -> None:
            pids = {each.name: each.process.pid for each in processes if each.process} | {"clients": os.getpid()}
            for name, pid in pids.items():
                if held := Held.of(pid):
                    samples.setdefault(name, []).append((soak.share, held))

        sample()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(10.0)
            sample()
            print(json.dumps(soak.counts), flush=True)
        time.sleep(5.0)
        sample()
        after = {each.name: gauges(each) for each in processes}
    grown = report(samples)
    for name in before:
        print(f"{name}: gauges {json.dumps(before[name])} before, {json.dumps(after[name])} after")
    for each in soak.wrong[:20]:
        print(json.dumps(each))
    print(json.dumps(soak.counts))
    return 1 if soak.wrong or before != after or grown > GROWTH else 0


def report(samples: dict[str, list[tuple[float, Held]]]) -> float:
    """Print what each process held; by what share the one that lived on and grew most did."""
    most = 0.0
    for name, each in samples.items():
        early = median(held.megabytes for share, held in each if EARLY <= share <= 2 * EARLY)
        late = median(held.megabytes for share, held in each if share >= 1 - EARLY / 2)
        files = [held.files for _, held in each]
        print(
            f"{name}: {early:.1f} MB early, {late:.1f} MB late ({late / early - 1:+.2%}), "
            f"files {files[0]} before, {max(files)} at most, {files[-1]} after"
        )
        if not name.endswith(("b", "2")):  # those that were killed are younger
            most = max(most, late / early - 1)
    return most


if __name__ == "__main__":
    sys.exit(main())
