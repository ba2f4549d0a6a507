"""Tests which files hatchling's build hook leaves when it compiles the kernels."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynatree.engine.cpu import native
from tests.support.benchmark_modules import module
from tests.support.kernel_builds import compiled
from tests.support.paths import ROOT

BUILD = "kernels_avx2.so"
# A stand-in for gcc: it writes its arguments beside itself, and an output that links gcc's OpenMP.
COMPILER = (
    '#!/bin/sh\nprintf "%s\\n" "$@" > "$0.arguments"\nwhile [ "$1" != -o ]; do shift; done\necho {output} > "$2"\n'
)


class Project:
    """A source tree with the kernels' sources and an old build, and the warnings of building its wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warnings: list[str] = []
        self.hook: ModuleType = module("build_native", ROOT / "common")
        self.folder = root / self.hook.FOLDER
        shutil.copytree(native.FOLDER, self.folder, ignore=shutil.ignore_patterns("*.so"))
        (self.folder / BUILD).write_bytes(b"an old one")

    def compiler(self, name: str, output: str = "libgomp.so.1", status: int = 0) -> Path:
        """Write a compiler to a file of this name."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMPILER.format(output=output) + f"exit {status}\n")
        path.chmod(0o755)
        return path

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)

    def built(self) -> set[str]:
        """Build a wheel; return the names of the compiled files in it."""
        data: dict[str, Any] = {"artifacts": []}
        hook = self.hook.NativeHook(str(self.root), {}, None, None, str(self.root), "wheel", self)
        hook.initialize("standard", data)
        names = {Path(name).name for name in data["artifacts"]}
        assert bool(names) == ("tag" in data)
        return names

    def left(self) -> set[str]:
        """Return the files in the tree that are not sources."""
        return {path.name for path in self.folder.iterdir() if path.name not in os.listdir(native.FOLDER)} | {
            path.name for path in self.folder.glob("*.so")
        }


@pytest.fixture(name="project")
def project_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in ("CC", "DYNATREE_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return Project(tmp_path / "a tree")


def every_build() -> set[str]:
    return set(json.loads((native.FOLDER / "builds.json").read_text())["builds"])


@pytest.mark.parametrize("name", ["cc", "a dir/gcc"])
def test_the_compiler_of_cc_builds_everything(name: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = project.compiler(name)
    monkeypatch.setenv("CC", str(compiler))
    assert project.built() == project.left() == every_build()
    assert (project.folder / BUILD).read_text() == "libgomp.so.1\n"


def test_the_compiler_of_cc_may_have_arguments(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = project.compiler("a dir/gcc")
    monkeypatch.setenv("CC", f"'{compiler}' -pipe '-DA=b c'")
    assert project.built() == every_build()
    arguments = Path(f"{compiler}.arguments").read_text().splitlines()
    assert arguments[:2] == ["-pipe", "-DA=b c"]
    assert "-mavx2" in arguments
    assert not any(each.startswith("-march") for each in arguments), "gcc 10 and older know no x86-64-v3"


def test_gcc_is_preferred_to_cc_which_may_be_clang(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc, cc = project.compiler("bin/gcc"), project.compiler("bin/cc")
    monkeypatch.setenv("PATH", f"{gcc.parent}:{os.environ['PATH']}")
    assert project.built() == every_build()
    assert Path(f"{gcc}.arguments").exists()
    assert not Path(f"{cc}.arguments").exists()


def test_another_openmp_than_torchs_is_not_taken(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(project.compiler("clang", "libomp.so.5")))
    assert project.built() == project.left() == set()
    assert all("does not link libgomp" in warning for warning in project.warnings)


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/gcc", "half"])
def test_a_compiler_that_fails_leaves_nothing(compiler: str, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "half":
        compiler = str(project.compiler("gcc", status=1))  # it fails after it has begun to write
    monkeypatch.setenv("CC", compiler)
    assert project.built() == project.left() == set()
    assert len(project.warnings) == len(every_build())


def test_without_kernels_those_of_before_are_removed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATREE_NATIVE", "0")
    assert project.built() == project.left() == set()
    assert project.warnings == []


def test_a_tree_that_is_read_only_is_a_warning(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(project.compiler("gcc")))

    def refused(self: Path, missing_ok: bool = False) -> None:  # root gets this where a folder is in the way
        raise PermissionError(f"Permission denied: {self}")

    monkeypatch.setattr(Path, "unlink", refused)
    assert project.built() == set()
    assert all("Permission denied" in warning for warning in project.warnings)


@pytest.mark.long
@compiled
def test_the_real_compilers_build_loads(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads((project.folder / "builds.json").read_text())
    one = {"flags": ["-O0", *settings["flags"][1:]], "builds": {BUILD: settings["builds"][BUILD]}}
    (project.folder / "builds.json").write_text(json.dumps(one))
    assert project.built() == {BUILD}
    monkeypatch.setattr(native, "FOLDER", project.folder)
    monkeypatch.setattr(native, "builds", lambda: [BUILD])
    native.kernels.cache_clear()
    assert native.kernels() is not None
    native.kernels.cache_clear()
    linked = subprocess.run(["ldd", project.folder / BUILD], capture_output=True, text=True, check=True).stdout
    assert "libgomp" in linked
    assert stat.S_IMODE((project.folder / BUILD).stat().st_mode) & 0o111
