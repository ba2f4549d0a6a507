"""A table as a value, and its rendering on a terminal and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import rich.table
from pandas import DataFrame
from rich.box import SIMPLE_HEAD
from rich.markup import escape

from dynatree.bench.figures import Cell

NONE = "-"


class Marked(str):
    """A text that is highlighted so that it is not overlooked."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings, followed by notes."""

    title: str
    frame: DataFrame
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], notes: Sequence[str] = ()) -> Table:
        """Make a table of rows by heading, without the columns in which no row has a figure."""
        frame = DataFrame(rows, dtype=object).fillna(NONE)
        kept = [name for number, name in enumerate(frame) if number == 0 or (frame[name] != NONE).any()]
        return cls(title, frame[kept], notes)

    @property
    def rows(self) -> list[list[str]]:
        """The cells, without the headings."""
        return [list(row) for row in self.frame.itertuples(index=False)]

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds figures, which are right-aligned."""
        return column > 0 and any(row[column][:1].isdigit() for row in self.rows)


def to_rich(table: Table) -> rich.table.Table:
    """Render for a terminal, without the notes, which are printed separately."""
    drawn = rich.table.Table(
        title=escape(table.title),
        title_justify="left",
        min_width=len(table.title),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for number, heading in enumerate(table.frame):
        justify = "right" if table.is_numeric(number) else "left"
        drawn.add_column(escape(str(heading)), justify=justify, no_wrap=justify == "left", overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        drawn.add_row(*(f"[bold red]{escape(cell)}[/]" if isinstance(cell, Marked) else escape(cell) for cell in row))
    return drawn


def to_markdown(table: Table) -> str:
    """Render as a pipe table below its title in bold; marked cells are bold."""
    sides = ["right" if table.is_numeric(column) else "left" for column in range(len(table.frame.columns))]
    frame = table.frame.map(_markdown_cell).rename(columns=markdown_text)
    text = frame.to_markdown(index=False, colalign=sides, disable_numparse=True) if len(frame) else ""
    return "\n\n".join([f"**{markdown_text(table.title)}**", text, *map(markdown_text, table.notes)])


def markdown_text(text: str) -> str:
    """Escape text for Markdown, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", " ".join(text.split()))


def _markdown_cell(cell: str) -> str:
    return f"**{markdown_text(cell)}**" if isinstance(cell, Marked) else markdown_text(cell)


def figure(cell: Cell | None, digits: int | None = None, *, interval: bool = False) -> str:
    """A median and its range, as `1.35 (1.10-1.52)`; by default three significant digits, and never an exponent.

    With `interval`, the confidence interval follows in square brackets, `1.35 (1.10-1.52) [1.21-1.44]`.
    """
    if cell is None:
        return NONE

    def text(value: float) -> str:
        return f"{value:.{_digits(cell.median) if digits is None else digits}f}"

    if cell.low == cell.high:
        return text(cell.median)
    words = f"{text(cell.median)} ({text(cell.low)}-{text(cell.high)})"
    return words + (f" [{'-'.join(map(text, cell.interval))}]" if interval and cell.interval else "")


def _digits(value: float) -> int:
    return 2 if value < 9.995 else 1 if value < 99.95 else 0


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds."""
    return NONE if seconds is None else f"{1e3 * seconds:.{_digits(1e3 * seconds)}f}"


def megabytes(size: float | None) -> str:
    """Format bytes as MB of 10^6."""
    return f"{size / 1e6:.0f}" if size else NONE
