"""Tests that every contract of the layers holds, and that it detects a reversed import."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ROOMS = ("protos", "common", "draft_service", "verify_service", "client", "benchmarks")

# The contract, the module that gets a forbidden import, and the import.
TURNED = [
    ("layers", "common/dynatree/common/tree.py", "import dynatree.draft.growth.drafter"),
    ("layers", "verify_service/dynatree/verify/session.py", "import dynatree.cli.main"),
    ("layers", "common/dynatree/engine/engine.py", "import dynatree.serving.tokens"),
    ("layers", "common/dynatree/serving/tokens.py", "import dynatree.engine.settings"),
    ("layers", "common/dynatree/common/tree.py", "import dynatree.serving.address"),
    ("layers", "benchmarks/dynatree/bench/command.py", "import dynatree.replay.runs"),
    ("values", "common/dynatree/common/tree.py", "import torch"),
    ("values", "common/dynatree/common/errors.py", "import grpc"),
    ("serving", "common/dynatree/serving/files.py", "import torch"),
    ("services", "verify_service/dynatree/verify/session.py", "import dynatree.draft.growth.round"),
    ("client", "client/dynatree/client/_tokens.py", "import dynatree.common.errors"),
    ("client", "client/dynatree/client/_tokens.py", "import numpy"),
    ("pages", "client/dynatree/pages/page.py", "import dynatree.common.limits"),
    ("gateway", "client/dynatree/gateway/work.py", "import dynatree.draft.growth.round"),
    ("gateway", "client/dynatree/gateway/app.py", "import transformers"),
    ("protobuf", "draft_service/dynatree/draft/completion/opening.py", "import dynatree.v1.draft_pb2"),
    ("protobuf", "verify_service/dynatree/verify/verifier.py", "import dynatree.v1.verify_pb2"),
    ("policies", "draft_service/dynatree/draft/policies/papers/dynatree.py", "import torch"),
    ("ngrams", "draft_service/dynatree/draft/completion/generation.py", "import dynatree.engine.engine"),
    ("acceptance", "verify_service/dynatree/verify/accept.py", "import dynatree.engine"),
    ("circles", "common/dynatree/common/errors.py", "import dynatree.common.tree"),
    ("circles", "common/dynatree/engine/kv/kv_cache.py", "import dynatree.engine.forward.attention"),
    ("circles", "draft_service/dynatree/draft/control/round_costs.py", "import dynatree.draft.policies.base"),
]


_BULKY = shutil.ignore_patterns("__pycache__", "*.safetensors")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the product's modules for this file."""
    folder = tmp_path_factory.mktemp("checkout")
    for room in ROOMS:
        shutil.copytree(ROOT / room / "dynatree", folder / room / "dynatree", ignore=_BULKY)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(folder, *contracts):
    path = ":".join(str(folder / room) for room in ROOMS)
    chosen = [word for contract in contracts for word in ("--contract", contract)]
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *chosen]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": path}, capture_output=True, text=True)


def test_every_contract_holds(checkout):
    linted = lint(checkout)
    assert linted.returncode == 0, linted.stdout
    assert {contract for contract, _, _ in TURNED} == set(contract_ids()), "every contract is turned round below"


def contract_ids():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return [lines[i + 1].split('"')[1] for i, line in enumerate(lines) if line == "[[tool.importlinter.contracts]]"]


@pytest.mark.long
@pytest.mark.parametrize(("contract", "module", "line"), TURNED, ids=[f"{c}-{m.split('/')[-1]}" for c, m, _ in TURNED])
def test_a_turned_arrow_breaks_its_contract(checkout, contract, module, line):
    file = checkout / module
    text = file.read_text()
    file.write_text(f"{text}\n\n{line}  # noqa\n")
    try:
        linted = lint(checkout, contract)
    finally:
        file.write_text(text)
    assert linted.returncode == 1
    assert "BROKEN" in linted.stdout
