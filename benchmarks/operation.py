"""What TLS, tokens, metrics and traces cost: `python benchmarks/operation.py --prompts FILE --out FILE`.

Two pairs of services run side by side: one plain, and one with mutual TLS between draft and verify service, TLS and a
token for the client, metrics that are scraped, traces that are sent, and logs as JSON. Completions go to one and the
other in turns, so what the machine does meanwhile meets both. The figure is the ratio of their rates by prompt.
"""

from __future__ import annotations

import argparse
import gzip
import http.server
import io
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dynatree.bench.environment import environment
from dynatree.client import Client
from dynatree.serving import healthcheck

TOKEN = "measured-0123456789abcdef"
SCRAPE_SECONDS = 5.0
START_SECONDS = 300.0
POLICIES = ("autoregressive", "linear", "throughput")
PARTS = ("tls", "tokens", "metrics", "traces", "logs")


@dataclass(frozen=True)
class Service:
    """A process, and where it listens."""

    address: str
    process: subprocess.Popen[bytes]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, for localhost, and its key."""
    made, key = folder / "cert.pem", folder / "key.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", *curve, *names, "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def collector(received: list[bytes]) -> Iterator[str]:
    """The address of something that takes traces, and keeps them as they are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def serves(address: str, check: Sequence[str]) -> bool:
    """What the health check says, without its words."""
    with redirect_stderr(io.StringIO()):
        return healthcheck.main([address, *check]) == 0


@contextmanager
def service(arguments: Sequence[str], folder: Path, check: Sequence[str] = ()) -> Iterator[Service]:
    """A service on a free port, once it serves; `check` is what its health check needs."""
    address = f"localhost:{free_port()}"
    command = [sys.executable, "-m", "dynatree.cli.main", *arguments, "--listen", address]
    with (folder / f"{address}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until = time.monotonic() + START_SECONDS
            while not serves(address, check):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(Path(log.name).read_text()[-2000:])
                time.sleep(0.5)
            yield Service(address, process)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def pair(
    options: argparse.Namespace, verify: Sequence[str], draft: Sequence[str], check: Sequence[str], folder: Path
) -> Iterator[str]:
    """The address of the draft service of a pair with further options."""
    target = ["--target-model", options.target_model, *options.verify_options.split(), *verify]
    small = ["--draft-model", options.draft_model, *options.draft_options.split(), *draft]
    with (
        service(["verify", *target], folder, check) as verifying,
        service(["draft", "--verify", verifying.address, *small], folder, check) as drafting,
    ):
        yield drafting.address


@contextmanager
def secured_pair(
    options: argparse.Namespace, folder: Path, metrics: tuple[int, int], traces: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The address of the draft service of a pair with `options.parts`, and what its clients need."""
    verify, draft, check, client = list[str](), list[str](), list[str](), dict[str, Any]()
    if "tls" in options.parts:
        cert, key = map(str, certificate(folder))
        verify += ["--tls-cert", cert, "--tls-key", key, "--client-ca", cert]
        draft += ["--tls-cert", cert, "--tls-key", key, "--verify-ca", cert, "--verify-cert", cert, "--verify-key", key]
        check += ["--ca", cert, "--cert", cert, "--key", key]
        client["ca"] = cert
    if "tokens" in options.parts:
        (folder / "tokens").write_text(f"measured:{TOKEN}\n")
        (folder / "token").write_text(TOKEN)
        verify += ["--token-file", str(folder / "tokens")]
        draft += ["--token-file", str(folder / "tokens"), "--verify-token-file", str(folder / "token")]
        client["token"] = TOKEN
    if "metrics" in options.parts:
        verify += ["--metrics", f"localhost:{metrics[0]}"]
        draft += ["--metrics", f"localhost:{metrics[1]}"]
    both = ["--traces", traces] if "traces" in options.parts else []
    both += ["--log-format", "json"] if "logs" in options.parts else []
    with pair(options, [*both, *verify], [*both, *draft], check, folder) as address:
        yield address, client


@contextmanager
def scraped(ports: Sequence[int], ca: str | None) -> Iterator[None]:
    """Ask for metrics every few seconds, as Prometheus does; over TLS where there is an authority."""
    over, scheme = threading.Event(), "https" if ca else "http"
    context = ssl.create_default_context(cafile=ca) if ca else None

    def scrape() -> None:
        while not over.wait(SCRAPE_SECONDS):
            for port in ports:
                urllib.request.urlopen(f"{scheme}://localhost:{port}/metrics", context=context).read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rates(clients: Sequence[Client], prompt: str, policy: str, tokens: int, turn: int) -> list[float]:
    """Tokens a second of one completion by each client, who begins with another one each turn."""
    measured = [0.0] * len(clients)
    for number in range(len(clients)):
        place = (number + turn) % len(clients)
        started = time.perf_counter()
        completion = clients[place].generate(prompt, max_new_tokens=tokens, policy=policy, ignore_eos=True)
        measured[place] = len(completion.token_ids) / (time.perf_counter() - started)
    return measured


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-model", default="embedded")
    parser.add_argument("--draft-model", default="embedded")
    parser.add_argument("--prompts", type=Path, required=True, help="UTF-8 file of text")
    parser.add_argument("--count", type=int, default=20, help="number of prompts (default: 20)")
    parser.add_argument("--prompt-characters", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--verify-options", default="--threads 2", help="further options of the verify services")
    parser.add_argument("--draft-options", default="--threads 1", help="further options of the draft services")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to switch on (default: all)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="policies to measure (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    text = options.prompts.read_text(encoding="utf-8")
    step = len(text) // (options.count + 1)
    prompts = [text[step * number :][: options.prompt_characters] for number in range(1, options.count + 1)]
    traces: list[bytes] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        metrics = free_port(), free_port()
        secured, needs = stack.enter_context(
            secured_pair(options, folder, metrics, stack.enter_context(collector(traces)))
        )
        plain = stack.enter_context(pair(options, [], [], [], folder))
        stack.enter_context(scraped(metrics if "metrics" in options.parts else (), needs.get("ca")))
        clients = [stack.enter_context(Client(plain)), stack.enter_context(Client(secured, **needs))]
        runs = []
        for policy in options.policies:
            rates(clients, prompts[0], policy, options.max_new_tokens, 0)  # warm up
            for turn, prompt in enumerate(prompts):
                off, on = rates(clients, prompt, policy, options.max_new_tokens, turn)
                runs.append({"policy": policy, "prompt": turn, "off": round(off, 3), "on": round(on, 3)})
    report = {
        **vars(environment(threads=None, read_bandwidth=None)),
        "target": Path(options.target_model).name,
        "draft": Path(options.draft_model).name,
        "max_new_tokens": options.max_new_tokens,
        "parts": options.parts,
        "trace_bytes": sum(map(len, traces)),
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for policy in options.policies:
        lost = [100 * (1 - run["on"] / run["off"]) for run in runs if run["policy"] == policy]
        low, _, high = quantiles(lost, n=4)
        print(f"{policy}: on is {median(lost):.2f} % slower than off (quartiles {low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
