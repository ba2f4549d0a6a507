"""The census of families: which are served, which of them by a native program, and why the others are refused.

docs/reference/families.md shows it as a table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynatree.common.errors import StartupError
from dynatree.engine.examined import examined
from dynatree.engine.settings import ModelSettings
from tests.support.door import Served, saved, served
from tests.support.families import NOT_TINY, default_config, tiny_config, tiny_model
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "families.md"
DTYPES = ("float32", "bfloat16")
BEGIN, END = "<!-- the census begins -->\n\n", "\n<!-- the census ends -->"
HEAD = "| family (`model_type`) | served | native program | reason |\n| --- | --- | --- | --- |\n"


@dataclass(frozen=True, order=True)
class Row:
    """What the table says of a family.

    Attributes:
        reason: Kind of the refusal; "" if the family is served.
        native: Whether a native program computes it.
    """

    reason: str
    native: bool


def outcomes(family: str, folder: Path, dtypes: Sequence[str] = DTYPES) -> Iterator[tuple[str, Served]]:
    """Yield each dtype, and the result of serving a tiny model of the family in it.

    A family without a tiny model is examined by its default configuration.
    """
    if family in NOT_TINY:
        default_config(family).save_pretrained(folder)
        try:
            examined(ModelSettings(str(folder)))
        except StartupError as error:
            yield from ((dtype, Served(str(error))) for dtype in dtypes)
        else:
            yield from ((dtype, Served(None)) for dtype in dtypes)
    else:
        path = saved(tiny_model(tiny_config(family)), folder)
        yield from ((dtype, served(path, dtype)) for dtype in dtypes)


def row_of(found: Served) -> Row:
    """Cut a result to what the table says."""
    reason = re.sub(r"^model \S+ cannot be served( exactly)?: ", "", found.refusal or "")
    reason = re.sub(r"(?<=: ).*| \(difference .*", "…", reason)
    reason = re.sub(r"^[\w-]+(?= (models|has|is|gives) )|(?<=language model of )\S+", "…", reason)
    return Row(re.sub(r"\b\d+\b", "N", reason), found.native)


def table(rows: Mapping[str, Row]) -> str:
    """Return the table: families with equal rows share one, and those that are served come first."""
    families = defaultdict(list)
    for family, row in rows.items():
        families[row].append(family)
    lines = []
    for row in sorted(families, key=lambda each: (each.reason, not each.native)):
        cells = ["no" if row.reason else "yes", "yes" if row.native else "no", f"`{row.reason}`" if row.reason else ""]
        names = ", ".join(f"`{family}`" for family in sorted(families[row]))
        lines.append(f"| {names} | {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def shown() -> dict[str, Row]:
    """Read the page's rows."""
    rows = {}
    for line in _table(PAGE.read_text()).removeprefix(HEAD).splitlines():
        families, _, native, reason = (cell.strip() for cell in line.strip("|").split("|"))
        rows |= {family: Row(reason.strip("`"), native == "yes") for family in re.findall(r"`(\S+)`", families)}
    return rows


def write(rows: Mapping[str, Row]) -> None:
    """Replace the page's table."""
    text = PAGE.read_text()
    PAGE.write_text(text.replace(_table(text), table(rows)))


def _table(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]
