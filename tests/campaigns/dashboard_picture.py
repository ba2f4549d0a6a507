"""Draw the dashboard with figures of real services: `python -m tests.campaigns.dashboard_picture`.

It needs Debian's `prometheus`.

Two verify services and two draft services serve many clients, some of them through a gateway, and one of the services
is killed every twenty seconds. A real Prometheus scrapes them and answers every query of deploy/grafana/dynatree.json.
docs/pictures/dashboard.png shows six of its panels. The campaign prints the queries with empty results.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import matplotlib
import yaml
from matplotlib.figure import Figure

from dynatree.bench import plots
from dynatree.client import DynaTreeError
from tests.support.faults import PROMPT, Cluster, Process, free_address, running_cluster
from tests.support.gateways import running_gateway
from tests.support.paths import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "dynatree.json"
OUT = ROOT / "docs" / "pictures" / "dashboard.png"
SCRAPE_SECONDS = 1
RATE_INTERVAL = "10s"  # Grafana's $__rate_interval: at least four scrapes
START_SECONDS = 30.0
HTTP_CLIENTS = 4
KILL_SECONDS = 20.0
LEFT_EARLY = 0.2  # share of completions
SHOWN = (
    "Tokens per second",
    "Time to first token",
    "Tokens per round",
    "Share of a round",
    "Sessions by verify service",
    "Resumes",
)
COLUMNS = 2
SIZE = (8.0, 7.2)  # inches
UNITS = {"s": (1.0, "s"), "percentunit": (1e2, "%")}  # Grafana's units: factor and name in the picture

Line = tuple[str, list[float], list[float]]  # name, seconds, values


@contextmanager
def prometheus(processes: Sequence[Process], gateway: str, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes these services and the gateway at this address; yield its URL."""
    targets = {job: [each.metrics for each in processes if job in each.name] for job in ("verify", "draft")}
    targets["gateway"] = [gateway]
    jobs = [{"job_name": job, "static_configs": [{"targets": each}]} for job, each in targets.items()]
    config, address = folder / "prometheus.yaml", free_address()
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": jobs}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'series'}"]
    with (folder / "prometheus.log").open("wb") as log:
        running = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            url, until = f"http://{address}", time.monotonic() + START_SECONDS
            while not is_ready(url):
                if running.poll() is not None or time.monotonic() > until:
                    raise SystemExit(Path(log.name).read_text()[-2000:])
                time.sleep(0.2)
            yield url
        finally:
            running.terminate()
            running.wait()


def complete(gateway: str, seconds: float, seed: int) -> None:
    """Ask the gateway at this address for one completion after another; failures show on the dashboard only."""
    headers, until, number = {"Content-Type": "application/json"}, time.monotonic() + seconds, 0
    while time.monotonic() < until:
        number += 1
        body = {"prompt": f"Client {seed} asked for story {number}", "max_tokens": 24, "stream": number % 2 == 0}
        asked = urllib.request.Request(f"http://{gateway}/v1/completions", json.dumps(body).encode(), headers)
        with suppress(OSError), urllib.request.urlopen(asked, timeout=60.0) as answer:
            answer.read()


def is_ready(url: str) -> bool:
    """Whether Prometheus answers queries."""
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=1.0):
            return True
    except OSError:
        return False


def ask(url: str, path: str, **parameters: str) -> Any:
    """Prometheus's answer to a query.

    Raises:
        ValueError: Prometheus refuses the query.
    """
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise ValueError(f"{parameters}: {error.read().decode()}") from error


def variables(url: str, dashboard: Any) -> dict[str, str]:
    """The dashboard's variables as Grafana fills them in: each as a pattern that matches all its values."""
    values = {"__rate_interval": RATE_INTERVAL}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            found = ask(url, f"label/{label}/values", **{"match[]": metric})
            values[variable["name"]] = "|".join(map(re.escape, found)).replace("\\", "\\\\")
    return values


def filled(query: str, values: dict[str, str]) -> str:
    """A query with its variables replaced by their values."""
    return re.sub(r"\$(\w+)", lambda name: values[name[1]], query)


