"""A client in another language, made from the protos alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree.client import Client

NODE_CLIENT = Path(__file__).parent / "node"
PROTOS = Path(__file__).parent.parent / "protos"
PROMPT = "It was a dark night, and the “old” house"


@pytest.fixture(scope="session")
def node_client(pytestconfig: pytest.Config) -> Path:
    """The folder of the Node client, its packages installed; kept in pytest's cache for the next run."""
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


def _run(command: list[str], folder: Path) -> str:
    """The standard output of a command that must succeed."""
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=240, check=False
    )
    assert finished.returncode == 0, f"{' '.join(command)}:\n{finished.stdout}{finished.stderr}"
    return finished.stdout
