"""A report as a page for a browser, and as Markdown with its pictures beside it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from dynatree.bench.report.content import Block, Content, Section
from dynatree.bench.report.drawing import picture
from dynatree.bench.tables.table import Table, markdown_text, to_html, to_markdown

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
<nav aria-label="Contents"><ol>
{contents}
</ol></nav>
{sections}
</body>
</html>
"""


def to_page(content: Content) -> str:
    """One page that needs no script and no network."""
    return _PAGE.format(
        title=html.escape(content.title),
        style=files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        contents="\n".join(
            f'<li><a href="#{_anchor(section.title)}">{html.escape(section.title)}</a></li>'
            for section in content.sections
        ),
        sections="\n".join(map(_html_section, content.sections)),
    )


def _html_section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>", f"<p>{html.escape(section.text)}</p>"]
    for heading, blocks in section.groups.items():
        if heading:
            parts.append(f"<h3>{html.escape(heading)}</h3>")
        parts.append('<div class="blocks">')
        parts += map(_html_block, blocks)
        parts.append("</div>")
    return f'<section id="{_anchor(section.title)}">\n' + "\n".join(parts) + "\n</section>"


def _html_block(block: Block) -> str:
    if isinstance(block, Table):
        return to_html(block)
    data = base64.b64encode(picture(block, "svg")).decode()
    return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{html.escape(block.title)}"></figure>'


def write_markdown(content: Content, folder: Path) -> None:
    """Write report.md, and the pictures that it shows to plots/.

    Raises:
        OSError: A file cannot be written.
    """
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    parts = [f"# {markdown_text(content.title)}"]
    for section in content.sections:
        parts += _markdown_section(section, plots)
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8", newline="\n")


def _markdown_section(section: Section, plots: Path) -> Iterator[str]:
    yield f"## {markdown_text(section.title)}"
    yield markdown_text(section.text)
    number = 0
    for heading, blocks in section.groups.items():
        if heading:
            yield f"### {markdown_text(heading)}"
        for block in blocks:
            if isinstance(block, Table):
                yield to_markdown(block)
                continue
            number += 1
            path = plots / f"{_anchor(section.title)}-{number}.png"
            path.write_bytes(picture(block, "png"))
            yield f"![{markdown_text(block.title)}]({plots.name}/{path.name})"


def _anchor(title: str) -> str:
    """A title as the name of a link or a file: a to z and dashes."""
    return re.sub("[^a-z]+", "-", title.lower()).strip("-")
