"""Names every measured figure that stands outside of a block of cog: python benchmarks/check_figures.py PAGE.md ..."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Outside of cog's blocks these may not stand in a document: measured rates, times, ratios.
UNIT = r"tokens/s|tokens a second|ms\b|GB/s|x plain|times (?:as fast|plain|transformers)"
FIGURE = re.compile(rf"(?<![\w.])\d[\d.,]* ?(?:{UNIT})")


def outside(text: str) -> Iterator[tuple[int, str]]:
    """Lines with a measured figure that no block of cog made."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        inside = (inside or "[[[cog" in line) and "[[[end]]]" not in line
        if not inside and FIGURE.search(line):
            yield number, line.strip()


def main(paths: Sequence[str]) -> int:
    """Name every figure that stands outside of a block; the exit status."""
    wrong: list[Any] = [
        f"{path}:{number}: a figure that no JSON stands behind: {line[:100]}"
        for path in paths
        for number, line in outside(Path(path).read_text(encoding="utf-8"))
    ]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
