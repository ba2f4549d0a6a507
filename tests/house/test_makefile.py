"""The steps in which the Makefile installs the environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NEEDED = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "common/build_native.py",
    "common/dynatree/engine/cpu/native",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile, and the files that its installations depend on."""
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def installed_by(target: str, folder: Path) -> list[str]:
    """The requirements that `make TARGET` would install, without running it."""
    printed = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout
    return [line.rpartition(" -e ")[2].strip("'") for line in printed.splitlines() if " pip install " in line]


def test_the_demo_installs_the_services_alone(checkout: Path) -> None:
    assert installed_by("demo", checkout) == [".[serve]"]
    assert installed_by("check", checkout) == [".[dev]"]


def test_development_comes_on_top_of_the_demo(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.demo").touch()
    assert installed_by("demo", checkout) == []
    assert installed_by("check", checkout) == [".[dev]"]
    (checkout / ".venv/.ready").touch()
    assert installed_by("demo", checkout) == installed_by("check", checkout) == []


@pytest.mark.long
def test_every_campaign_and_every_program_of_benchmarks_can_be_imported() -> None:
    """They run outside pytest, so they can import neither its configuration nor another test."""
    apart = {"fuzz_parsers", "mutants"}  # they need atheris and Cosmic Ray, which `make` does not install
    campaigns = {path.stem for path in (ROOT / "tests" / "campaigns").glob("*.py")} - apart
    programs = [path.stem for path in (ROOT / "benchmarks").glob("*.py")]
    assert campaigns
    assert programs
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    command = [sys.executable, "-c", code, *(f"tests.campaigns.{each}" for each in campaigns), *programs]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