def answered(url: str, panel: Any, values: dict[str, str], begin: float, end: float) -> tuple[list[Line], list[str]]:
    """The lines of a panel from `begin` to `end`, and the queries with empty results."""
    found, empty = [], []
    for target in panel["targets"]:
        query = filled(target["expr"], values)
        series = ask(url, "query_range", query=query, start=str(begin), end=str(end), step=f"{SCRAPE_SECONDS}s")
        found += [line_of(each, begin, target["legendFormat"]) for each in series["result"]]
        empty += [] if series["result"] else [f"{panel['title']}: {query}"]
    return found, empty


def line_of(series: Any, begin: float, legend: str) -> Line:
    """One series: its name, its seconds since `begin` and its values, with gaps while the service was down."""
    labels = series["metric"]
    name = re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), legend)
    seconds, values = [], []
    for at, value in series["values"]:
        if seconds and float(at) - begin - seconds[-1] > 1.5 * SCRAPE_SECONDS:
            seconds.append(seconds[-1] + SCRAPE_SECONDS)
            values.append(math.nan)
        seconds.append(float(at) - begin)
        values.append(float(value))
    return name, seconds, values


def draw(panels: Sequence[tuple[Any, list[Line]]]) -> Figure:
    """Draw the panels with their lines, with each legend between the title and the axes."""
    with matplotlib.rc_context(plots.STYLE | {"axes.grid": True, "axes.grid.axis": "y"}):
        figure = Figure(figsize=SIZE, layout="constrained")
        grid = figure.subplots(len(panels) // COLUMNS, COLUMNS, sharex=True).flatten()
        for axes, (panel, lines) in zip(grid, panels, strict=True):
            scale, unit = UNITS.get(panel["fieldConfig"]["defaults"].get("unit", ""), (1.0, ""))
            for (name, seconds, values), colour in zip(lines, cycle(plots.COLOURS)):
                axes.plot(seconds, [scale * value for value in values], label=name, color=colour, linewidth=1.3)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{panel['title']} ({unit})" if unit else panel["title"], pad=20)
            names = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.97), "ncols": 4, "handlelength": 1.2}
            axes.legend(fontsize=8, columnspacing=1.2, borderaxespad=0.2, **names)
        for axes in grid[-COLUMNS:]:
            axes.set_xlabel("seconds")
    return figure


def work(cluster: Cluster, seconds: float, seed: int) -> None:
    """Request completions over gRPC until the time is over, and leave some of them early."""
    generator, until = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(DynaTreeError), cluster.client.stream(PROMPT, max_new_tokens=16 + 8 * (seed % 4)) as stream:
            for _ in islice(stream, 3 if generator.random() < LEFT_EARLY else None):
                pass


def kill(cluster: Cluster, seconds: float) -> None:
    """Kill one service after the other, and start it again."""
    generator, until = random.Random(0), time.monotonic() + seconds
    while time.monotonic() + KILL_SECONDS < until:
        time.sleep(KILL_SECONDS)
        process = generator.choice([*cluster.verifies, *cluster.drafts])
        process.signal(signal.SIGKILL)
        process.restore()
        process.wait()


def main() -> int:
    """Serve, scrape and draw; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        running_cluster(Path(name), metrics=True) as cluster,
        running_gateway(",".join(draft.address for draft in cluster.drafts)) as gateway,
        prometheus((*cluster.verifies, *cluster.drafts), address := urlsplit(gateway.url).netloc, Path(name)) as url,
    ):
        seconds, begin = 60 * options.minutes, time.time()
        threads = [threading.Thread(target=work, args=(cluster, seconds, seed)) for seed in range(options.clients)]
        threads += [threading.Thread(target=complete, args=(address, seconds, seed)) for seed in range(HTTP_CLIENTS)]
        threads.append(threading.Thread(target=kill, args=(cluster, seconds)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dashboard, end = json.loads(DASHBOARD.read_text()), time.time()
        values, panels = variables(url, dashboard), {}
        for panel in (each for each in dashboard["panels"] if each["type"] != "row"):
            lines, empty = answered(url, panel, values, begin, end)
            panels[panel["title"]] = (panel, lines)
            for query in empty:
                print(f"no figures: {query}")
    draw([panels[title] for title in SHOWN]).savefig(options.out, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
