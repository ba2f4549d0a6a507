"""Builds the page of a trace."""

from collections.abc import Sequence
from importlib.resources import files

from dynatree.cli.trace.rounds import Round
from dynatree.pages import build_page, embeddable


def trace_page(name: str, rounds: Sequence[Round]) -> str:
    """Build the page of a trace called `name`; it works from disk, and its policy allows no network request."""
    data = embeddable({"name": name, "rounds": rounds})
    return build_page(files(__package__), "page.html", styles=["page.css"], scripts=["page.js"], data=data).html
