"""What a report is made of, whatever it is written as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynatree.bench.report.charts import Chart
from dynatree.bench.tables.table import Table

Block = Table | Chart


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph that defines what is shown, and tables and charts in groups by their own heading.

    The heading of a group may be empty, and a section without groups is left out.
    """

    title: str
    text: str
    groups: Mapping[str, Sequence[Block]]


@dataclass(frozen=True)
class Content:
    """A whole report."""

    title: str
    sections: Sequence[Section]
