"""The dashboard with figures of real services: `python tests/dashboard_picture.py`; needs Debian's `prometheus`.

Two verify services and two draft services serve many clients, some of them through a gateway, and one of the services
is killed every twenty seconds. A real Prometheus scrapes them and answers every query of deploy/grafana/dynatree.json;
docs/pictures/dashboard.png shows six of its panels. Prints the queries that gave nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import re
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
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import matplotlib
import yaml
from faults import Process, free_address, running_cluster
from gateways import running_gateway
from matplotlib.figure import Figure
from soak import Soak

from dynatree.bench import plots

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "dynatree.json"
OUT = ROOT / "docs" / "pictures" / "dashboard.png"
SCRAPE_SECONDS = 1
RATE_INTERVAL = "10s"  # Grafana's $__rate_interval: at least four scrapes
START_SECONDS = 30.0
HTTP_CLIENTS = 4
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
UNITS = {"s": (1.0, "s"), "percentunit": (1e2, "%")}  # of Grafana: by what a value is multiplied, and its name then

Line = tuple[str, list[float], list[float]]  # name, seconds, values


@contextmanager
def prometheus(processes: Sequence[Process], gateway: str, folder: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes these services, and the gateway at this address."""
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
    """Ask the gateway at this address for one completion after another; the dashboard shows those that fail."""
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
    """What Prometheus answers.

    Raises:
        ValueError: It refuses the query.
    """
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise ValueError(f"{parameters}: {error.read().decode()}") from error


def variables(url: str, dashboard: Any) -> dict[str, str]:
    """The dashboard's variables as Grafana fills them in: every value, as a pattern."""
    values = {"__rate_interval": RATE_INTERVAL}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            found = ask(url, f"label/{label}/values", **{"match[]": metric})
            values[variable["name"]] = "|".join(map(re.escape, found)).replace("\\", "\\\\")
    return values


def filled(query: str, values: dict[str, str]) -> str:
    """A query with its variables' values."""
    return re.sub(r"\$(\w+)", lambda name: values[name[1]], query)


def answered(url: str, panel: Any, values: dict[str, str], begin: float, end: float) -> tuple[list[Line], list[str]]:
    """The lines of a panel over this time, and the queries that gave nothing."""
    found, empty = [], []
    for target in panel["targets"]:
        query = filled(target["expr"], values)
        series = ask(url, "query_range", query=query, start=str(begin), end=str(end), step=f"{SCRAPE_SECONDS}s")
        found += [line_of(each, begin, target["legendFormat"]) for each in series["result"]]
        empty += [] if series["result"] else [f"{panel['title']}: {query}"]
    return found, empty


def line_of(series: Any, begin: float, legend: str) -> Line:
    """One series: its name, seconds since the begin, and values, with a gap where the service was away."""
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
    """The panels with their lines, each legend between the title and the axes."""
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


def main() -> int:
    """Serve, scrape and draw; the exit status."""
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
        soak, begin = Soak(cluster, 60 * options.minutes, cancelled=0.2), time.time()
        threads = [threading.Thread(target=soak.work, args=(seed,)) for seed in range(options.clients)]
        threads += [
            threading.Thread(target=complete, args=(address, 60 * options.minutes, seed))
            for seed in range(HTTP_CLIENTS)
        ]
        threads.append(threading.Thread(target=soak.kill, args=(20.0,)))
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
    print(json.dumps(soak.counts))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
