"""What the gateway costs: `python benchmarks/gateway.py --prompts FILE --out FILE`.

One pair of services, and a gateway before it. The same completions are streamed through the gRPC client library and
through the gateway in turns, so what the machine does meanwhile meets both. The figures are, by prompt, how much later
the first token and the last come over HTTP.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from dynatree.bench.environment import environment
from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import service_pair
from dynatree.client import Client

START_SECONDS = 600.0
Times = tuple[float, float, str]  # to the first text, to the end, in seconds; and the text


@contextmanager
def gateway(server: str) -> Iterator[http.client.HTTPConnection]:
    """A connection, which is kept, to a gateway before the draft service at `server`."""
    command = [sys.executable, "-m", "dynatree.cli.main", "gateway", "--server", server, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = urlsplit(process.stderr.readline().split()[-1])
        connection = http.client.HTTPConnection(url.hostname or "", url.port)
        yield connection
        connection.close()
    finally:
        process.terminate()
        process.communicate()


def over_grpc(client: Client, prompt: str, options: argparse.Namespace) -> Times:
    """A completion through the client library."""
    began = time.perf_counter()
    first, text = 0.0, ""
    stream = client.stream(prompt, max_new_tokens=options.max_new_tokens, ignore_eos=True, policy=options.policy)
    for chunk in stream:
        if chunk.text and not text:
            first = time.perf_counter() - began
        text += chunk.text
    return first, time.perf_counter() - began, text


def over_http(connection: http.client.HTTPConnection, prompt: str, options: argparse.Namespace) -> Times:
    """The same completion through the gateway."""
    body = {"prompt": prompt, "max_tokens": options.max_new_tokens, "temperature": 0, "ignore_eos": True}
    sent = json.dumps({**body, "policy": options.policy, "stream": True})
    began = time.perf_counter()
    first, text = 0.0, ""
    connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"the gateway answered {answer.status}: {answer.read().decode()}")
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        added = "".join(choice["text"] for choice in event["choices"])
        if added and not text:
            first = time.perf_counter() - began
        text += added
    return first, time.perf_counter() - began, text


def main() -> int:
    """Measure, write the report and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="UTF-8 file of text to cut prompts from"
    )
    parser.add_argument("--prompt-characters", type=int, default=400)
    parser.add_argument("--count", type=int, default=40, help="number of prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--policy", default="throughput")
    parser.add_argument("--target-model", default="embedded")
    parser.add_argument("--draft-model", default="embedded")
    parser.add_argument("--draft-threads", type=int, default=1, help="threads of the draft service")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    text = options.prompts.read_text(encoding="utf-8")
    step = len(text) // (options.count + 1)
    prompts = [text[step * number :][: options.prompt_characters] for number in range(1, options.count + 1)]
    verify, draft = pair_settings(options.target_model, options.draft_model, prefix_cache="off", history_tokens=0)
    draft = replace(draft, model=replace(draft.model, threads=options.draft_threads))
    runs = []
    with service_pair(verify, draft, START_SECONDS) as pair, gateway(pair.address) as connection:
        for turn, prompt in enumerate([prompts[0], *prompts]):  # the first is for warmth
            times = {}
            for way in ("grpc", "http") if turn % 2 else ("http", "grpc"):
                times[way] = (
                    over_grpc(pair.client, prompt, options) if way == "grpc" else over_http(connection, prompt, options)
                )
            if times["grpc"][2] != times["http"][2]:
                raise SystemExit(f"the texts of prompt {turn} differ")
            if turn:
                runs.append(
                    {way: {"first": round(each[0], 6), "last": round(each[1], 6)} for way, each in times.items()}
                )
    report = {
        **vars(environment(threads=None, read_bandwidth=None)),
        "target": Path(options.target_model).name,
        "draft": Path(options.draft_model).name,
        "policy": options.policy,
        "max_new_tokens": options.max_new_tokens,
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    later = [1000 * (run["http"]["first"] - run["grpc"]["first"]) for run in runs]
    slower = [100 * (run["http"]["last"] / run["grpc"]["last"] - 1) for run in runs]
    for what, values, unit in (("the first token comes later by", later, "ms"), ("it takes longer by", slower, "%")):
        low, _, high = quantiles(values, n=4)
        print(f"{what} {median(values):.2f} {unit} (quartiles {low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
