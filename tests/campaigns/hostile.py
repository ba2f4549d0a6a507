"""Hostile traffic of every kind at once: `python -m tests.campaigns.hostile [--minutes 30] [--json FILE]`.

A gateway, draft services and a verify service run as processes. Eight well-behaved clients use them, four over gRPC and
four over HTTP, alternately alone and beside hostile traffic: connections that are silent or drip, messages and bodies
that are huge, compressed or malformed, calls that are cancelled or have no message, requests for huge answers, and
attempts to evade quotas. The campaign fails unless

- all tokens of the eight clients are right, none of their requests fails, and each kind of client (gRPC or HTTP,
  streamed or not) is at least 0.8 times as fast as alone;
- every port answers a health check on a new connection within a second, at any time;
- requests that must be refused are refused within a second, silent and dripping connections are closed in time, and no
  quota is exceeded;
- memory, threads and files of each process return to about their values from before.

The clients are alone before the hostile traffic and in its pauses, when only silent and dripping connections are left.
On a busy machine the second is stretched: by the ratio of wall-clock time to CPU time of a piece of work, its 90th
percentile while the clients are alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.campaigns import hostile_calls, hostile_frames, hostile_http
from tests.campaigns.hostile_clients import WAYS, GoodClient, expected_of
from tests.campaigns.hostile_site import CLIENTS, SITES, Held, Site, running_site
from tests.campaigns.hostile_targets import Answer, Kind, Target

KINDS = (hostile_http.KINDS, (*hostile_frames.KINDS, *hostile_calls.KINDS))  # one attacking process for each group
ANSWER_SECONDS = 1.0
SPEED = 0.8  # least relative speed of the well-behaved clients beside hostile traffic
MEGABYTES = 160.0  # largest growth of a process's memory afterwards
PEAK = 256.0  # largest growth of its peak memory meanwhile, in MB
THREADS = 4  # largest growth of its threads afterwards
PEAK_THREADS = 24  # largest growth of its threads meanwhile
FILES = 4
QUIET_SECONDS = 5.0
CYCLE_SECONDS = 120.0  # longest time between two pauses
SETTLE_SECONDS = 3.0
ASK_SECONDS = 0.5  # time between two health checks of a port
STRETCH_SECONDS = 0.005  # CPU time of one measurement of `stretch`
PULSE_SECONDS = 0.01  # CPU time of one measurement of `measure_load`
MOST_STRETCH = 5.0


@dataclass
class Told:
    """The answers to the requests of one kind to one target."""

    count: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def add(self, answer: Answer, patience: float) -> None:
        """Count an answer."""
        self.count += 1
        self.answers[answer.what] += 1
        if answer.must:
            self.slowest = max(self.slowest, answer.seconds)
        if answer.wrong:
            self.wrong.append(answer.wrong)
        elif answer.must and answer.seconds > patience:
            self.wrong.append(f"{answer.what} after {answer.seconds:.2f} s")


Answers = list[tuple[str, str, Answer]]


def chosen(group: int, names: Sequence[str]) -> list[Kind]:
    """The kinds of a process whose names contain one of `names`; without names, all kinds."""
    return [kind for kind in KINDS[group] if not names or any(name in kind.name for name in names)]


def attack(targets: dict[str, Target], group: int, names: Sequence[str], told: Connection) -> None:
    """Run an attacking process: for each duration received, send traffic of each kind and report the answers."""
    os.nice(15)
    kinds = chosen(group, names)
    pairs = [(kind, targets[name]) for kind in kinds for name in kind.targets]
    if any(kind.name == "adversarial JSON" for kind in kinds):
        for name in hostile_http.BODIES:
            hostile_http.body(name)
    if any(kind.name == "compressed messages" for kind in kinds):
        hostile_frames.bomb()
    told.send(None)
    cycle = 0
    while (seconds := told.recv()) is not None:
        over = threading.Event()
        answers: Answers = []
        cycle += 1
        senders = [
            threading.Thread(target=_send, args=(kind, target, f"{cycle}", over, answers)) for kind, target in pairs
        ]
        for thread in senders:
            thread.start()
        time.sleep(seconds)
        over.set()
        for thread in senders:
            thread.join()
        told.send(answers)


def _send(kind: Kind, target: Target, seed: str, over: threading.Event, answers: Answers) -> None:
    """Attack at the interval of the kind; attacks that take longer run side by side."""
    generator = random.Random(f"{seed} {kind.name} {target.name}")
    running = []
    over.wait(generator.random() * min(kind.every, 1.0))
    while not over.is_set():
        running.append(threading.Thread(target=_once, args=(kind, target, generator.random(), over, answers)))
        running[-1].start()
        over.wait(kind.every * stretch() if kind.every else None)
    for each in running:
        each.join()


def stretch() -> float:
    """Ratio of wall-clock time to CPU time; a busy machine gets attacks at longer intervals."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < STRETCH_SECONDS:
        pass
    return min(max((time.monotonic() - began) / STRETCH_SECONDS, 1.0), MOST_STRETCH)


