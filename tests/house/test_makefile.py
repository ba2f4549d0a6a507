"""The steps in which the Makefile installs the environment."""

import shutil
import subprocess
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
