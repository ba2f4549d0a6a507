"""Test two draft and two verify services in containers: `python -m tests.campaigns.container_spread`.

It needs Docker with compose v2.

Thirty concurrent completions must spread over all services. None may be refused while one verify service is full. A
third verify service, added while completions run, must be used within a minute. The campaign prints the spread, and
removes the containers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from dynatree.client import Client, DynaTreeError
from dynatree.v1 import verify_pb2
from tests.support.grpc_proxy import VERIFY
from tests.support.paths import ROOT

PORTS = "50151-50152"
SERVERS = "localhost:50151,localhost:50152"
SESSIONS = 30
PROMPT = "It was a bright cold morning, and the captain"
COUNTED = {"draft": "dynatree_generation_tokens_total", "verify": "dynatree_committed_tokens_total"}
METRICS = {"draft": 9101, "verify": 9102}


def compose(*arguments: str) -> str:
    """Run a compose command and return its output."""
    command = ["docker", "compose", "--project-name", "dynatree-spread", *arguments]
    environment = os.environ | {"DYNATREE_GRPC_PORT": PORTS}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout


def containers(service: str) -> dict[str, str]:
    """The addresses of a service's containers by name, reachable from this machine."""
    found = {}
    for name in compose("ps", "--quiet", service).split():
        inspected = json.loads(subprocess.run(["docker", "inspect", name], capture_output=True, check=True).stdout)[0]
        [network] = inspected["NetworkSettings"]["Networks"].values()
        found[inspected["Name"].strip("/")] = network["IPAddress"]
    return found


def tokens(service: str) -> dict[str, float]:
    """Number of tokens that each of a service's containers has made."""
    made = {}
    for name, address in containers(service).items():
        with urllib.request.urlopen(f"http://{address}:{METRICS[service]}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        made[name] = next(float(line.split()[1]) for line in lines if line.startswith(f"{COUNTED[service]} "))
    return made


def spread(service: str, before: dict[str, float]) -> str:
    """The containers' shares of a service's tokens since the counts `before`."""
    made = {name: total - before.get(name, 0.0) for name, total in tokens(service).items()}
    whole = sum(made.values()) or 1.0
    return ", ".join(f"{name} {count:.0f} ({count / whole:.0%})" for name, count in sorted(made.items()))


def complete_many(client: Client) -> list[str]:
    """Run `SESSIONS` completions at once; return the errors."""

    def one(number: int) -> str:
        try:
            client.generate(f"{PROMPT} {number}", max_new_tokens=64, ignore_eos=True)
        except DynaTreeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(SESSIONS) as pool:
        return [error for error in pool.map(one, range(SESSIONS)) if error]


@contextmanager
def full(address: str, sessions: int) -> Iterator[None]:
    """Hold `sessions` sessions of a verify service within a context."""
    over = threading.Event()
    with grpc.insecure_channel(f"{address}:50052") as channel:
        asked = channel.unary_unary("/dynatree.v1.VerifyService/GetModelInfo")(b"")
        model = verify_pb2.VerifyServiceGetModelInfoResponse.FromString(asked).model

        def requests() -> Iterator[bytes]:
            opening = verify_pb2.OpenSession(prompt_ids=[5], max_new_tokens=3, draft=model)
            yield verify_pb2.VerifyRequest(open=opening).SerializeToString()
            over.wait(300)

        calls: list[Any] = [channel.stream_stream(VERIFY)(requests()) for _ in range(sessions)]
        for call in calls:
            next(call)
        try:
            yield
        finally:
            over.set()
            for call in calls:
                call.cancel()


def main() -> int:
    """Run the campaign and return the exit status."""
    failed: list[str] = []
    try:
        compose("up", "--wait", "--build", "--scale", "verify=2", "--scale", "draft=2", "draft")
        with Client(SERVERS) as client:
            complete_many(client)  # warm up costs and caches
            before = {service: tokens(service) for service in COUNTED}
            failed += complete_many(client)
            for service in COUNTED:
                print(f"{SESSIONS} completions: {spread(service, before[service])}", flush=True)
            before = {service: tokens(service) for service in COUNTED}
            name, address = next(iter(containers("verify").items()))
            with full(address, 16):
                failed += complete_many(client)
            print(f"{name} full, {len(failed)} refused: {spread('verify', before['verify'])}", flush=True)
            compose("up", "--wait", "--no-recreate", "--scale", "verify=3", "--scale", "draft=2", "draft")
            started, known = time.monotonic(), set(before["verify"])
            while time.monotonic() - started < 60:
                failed += complete_many(client)
                new = {name: made for name, made in tokens("verify").items() if name not in known}
                if all(new.values()):
                    print(f"added {', '.join(new)}: used after {time.monotonic() - started:.0f} s", flush=True)
                    break
            else:
                failed.append("the added verify service was not used within a minute")
    finally:
        compose("down", "--volumes")
    for error in failed:
        print(error)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