def _once(kind: Kind, target: Target, seed: float, over: threading.Event, answers: Answers) -> None:
    try:
        for answer in kind.attack(target, random.Random(seed), over):
            answers.append((kind.name, target.name, answer))
    except (ConnectionRefusedError, TimeoutError) as error:
        answers.append((kind.name, target.name, Answer("no connection", wrong=f"no connection: {error}")))
    except OSError as error:  # the peer hung up
        answers.append((kind.name, target.name, Answer(type(error).__name__, must=False)))
    except Exception as error:
        answers.append((kind.name, target.name, Answer("failed", wrong=f"the attack itself failed: {error!r}")))


def measure_load(told: Connection) -> None:
    """Run a process that repeatedly measures wall-clock time / CPU time of work, until asked for the results."""
    loads = []
    while not told.poll(0.25):
        began, used = time.monotonic(), time.process_time()
        while time.process_time() - used < PULSE_SECONDS:
            pass
        loads.append((began, (time.monotonic() - began) / PULSE_SECONDS))
    told.send(loads)


@dataclass
class Watch:
    """Checks the health of a port repeatedly."""

    site: Site
    name: str
    over: threading.Event
    asked: list[tuple[float, str]] = field(default_factory=list)

    def run(self) -> None:
        while not self.over.wait(ASK_SECONDS):
            began = time.monotonic()
            try:
                reason = self.site.health(self.name, 5.0)
            except Exception as error:
                reason = repr(error)
            self.asked.append((time.monotonic() - began, reason))


