"""Fuzz every parser of external input, guided by coverage.

    python -m tests.campaigns.fuzz_parsers PARSER -runs=1000000

PARSER is a name in parsers.py, or `any`; libFuzzer's own options follow. It needs atheris, which is not among the
project's dependencies: `pip install atheris`. test_parsers.py fuzzes the parsers without atheris and coverage.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["dynatree"]):
    from tests.support.parsers import PARSERS


def main() -> None:
    """Fuzz the parser that the command line names, with libFuzzer's options."""
    name, *options = sys.argv[1:]
    names = sorted(PARSERS) if name == "any" else [name]

    def read(data: bytes) -> None:
        which, data = (data[0] % len(names), data[1:]) if data else (0, data)
        PARSERS[names[which]](data)

    seeds = Path(tempfile.mkdtemp())
    for which, each in enumerate(names):
        for number, seed in enumerate(PARSERS[each].seeds):
            (seeds / f"{each}-{number}").write_bytes(bytes([which]) + seed)
    atheris.Setup([sys.argv[0], *options, str(seeds)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
