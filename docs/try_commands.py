"""The commands that README and docs name, page by page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/**/*.md", "benchmarks/**/*.md", "deploy/**/*.md", "common/**/*.md")

FENCE = re.compile(r" *```(\w*)")
SHELL = ("sh", "bash", "shell")
INDENTED = re.compile(r" {4}(?=(?:bash|curl|docker|dynatree|make|pip|python|rm) )")  # not prose, as of a list
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")  # in a sentence, and from one of its lines to the next
SEPARATORS = "();<>|&\n"


@dataclass(frozen=True)
class Snippet:
    """Something that a page shows as code; one command, with all its lines, where it is of a shell."""

    page: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each simple command, without variables before it and redirections behind it."""
        lexer = shlex.shlex(self.text.replace("\\\n", " "), posix=True, punctuation_chars=SEPARATORS)
        lexer.whitespace, lexer.whitespace_split = " \t", True
        words: list[str] = []
        redirected = False
        for word in [*lexer, "\n"]:
            if redirected:
                redirected = False
            elif word in ("<", ">", ">>"):
                redirected = True
            elif not set(word) <= set(SEPARATORS):
                words += [] if not words and re.match(r"\w+=", word) else [word]
            elif words:
                yield words
                words = []


@dataclass(frozen=True)
class Page:
    """What one page shows as code."""

    shell: list[Snippet]
    python: list[Snippet]
    inline: list[Snippet]


def pages() -> list[Path]:
    """Every page that may name a command."""
    return [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]


def read(page: Path, text: str | None = None) -> Page:
    """The code of a page; `text` where it is not the file's."""
    found = Page([], [], [])
    prose: list[str] = []  # the page's lines, empty where they are code
    language: str | None = None  # of the fence that is open
    held: list[str] = []  # lines of a command, or of a block of Python, that goes on
    for number, line in enumerate((page.read_text(encoding="utf-8") if text is None else text).splitlines(), 1):
        prose.append("")
        if fence := FENCE.match(line):
            if language == "python":
                found.python.append(Snippet(page, number - len(held), "\n".join(held)))
            language, held = (fence[1] if language is None else None), []
        elif language == "python":
            held.append(line)
        elif (language in SHELL and line.strip()) or (language is None and (held or INDENTED.match(line))):
            held.append(line.removeprefix("    ") if language is None else line)
            if not goes_on(held):
                found.shell.append(Snippet(page, number - len(held) + 1, "\n".join(held)))
                held = []
        elif language is None:
            prose[-1] = line
    for code in INLINE.finditer("\n".join(prose)):
        number = 1 + code.string.count("\n", 0, code.start())
        found.inline.append(Snippet(page, number, code[1].replace("\n", " ")))
    return found


def goes_on(lines: list[str]) -> bool:
    """Whether a command has further lines."""
    return lines[-1].endswith("\\") or (lines[0].startswith("for ") and lines[-1].strip() != "done")
