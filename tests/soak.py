"""Many clients on services that are killed all the time: `python tests/soak.py [--minutes 30]`.

Two verify services and two draft services; one of them is killed every so often, and started anew. Every completion is
compared with the one that comes without a fault. Prints what went wrong, and what each process held over time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median

from faults import Cluster, Process, outcome, running_cluster

from dynatree.client import Client, Completion, DynaTreeError

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
        self._cluster = cluster
        self._until = time.monotonic() + seconds
        self._cancelled = cancelled
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._expected = {key: self._complete(cluster.client, *key) for key in itertools.product(PROMPTS, range(12))}

    def _complete(self, client: Client, prompt: str, number: int) -> Completion:
        return client.generate(prompt, **options_of(number))  # type: ignore[arg-type]

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._until

    def work(self, seed: int) -> None:
        """One client's completions, one after the other."""
        generator = random.Random(seed)
        addresses = [draft.address for draft in self._cluster.drafts]
        generator.shuffle(addresses)
        with Client(",".join(addresses), timeout=120.0, resume_timeout=60.0, connect_timeout=60.0) as client:
            while not self.over:
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
        """Kill one service after the other, and start it anew."""
        generator = random.Random(0)
        processes = [*self._cluster.verifies, *self._cluster.drafts]
        while not self.over:
            time.sleep(every)
            process = generator.choice(processes)
            process.signal(signal.SIGKILL)
            self.counts[f"killed {process.name}"] += 1
            process.restore()
            process.wait()


def held(process: Process) -> dict[str, float]:
    """A process's memory in MB, and its open files."""
    assert process.process is not None
    root = Path(f"/proc/{process.process.pid}")
    try:
        [line] = [each for each in (root / "status").read_text().splitlines() if each.startswith("VmRSS:")]
        return {"MB": int(line.split()[1]) / 1024, "files": len(list((root / "fd").iterdir()))}
    except (OSError, ValueError):
        return {}


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cancelled", type=float, default=0.3, help="share of completions (default: 0.3)")
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS", help="0: never")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder)) as cluster:
        soak = Soak(cluster, 60 * options.minutes, options.cancelled)
        threads = [threading.Thread(target=soak.work, args=(seed,)) for seed in range(options.clients)]
        if options.kill_every:
            threads.append(threading.Thread(target=soak.kill, args=(options.kill_every,)))
        for thread in threads:
            thread.start()
        samples: dict[str, list[dict[str, float]]] = {}
        while any(thread.is_alive() for thread in threads):
            time.sleep(10.0)
            for process in (*cluster.verifies, *cluster.drafts):
                samples.setdefault(process.name, []).append(held(process))
            print(json.dumps(soak.counts), flush=True)
        time.sleep(2.0)
        for process in (*cluster.verifies, *cluster.drafts):
            samples[process.name].append(held(process))
    for name, each in samples.items():
        memory, files = ([one[kind] for one in each if one] for kind in ("MB", "files"))
        early, late = memory[len(memory) // 6 : len(memory) // 3], memory[-len(memory) // 6 :]
        print(
            f"{name}: {median(early):.0f} MB early, {median(late):.0f} MB late; files {files[0]:.0f} to {files[-1]:.0f}"
        )
    for each in soak.wrong[:20]:
        print(json.dumps(each))
    print(json.dumps(soak.counts))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
