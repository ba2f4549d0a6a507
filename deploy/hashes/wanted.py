"""What an image installs, one requirement a line, for `make hashes`: `python wanted.py build|gateway|serve`.

Without torch: which build of it is installed, for CPUs or for CUDA, follows from the index that pip is given, and so
does its hash.
"""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = {"gateway": ("gateway",), "serve": ("serve", "otel")}


def wanted(image: str) -> list[str]:
    """The requirements of the package itself, as pyproject.toml has them."""
    given = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())
    if image == "build":
        return list(given["build-system"]["requires"])
    project = given["project"]
    extras = [each for name in EXTRAS[image] for each in project["optional-dependencies"][name]]
    return [each for each in [*project["dependencies"], *extras] if not re.match(r"torch\b", each)]


if __name__ == "__main__":
    print(*wanted(sys.argv[1]), sep="\n")
