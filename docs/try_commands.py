"""Tries the commands that README and docs name: `python docs/try_commands.py [--fresh] [PAGE...]`.

The commands of a page run in its order, in a copy of the repository, on the shipped pair and on few tokens. Services
run in the background, each until the page ends or another one takes its port; what a page takes for granted is started.
The exit status is 1 where a command failed. With --fresh they run in an environment that pip fills first.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/**/*.md", "benchmarks/**/*.md", "deploy/**/*.md", "common/**/*.md")

# What does not run here, and why; the first that is found in a command counts.
LEFT_OUT = {
    r"^(?:docker|\w+=\S+ (?:\\\n *)?docker)": "needs docker",
    r"^kubectl": "needs a cluster",
    r"^\.venv-envoy|venv-envoy": "needs another package",
    r"--(?:server localhost:50051,localhost:50052|server localhost:50050)|:9901": "needs containers, or Envoy",
    r"^make|^pip|^python3? -m venv|^\. ": "installs, or is run by CI, or takes hours",
    r"^rm": "removes results",
    r"cuda:|--device cuda|--tensor-parallel": "needs GPUs, or several devices",
    r"--baseline-server": "needs servers of others",
    r"embedded\.grow|/tmp/target": "takes minutes and memory",
    r"chat/completions|^dynatree chat": "needs a model with a chat template",
    r"server\.pem|\bca\.crt": "needs certificates of yours",
    r"treasure_island|replay/books|benchmarks/results": "takes hours",
}
# What stands for something of the reader's, or for less of it.
STAND_INS = {
    r"(?:EleutherAI|HuggingFaceTB)/[\w.-]+|\b(?:TARGET|DRAFT)\b": "embedded",
    r"\b(?:target|draft|gateway|gpu)-host\b": "localhost",
    r"/data/layers": "layers",
    r"--count \d+": "--count 1",
    r"--minutes \d+": "--minutes 0.2",
    r"--clients [\d,]+": "--clients 1,2",
    r"(dynatree bench (?:compare|load|sweep|record|ranks) )": r"\1--max-new-tokens 12 --prompt-tokens 32 ",
    r"(bench paper --version 003) --table": r"\1 --count 1 --max-new-tokens 6 --prompt-tokens 16 --table",
    r"^curl ": "curl --silent --show-error --fail ",
}
TOKEN = "4f0c2b7d9a3e8851"
FILES = {
    "prompt.txt": "Once upon a time",
    "tokens": f"alice:{TOKEN}\n",
    "my-token": TOKEN,
    "verify-tokens": f"draft:{TOKEN}\n",
    "draft-token": TOKEN,
}
MAKES_FILES = re.compile(r"(?:cat|for|mkdir|openssl) ")  # comes first, wherever the page has it
# The services that a page takes for granted, by port.
USUAL = {
    "50052": "dynatree verify --target-model embedded",
    "50051": "dynatree draft --draft-model embedded --verify localhost:50052",
    "8000": "dynatree gateway --server localhost:50051",
}
PORT = {"verify": "50052", "draft": "50051", "gateway": "8000", "serve": "8000"}
# what each says once it serves; `serve` shows what the two services say besides
SERVES = {name: rf" dynatree {name}: .* on " for name in ("verify", "draft", "gateway")} | {"serve": "Stop   Ctrl-C"}
START_SECONDS = 120.0
SECONDS = 300.0

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


class Trial:
    """Commands of one page, in a copy of the repository.

    Args:
        folder: The copy.
        programs: Where `dynatree` and `python` are.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        self._services: dict[str, subprocess.Popen[bytes]] = {}  # by port

    def run(self, command: str) -> str | None:
        """Why a command failed; None where it did not."""
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        if words[0] == "dynatree" and words[1] in PORT:
            return self._start(command, words)
        for port, usual in USUAL.items():
            if re.search(rf":{port}\b", command) or (port == "50051" and words[1:2] == ["generate"]):
                self._need(port, usual)
        try:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {SECONDS:g} s"
        return f"status {done.returncode}: {done.stderr.decode()[-300:]}" if done.returncode else None

    def _need(self, port: str, usual: str) -> None:
        """Have a service at a port."""
        if port not in self._services and (fault := self._start(usual, usual.split())):
            print(f"     {usual}: {fault}")

    def _start(self, command: str, words: list[str]) -> str | None:
        """Start a service, in place of the one at its port."""
        listening = words[words.index("--listen") + 1] if "--listen" in words else ""
        port = listening.rpartition(":")[2] or PORT[words[1]]
        self._stop(port)
        for needed in {"draft": ["50052"], "gateway": ["50051"]}.get(words[1], []):
            if needed == "50051" and "50052" not in self._services:
                self._need("50052", USUAL["50052"])
            self._need(needed, USUAL[needed])
        log = self._folder / f"{port}.log"
        with log.open("wb") as output:
            self._services[port] = process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self._folder, env=self._environment, stdout=output, stderr=output
            )
        until = time.monotonic() + START_SECONDS
        while not re.search(SERVES[words[1]], log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > until:
                self._stop(port)
                return f"does not serve: {log.read_text(errors='replace')[-300:]}"
            time.sleep(0.1)
        return None

    def _stop(self, port: str) -> None:
        if process := self._services.pop(port, None):
            process.terminate()
            process.wait()

    def end(self) -> None:
        """Stop all services."""
        for port in list(self._services):
            self._stop(port)


def try_page(page: Path, folder: Path, programs: Path) -> int:
    """Try a page's commands, and say of each what came of it; how many failed."""
    failed = 0
    snippets = read(page).shell
    with ExitStack() as stack:
        trial = Trial(folder, programs)
        stack.callback(trial.end)
        for snippet in sorted(snippets, key=lambda each: MAKES_FILES.match(each.text) is None):
            command = snippet.text
            reason = next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, command)), None)
            program = next(snippet.commands())[0]
            if reason is None and program not in ("for", "dynatree") and shutil.which(program) is None:
                reason = f"{program} is not here"
            began, fault = time.monotonic(), None
            if reason is None:
                for pattern, stand_in in STAND_INS.items():
                    command = re.sub(pattern, stand_in, command)
                fault = trial.run(command)
                failed += fault is not None
            seconds = time.monotonic() - began
            outcome = (
                f"left out ({reason})" if reason else f"FAILED ({fault.strip()})" if fault else f"ok in {seconds:.1f} s"
            )
            print(f"{' '.join(snippet.place.split())}\n    {outcome}", flush=True)
    return failed


def copied(folder: Path) -> None:
    """Copy what git knows of, and what commands of the docs read besides."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "book.txt").write_text("".join(page.read_text(encoding="utf-8") for page in pages()))


def fresh(folder: Path) -> Path:
    """Where the programs of a new environment are, in which the copy is installed; arguments for pip: $PIP_ARGS."""
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=folder, check=True)
    wanted = ["-c", "constraints.txt", "-e", ".[bench,gateway,otel]"]
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    subprocess.run([".venv/bin/python", "-m", "pip", "install", "-q", *more, *wanted], cwd=folder, check=True)
    return folder / ".venv" / "bin"


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="page to try (default: all)")
    parser.add_argument("--fresh", action="store_true", help="first install into a new environment")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        copied(Path(name))
        programs = fresh(Path(name)) if options.fresh else Path(sys.executable).parent
        for page in [page.resolve() for page in options.pages] or pages():
            failed += try_page(page, Path(name), programs)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
