"""The files that CONTRIBUTING.md names exist."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "client", "common", "deploy", "docs", "draft_service", "protos", "tests", "verify_service")
# names of files, with or without folders; `*` stands for any name
NAMED = re.compile(r"`([\w./*]+\.(?:c|h|md|proto|py|toml))`")


def test_the_table_of_changes_names_files_that_exist() -> None:
    # the table leaves out the folder `dynatree` of each package
    found = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    known = [*(PurePosixPath(*(part for part in path.parts if part != "dynatree")) for path in found), *found]
    named = NAMED.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 50
    top = {PurePosixPath(path.name) for path in ROOT.iterdir()}
    missing = {name for name in named if not any(path.match(name) for path in {*known, *top})}
    assert not missing
