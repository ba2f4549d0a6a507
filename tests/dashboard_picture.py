"""The dashboard with figures of real services: `python tests/dashboard_picture.py`; needs Debian's `prometheus`.

Two verify services and two draft services serve many clients, some of them through a gateway, and one of the services
is killed every twenty seconds. A real Prometheus scrapes them and answers every query of deploy/grafana/dynatree.json;
docs/pictures/dashboard.png shows the panels as the file lays them out. Prints the queries that gave nothing.
"""

from __future__ import annotations

import argparse
import json
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import matplotlib
import yaml
from faults import Process, free_address, running_cluster
from gateways import running_gateway
from matplotlib.axes import Axes
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
COLUMNS = 24  # of Grafana's grid
WIDTH, ROW_HEIGHT = 16.0, 0.24  # inches
MOST_LINES = 8  # with a name in a panel's legend


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


def draw(url: str, begin: float, end: float) -> tuple[Figure, list[str]]:
    """The dashboard over this time, and the queries that gave nothing."""
    dashboard = json.loads(DASHBOARD.read_text())
    values, empty = variables(url, dashboard), []
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * rows))
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            left, top = place["x"] / COLUMNS, 1 - place["y"] / rows
            if panel["type"] == "row":
                figure.text(0.01, top - 0.8 / rows, panel["title"], fontsize=11, fontweight="bold")
                continue
            width, height = place["w"] / COLUMNS, place["h"] / rows
            axes = figure.add_axes((left + 0.03, top - height + 1.1 / rows, width - 0.04, height - 2.2 / rows))
            for target in panel["targets"]:
                query = filled(target["expr"], values)
                series = ask(url, "query_range", query=query, start=str(begin), end=str(end), step=f"{SCRAPE_SECONDS}s")
                if not series["result"]:
                    empty.append(f"{panel['title']}: {query}")
                for each in series["result"]:
                    add_line(axes, each, begin, target["legendFormat"])
            finish(axes, panel)
    return figure, empty


def add_line(axes: Axes, series: Any, begin: float, legend: str) -> None:
    """One series, over seconds."""
    labels = series["metric"]
    name = re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), legend)
    seconds = [float(at) - begin for at, _ in series["values"]]
    axes.plot(seconds, [float(value) for _, value in series["values"]], label=name, linewidth=1.0)


def finish(axes: Axes, panel: Any) -> None:
    """Title, unit and legend of a panel."""
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    axes.set_title(f"{panel['title']} ({unit})" if unit != "short" else panel["title"], loc="left", fontsize=8)
    axes.tick_params(labelsize=6)
    axes.set_ylim(bottom=0)
    if 0 < len(axes.lines) <= MOST_LINES:
        axes.legend(fontsize=6, loc="upper left")


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
        figure, empty = draw(url, begin, time.time())
    figure.savefig(options.out, dpi=80)
    for query in empty:
        print(f"no figures: {query}")
    print(json.dumps(soak.counts))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
