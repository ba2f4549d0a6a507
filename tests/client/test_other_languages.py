"""Tests clients in other languages: one generated from the protos alone, and OpenAI's own at the gateway."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree.client import Client, Completion
from tests.support.gateways import running_gateway
from tests.support.paths import ROOT

NODE_CLIENT = Path(__file__).parent / "node"
PROTOS = ROOT / "protos"
PROMPT = "It was a dark night, and the “old” house"


@pytest.fixture(scope="session")
def node_client(pytestconfig: pytest.Config) -> Path:
    """The folder of the Node client with its packages, kept in pytest's cache for the next run."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(NODE_CLIENT.iterdir()) if path.is_file()))
    folder = Path(pytestconfig.cache.mkdir(f"node-{digest.hexdigest()[:12]}"))
    installed = folder / "installed"
    if not installed.exists():
        for path in NODE_CLIENT.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        _run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"], folder)
        installed.touch()
    return folder


@pytest.mark.long
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.timeout(300)
def test_node_gets_the_completion_that_python_gets(node_client: Path, embedded_services: EmbeddedServices) -> None:
    output = _run(["node", "generate.mjs", str(PROTOS), embedded_services.draft_address, PROMPT, "24"], node_client)
    with Client(embedded_services.draft_address) as client:
        expected = client.generate(PROMPT, max_new_tokens=24)
    assert json.loads(output) == {
        "health": "SERVING",
        "text": expected.text,
        "tokenIds": list(expected.token_ids),
        "finishReason": f"FINISH_REASON_{expected.finish_reason.upper()}",
    }


@pytest.mark.long
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.timeout(300)
def test_openais_own_node_client_gets_the_grpc_clients_tokens(
    node_client: Path, embedded_services: EmbeddedServices
) -> None:
    with running_gateway(embedded_services.draft_address) as gateway:
        told = json.loads(_run(["node", "openai.mjs", f"{gateway.url}/v1", PROMPT], node_client))
    with Client(embedded_services.draft_address) as client:
        greedy = client.generate(PROMPT, max_new_tokens=24)
        first = client.generate(PROMPT, max_new_tokens=24, temperature=0.8, seed=7, n=2)
        stopped = client.generate(PROMPT, max_new_tokens=24, stop="the")
        logged = client.generate(PROMPT, max_new_tokens=4, log_probs=True)

    def whole(*completions: Completion) -> dict[str, object]:
        return {
            "texts": [each.text for each in completions],
            "tokenIds": [list(each.token_ids) for each in completions],
            "reasons": [each.finish_reason for each in completions],
            "logProbs": [list(each.log_probs) or None for each in completions],
            "tokens": sum(len(each.token_ids) for each in completions),
        }

    def refused(kind: str, status: int, code: str, param: str | None) -> dict[str, object]:
        return {"kind": kind, "status": status, "code": code, "param": param}

    assert told == {
        "greedy": whole(greedy),
        "streamed": {"text": greedy.text, "tokenIds": list(greedy.token_ids), "reason": "length", "usage": 24},
        "seeded": whole(first, *first.alternatives),
        "stopped": whole(stopped),
        "logged": whole(logged),
        "wrong": refused("BadRequestError", 400, "invalid_value", "top_p"),
        "missing": refused("NotFoundError", 404, "model_not_found", "model"),
        "chat": refused("BadRequestError", 400, "invalid_value", None),
    }


def _run(command: list[str], folder: Path) -> str:
    """Return the standard output of a command that must succeed."""
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=240, check=False
    )
    assert finished.returncode == 0, f"{' '.join(command)}:\n{finished.stdout}{finished.stderr}"
    return finished.stdout
