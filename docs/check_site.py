"""Checks the built documentation without a network: `python docs/check_site.py build/site`.

It fails on a relative link or an anchor that leads nowhere, on anything that a page would load from another host, and
on Markdown that was not rendered, such as a list without an empty line before it. Outgoing links are not followed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a page loads something; `href` does so in these elements only.
LOADED = ("src", "srcset", "data", "poster", "xlink:href")
LOADING_HREF = ("link", "image", "use", "feImage")
# What `link` names without loading it.
NOT_LOADED = {"alternate", "author", "canonical", "help", "license", "next", "prev", "search"}

CSS_URL = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")
UNRENDERED = re.compile(r"\s*(?:[-*+] |1\. |\||```|:::)")
FROM_ROOT = {"404.html"}  # a server shows it at any address, so its links begin at the site's root


@dataclass
class Page(HTMLParser):
    """What one page of the site has and refers to."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    unrendered: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._code = 0  # open elements whose text is no prose
        self._paragraph: list[str] | None = None
        self._style = False
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note the element's anchors and references."""
        values = {name: value or "" for name, value in attributes}
        self.anchors.update(values[name] for name in ("id", "name") if values.get(name))
        if "href" in values:
            (self.loads if self._loads(tag, values) else self.links).append(values["href"])
        for name in LOADED:
            if name in values:
                parts = values[name].split(",") if name == "srcset" else [values[name]]
                self.loads += [part.split()[0] for part in parts if part.strip()]
        self.loads += css_urls(values.get("style", ""))
        self._style = tag == "style"
        self._code += tag in ("code", "pre")
        if tag == "p":
            self._paragraph = []

    def handle_endtag(self, tag: str) -> None:
        """Look at a paragraph that has ended."""
        self._style = False
        self._code -= tag in ("code", "pre")
        if tag == "p" and self._paragraph is not None:
            lines = "".join(self._paragraph).splitlines()
            self.unrendered += [line.strip() for line in lines if UNRENDERED.match(line)]
            self._paragraph = None

    def handle_data(self, data: str) -> None:
        """Collect prose and styles."""
        if self._style:
            self.loads += css_urls(data)
        elif self._paragraph is not None:
            self._paragraph.append("code" if self._code else data)

    def _loads(self, tag: str, values: dict[str, str]) -> bool:
        return tag in LOADING_HREF and not (tag == "link" and NOT_LOADED & set(values.get("rel", "").split()))


@dataclass(frozen=True)
class Site:
    """A built site, in a folder."""

    root: Path

    @cached_property
    def pages(self) -> dict[Path, Page]:
        """Every page, by its path."""
        return {path: Page(path) for path in sorted(self.root.rglob("*.html"))}

    def problems(self) -> Iterator[str]:
        """What is wrong, a line each."""
        for path, page in self.pages.items():
            found = [
                *(self._load_problem(path, url) for url in page.loads),
                *(self._link_problem(path, url) for url in page.links),
                *(f"Markdown that was not rendered: {line[:60]!r}" for line in page.unrendered),
            ]
            yield from self._named(path, found)
        for path in sorted([*self.root.rglob("*.css"), *self.root.rglob("*.svg")]):
            urls = css_urls(path.read_text(encoding="utf-8"))
            yield from self._named(path, [self._load_problem(path, url) for url in urls])

    def _named(self, path: Path, problems: Sequence[str | None]) -> Iterator[str]:
        for problem in dict.fromkeys(problems):
            if problem is not None:
                yield f"{path.relative_to(self.root)}: {problem}"

    def _load_problem(self, path: Path, url: str) -> str | None:
        parts = urlsplit(url)
        if parts.scheme == "data" or (not parts.path and not parts.netloc):
            return None
        if parts.scheme or parts.netloc:
            return f"loads {url} from another host"
        return None if self._file(path, parts.path).is_file() else f"loads {url}, which is not there"

    def _link_problem(self, path: Path, url: str) -> str | None:
        parts = urlsplit(url)
        if parts.scheme or parts.netloc:
            return None if parts.scheme in ("http", "https", "mailto") else f"links to {url}, expected https"
        if parts.path.startswith("/") and path.name not in FROM_ROOT:
            return f"links to {url}; from disk, a link that begins with / leads out of the site"
        target = self._file(path, parts.path) if parts.path else path
        if not target.is_file():
            return f"links to {url}, which is not there"
        if parts.fragment and target in self.pages and unquote(parts.fragment) not in self.pages[target].anchors:
            return f"links to {url}, and there is no such anchor"
        return None

    def _file(self, path: Path, relative: str) -> Path:
        base = self.root if relative.startswith("/") else path.parent
        return (base / unquote(relative).lstrip("/")).resolve()


def css_urls(css: str) -> list[str]:
    """What a style sheet loads; references to its own document, as `url(#head)`, are none."""
    found = (first or second for first, second in CSS_URL.findall(css))
    return [url.strip() for url in found if not url.startswith("#")]


def main(arguments: Sequence[str]) -> int:
    """Check the site in the folder that the command line names; the exit status."""
    if len(arguments) != 1 or not Path(arguments[0], "index.html").is_file():
        print("expected the folder of a built site: python docs/check_site.py build/site", file=sys.stderr)
        return 2
    site = Site(Path(arguments[0]).resolve())
    problems = list(site.problems())
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    links = sum(len(page.links) + len(page.loads) for page in site.pages.values())
    print(f"{len(site.pages)} pages, {links} references, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