@dataclass
class Report:
    """Results of the campaign on one site."""

    site: str
    seconds: float
    patience: float
    told: dict[tuple[str, str], Told]
    speeds: dict[str, tuple[float, float]]
    cpu: dict[str, tuple[float, float]]
    completions: int
    wrong: list[str]
    watches: dict[str, list[tuple[float, str]]]
    before: dict[str, Held]
    peaks: dict[str, Held]
    after: dict[str, Held]
    ended: list[str]
    least_speed: float = SPEED

    @property
    def failures(self) -> list[str]:
        """Descriptions of all failures."""
        found = [f"{way}: {beside / alone:.2f} times as fast as alone" for way, (alone, beside) in self._slow()]
        for way in WAYS:
            if wrong := [text for text in self.wrong if text.startswith(f"{way}: ")]:
                found.append(f"{len(wrong)} wrong or failed, first: {wrong[0]}")
        for name, asked in self.watches.items():
            bad = [f"{seconds:.2f} s {why}" for seconds, why in asked if why or seconds > self.patience]
            if bad:
                found.append(f"{name} is not well: {len(bad)} of {len(asked)} times, first {bad[0]}")
        for (kind, target), told in self.told.items():
            if told.wrong:
                found.append(f"{kind}, {target}: {len(told.wrong)} of {told.count} wrong, first: {told.wrong[0]}")
        for name, before in self.before.items():
            peak, after = self.peaks[name], self.after.get(name, before)
            for what, was, now, more in (
                ("MB", before.megabytes, after.megabytes, MEGABYTES),
                ("MB at most", before.megabytes, peak.peak, PEAK),
                ("threads", before.threads, after.threads, THREADS),
                ("threads at most", before.threads, peak.threads, PEAK_THREADS),
                ("files", before.files, after.files, FILES),
            ):
                if now > was + more:
                    found.append(f"{name}: {now:.0f} {what}, {was:.0f} before")
        return found + [f"{name} has ended" for name in self.ended]

    def _slow(self) -> list[tuple[str, tuple[float, float]]]:
        return [(way, both) for way, both in self.speeds.items() if both[1] < self.least_speed * both[0]]

    def show(self) -> None:
        """Print the tables."""
        print(f"\n== {self.site}: {self.seconds:.0f} s of hostile traffic; a second has {self.patience:.2f} s")
        rows = [("kind", "target", "sent", "slowest refusal", "wrong", "answers")]
        for (kind, target), told in sorted(self.told.items()):
            answers = ", ".join(f"{what}: {count}" for what, count in told.answers.most_common(5))
            rows.append((kind, target, str(told.count), f"{told.slowest:.2f} s", str(len(told.wrong)), answers))
        _table(rows)
        rows = [("clients that behave", "tokens/s alone", "beside", "ratio")]
        for way, (alone, beside) in self.speeds.items():
            rows.append((way, f"{alone:.0f}", f"{beside:.0f}", f"{beside / max(alone, 1e-9):.2f}"))
        _table(rows)
        for name, (alone, beside) in self.cpu.items():
            print(f"{name}: {alone:.2f} CPU s/s alone, {beside:.2f} beside")
        print(f"{self.completions} completions, {len(self.wrong)} wrong or failed")
        rows = [("port", "asked", "slowest", "failed")]
        for name, asked in self.watches.items():
            slowest = max((seconds for seconds, _ in asked), default=0.0)
            rows.append((name, str(len(asked)), f"{slowest:.2f} s", str(sum(bool(why) for _, why in asked))))
        _table(rows)
        then = ("at most", "after")
        rows = [("process", "MB before", *then, "threads", *then, "files", *then)]
        for name, before in self.before.items():
            peak, after = self.peaks[name], self.after.get(name, before)
            sizes = [f"{size:.0f}" for size in (before.megabytes, peak.peak, after.megabytes)]
            counts = [before.threads, peak.threads, after.threads, before.files, peak.files, after.files]
            rows.append((name, *sizes, *map(str, counts)))
        _table(rows)
        for failure in self.failures:
            print(f"FAILED: {failure}")
        print(f"{self.site}: {len(self.failures)} failures", flush=True)

    def to_json(self) -> dict[str, Any]:
        """All results as a JSON object."""
        told = {
            f"{kind}, {target}": {
                "sent": each.count,
                "answers": each.answers,
                "slowest": each.slowest,
                "wrong": len(each.wrong),
            }
            for (kind, target), each in self.told.items()
        }
        held = {name: [asdict(each[name]) for each in (self.before, self.peaks, self.after)] for name in self.after}
        watches = {
            name: {"asked": len(asked), "slowest": max((s for s, _ in asked), default=0.0)}
            for name, asked in self.watches.items()
        }
        return {
            **{"site": self.site, "seconds": self.seconds, "patience": self.patience, "kinds": told},
            **{"speeds": self.speeds, "completions": self.completions, "watches": watches, "held": held},
            "failures": self.failures,
        }


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def run_site(
    site: Site,
    seconds: float,
    names: Sequence[str],
    *,
    shared: bool = False,
    least_speed: float = SPEED,
    answer_seconds: float = ANSWER_SECONDS,
) -> Report:
    """Attack a site and report the results.

    Args:
        site: Site to attack.
        seconds: Duration of hostile traffic.
        names: Parts of the names of the kinds to use; without names, all kinds.
        shared: Whether the machine does other work; speed is then counted in tokens per CPU second of the services.
        least_speed: Least relative speed of the well-behaved clients beside hostile traffic.
        answer_seconds: Longest wait for a refusal and for an answer about health, on a machine without other load.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = []

    def start(target: Any, *arguments: Any) -> Connection:
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=target, args=(*arguments, there), daemon=True))
        processes[-1].start()
        return here

    load = start(measure_load)
    pipes = [start(attack, site.targets, group, names) for group in range(len(KINDS)) if chosen(group, names)]
    expected = expected_of(site)
    for pipe in pipes:
        pipe.recv()
    enough, over = threading.Event(), threading.Event()
    clients = [GoodClient(site, number, expected, enough) for number in range(CLIENTS)]
    watches = [Watch(site, name, over) for name in site.targets if name != "quota draft"]
    threads = [threading.Thread(target=each.run) for each in (*clients, *watches)]
    samples: dict[str, list[Held]] = {name: [] for name in site.processes}

    def sample() -> None:
        while not over.wait(0.5):
            for name, held in site.held().items():
                samples[name].append(held)

    answers: Answers = []
    alone, beside = [], []
    used: dict[str, list[float]] = {name: [0.0, 0.0] for name in site.processes}  # CPU seconds, alone and beside

    def phase(phases: list[tuple[float, float]], seconds: float) -> None:
        began, held = time.monotonic(), site.held()
        time.sleep(seconds)
        phases.append((began, time.monotonic()))
        for name, now in site.held().items():
            used[name][phases is beside] += now.cpu - held[name].cpu

    for thread in threads:
        thread.start()
    time.sleep(SETTLE_SECONDS)
    phase(alone, QUIET_SECONDS)
    site.forget_peaks()
    before = site.held()
    threads.append(threading.Thread(target=sample))
    threads[-1].start()
    left = seconds
    while left > 0:
        now = min(left, CYCLE_SECONDS)
        left -= now
        for pipe in pipes:
            pipe.send(now)
        phase(beside, now)
        time.sleep(SETTLE_SECONDS)
        phase(alone, QUIET_SECONDS)
        if left <= 0:
            enough.set()
        for pipe in pipes:
            answers += pipe.recv()
        if seconds - left <= CYCLE_SECONDS < seconds:  # growth up to the first of several pauses is no leak
            before = site.held()
    time.sleep(SETTLE_SECONDS)
    after = site.held()
    over.set()
    for thread in threads:
        thread.join()
    for pipe in (load, *pipes):
        pipe.send(None)
    loads = [each for when, each in load.recv() if any(begin <= when <= end for begin, end in alone)]
    for process in processes:
        process.join()
    patience = answer_seconds * max(1.0, sorted(loads)[len(loads) * 9 // 10])
    told: dict[tuple[str, str], Told] = {}
    for kind, target, answer in answers:
        told.setdefault((kind, target), Told()).add(answer, patience)

    def total(phases: Sequence[tuple[float, float]]) -> float:
        return sum(end - begin for begin, end in phases)

    def speed(way: str, phases: Sequence[tuple[float, float]]) -> float:
        theirs = [each for each in clients if each.way == way]
        return sum(each.speed(*phase) * (phase[1] - phase[0]) for each in theirs for phase in phases) / total(phases)

    peaks = {
        name: Held(
            *(max(getattr(each, what) for each in held) for what in ("megabytes", "peak", "threads", "files")),
        )
        for name, held in samples.items()
    }
    cpu = {name: (both[0] / total(alone), both[1] / total(beside)) for name, both in used.items()}
    unit = [sum(each) for each in zip(*cpu.values(), strict=True)]
    speeds = {way: (speed(way, alone), speed(way, beside)) for way in WAYS}
    if shared:
        alone_all, beside_all = (sum(each[place] for each in speeds.values()) for place in (0, 1))
        speeds = {"all": (alone_all / unit[0], beside_all / unit[1])}
    return Report(
        site.name,
        seconds,
        patience,
        told,
        speeds,
        cpu,
        sum(len(each.done) for each in clients),
        [text for each in clients for text in each.wrong],
        {each.name: each.asked for each in watches},
        before,
        peaks,
        after,
        [name for name, process in site.processes.items() if process.poll() is not None],
        least_speed,
    )


def main() -> int:
    """Run the campaign and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="minutes of hostile traffic, over all sites (default: %(default)g)"
    )
    parser.add_argument("--sites", default=",".join(SITES), help="sites to attack (default: %(default)s)")
    parser.add_argument("--kinds", default="", help="comma-separated parts of the names of kinds (default: all)")
    parser.add_argument(
        "--shared", action="store_true", help="measure speed by CPU seconds, because the machine does other work"
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=SPEED,
        metavar="RATIO",
        help="least ratio of the clients' speed beside hostile traffic; 0 means any (default: %(default)g)",
    )
    parser.add_argument(
        "--answer-seconds",
        type=float,
        default=ANSWER_SECONDS,
        metavar="SECONDS",
        help="longest wait for a refusal and for an answer about health, on a machine without other load"
        " (default: %(default)g)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the tables as JSON")
    options = parser.parse_args()
    sites = options.sites.split(",")
    reports = []
    for name in sites:
        with tempfile.TemporaryDirectory() as folder, running_site(name, Path(folder)) as site:
            names = [each for each in options.kinds.split(",") if each]
            seconds = 60 * options.minutes / len(sites)
            report = run_site(
                site,
                seconds,
                names,
                shared=options.shared,
                least_speed=options.speed,
                answer_seconds=options.answer_seconds,
            )
            reports.append(report)
            report.show()
    if options.json:
        options.json.write_text(json.dumps([report.to_json() for report in reports]) + "\n")
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
