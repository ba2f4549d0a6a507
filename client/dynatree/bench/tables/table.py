"""A table as a value, and what it looks like on a terminal, in Markdown and in HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import rich.table
from rich.box import SIMPLE_HEAD
from rich.markup import escape

NONE = "-"


class Marked(str):
    """A cell that must not be overlooked."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings, which say with line breaks and hyphens where they may be broken; notes follow."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds figures, which are set to the right."""
        return column > 0 and any(row[column][:1].isdigit() for row in self.rows)

    def without_empty_columns(self) -> Table:
        """Without the columns in which no row has a figure."""
        kept = [
            column
            for column in range(len(self.headings))
            if column == 0 or any(row[column] != NONE for row in self.rows)
        ]
        return Table(
            self.title,
            [self.headings[column] for column in kept],
            [[row[column] for column in kept] for row in self.rows],
            self.notes,
        )


def to_rich(table: Table) -> rich.table.Table:
    """For a terminal; without the notes, which are lines of their own there."""
    drawn = rich.table.Table(
        title=escape(table.title),
        title_justify="left",
        min_width=len(table.title),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for number, heading in enumerate(table.headings):
        drawn.add_column(
            escape(heading),
            justify="right" if table.is_numeric(number) else "left",
            no_wrap=not number,
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*(f"[bold red]{escape(cell)}[/]" if isinstance(cell, Marked) else escape(cell) for cell in row))
    return drawn


def _in_one_line(heading: str) -> str:
    return heading.replace("-\n", "").replace("\n", " ")


def to_markdown(table: Table) -> str:
    """A pipe table below its title in bold; marked cells are bold."""
    lines = [
        _markdown_row([markdown_text(_in_one_line(heading)) for heading in table.headings]),
        _markdown_row(["--:" if table.is_numeric(column) else ":--" for column in range(len(table.headings))]),
        *(_markdown_row([_markdown_cell(cell) for cell in row]) for row in table.rows),
    ]
    return "\n\n".join([f"**{markdown_text(table.title)}**", "\n".join(lines), *map(markdown_text, table.notes)])


def markdown_text(text: str) -> str:
    """Text that Markdown takes for nothing else, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", " ".join(text.split()))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_cell(cell: str) -> str:
    return f"**{markdown_text(cell)}**" if isinstance(cell, Marked) else markdown_text(cell)


def to_html(table: Table) -> str:
    """A table element and a paragraph for each note; marked cells are of class "marked"."""
    numeric = [table.is_numeric(column) for column in range(len(table.headings))]
    head, *body = (
        f"<tr>{''.join(map(_html_element, repeat(tag), row, numeric))}</tr>"
        for tag, row in (("th", map(_in_one_line, table.headings)), *(("td", row) for row in table.rows))
    )
    notes = "".join(f"\n{_html_element('p', note)}" for note in table.notes)
    rows = "\n".join(body)
    return (
        f'<div class="table"><table>\n<caption>{html.escape(table.title)}</caption>\n'
        f"<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>{notes}"
    )


def _html_element(tag: str, text: str, numeric: bool = False) -> str:
    classes = " ".join(["number"] * numeric + ["marked"] * isinstance(text, Marked))
    return f'<{tag} class="{classes}">{html.escape(text)}</{tag}>' if classes else f"<{tag}>{html.escape(text)}</{tag}>"
