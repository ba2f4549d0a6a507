"""Tests the gateway against its own OpenAPI description."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.gateway.test_gateway_chats import TEMPLATE
from tests.support.gateways import running_gateway
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.paths import ROOT
from tests.support.services import running_services

pytestmark = pytest.mark.long


def run(*command: str, folder: Path) -> None:
    """Run a command in a folder; on failure, show its output."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250)
    assert done.returncode == 0, done.stdout


@pytest.fixture(name="described")
def described_fixture(tmp_path: Path) -> Iterator[str]:
    """A gateway for a pair with a chat template and so short a context that every chat ends soon."""
    target = save_random_model(tmp_path / "target", "llama", seed=3)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=4)
    with (
        running_services(tmp_path, target, draft, target_context=128, draft_context=128) as services,
        running_gateway(services.draft_address) as gateway,
    ):
        yield gateway.url


def test_a_gateway_against_its_own_description(described: str, tmp_path: Path) -> None:
    schemathesis = str(Path(sys.executable).with_name("schemathesis"))
    settings = str(ROOT / "tests" / "campaigns" / "schemathesis.toml")
    options = ("--checks", "all", "--max-response-time", "60", "--max-examples", "10", "--seed", "1")
    run(schemathesis, "--config-file", settings, "run", f"{described}/openapi.json", *options, folder=tmp_path)
