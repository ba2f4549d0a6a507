"""Tests that the workflows call commands that exist, and try every Python that the package names."""

from __future__ import annotations

import os
import re
import tomllib
from typing import Any

import yaml

from tests.support.paths import ROOT

WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps() -> list[dict[str, Any]]:
    return [step for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() for step in job["steps"]]


def test_their_commands_are_there() -> None:
    assert set(WORKFLOWS) == {"docs", "release", "test"}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [step["run"].split() for step in steps() if "run" in step]
    asked = [word for words in commands if words[0] == "make" for word in words[1:]]
    assert set(asked) == {"audit", "docs", "figures", "sbom", "test", "wheels"}
    assert set(asked) <= set(targets)
    scripts = [words[0] for words in commands if words[0].startswith(".ci/")]
    assert len(scripts) == 2
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_job_may_read_only_unless_it_says_otherwise_and_ends_in_time() -> None:
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_packages_are_tried_on_every_python_that_they_name() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    named = [each for each in named if each.startswith("3.")]
    tried = WORKFLOWS["release"]["jobs"]["try"]["strategy"]["matrix"]["python"]
    later = WORKFLOWS["test"]["jobs"]["later-pythons"]["strategy"]["matrix"]["python"]
    assert named == tried == ["3.11", *later]
    assert PROJECT["requires-python"] == ">=3.11"


def test_one_version_stands_everywhere() -> None:
    version = PROJECT["version"]
    places = {
        "CITATION.cff": rf"^version: {version}$",
        "CHANGELOG.md": rf"^## \[{version}\]",
        "Dockerfile": rf'image\.version="{version}"',
        "deploy/kubernetes/base/kustomization.yaml": rf"newTag: {version}$",
        "docs/guides/deploy.md": rf"-t dynatree-verify:{version} ",
    }
    for name, pattern in places.items():
        assert re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), name
