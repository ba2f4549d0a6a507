"""Mistakes in command lines that are detected without loading a model.

`python -m tests.campaigns.mistakes` prints a table of each mistake's seconds, status and message; tests use
`mistakes(folder)`.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MOST_SECONDS = 2.0
_TOO_LONG = f"/{300 * 'x'}"  # Python asks for the file, and gets an error that is not "no such file"


@dataclass(frozen=True)
class Mistake:
    """A command line that exits with status 1, and words of the single line that it must print."""

    name: str
    command: list[str]
    words: str


class _Http(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def mistakes(folder: Path) -> Iterator[list[Mistake]]:
    """Yield the mistakes; their ports are in use and their files exist within the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Http)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield _mistakes(folder, f"127.0.0.1:{server.server_port}", _free())
    finally:
        server.shutdown()
        server.server_close()


def _free() -> str:
    """An address with a free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def _mistakes(folder: Path, http: str, free: str) -> list[Mistake]:
    verify, draft = ["verify", "--listen", "localhost:0", "--target-model"], ["--draft-model", "embedded"]
    pair = ["--target-model", "embedded", *draft]
    serve = ["serve", *pair, "--listen", "127.0.0.1:0"]
    drafting = ["draft", *draft, "--verify", free, "--listen", "localhost:0"]
    alone = ["draft", "--draft-model", "none", "--verify", free, "--listen", "localhost:0"]
    serve_alone = ["serve", "--target-model", "embedded", "--listen", "127.0.0.1:0"]
    text = folder / "notes.txt"
    text.write_text("no model\n")
    typeless = folder / "typeless"
    typeless.mkdir()
    (typeless / "config.json").write_text("{}")
    cut = folder / "cut"
    cut.mkdir()
    (cut / "config.json").write_text('{"model_type": "llama"}')
    (cut / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    in_use = "the address is in use"
    return [
        Mistake("a path where nothing is", [*verify, "/no/such/model"], "there is no model at /no/such/model"),
        Mistake("an unknown name on the hub", [*verify, "owner/no-such-model"], "there is no model at owner/no-such"),
        Mistake("a file instead of a folder", [*verify, str(text)], "expected such a file or a checkpoint's folder"),
        Mistake("a config without model_type", [*verify, str(typeless)], "has no model_type"),
        Mistake("weights that only point to others", [*verify, str(cut)], "download it again"),
        Mistake("serve: a draft that is not there", [*serve, "--draft-model", "./none"], "there is no model at ./none"),
        Mistake(
            "audit: a target that is not there", ["audit", *pair, "--target-model", "./none"], "no model at ./none"
        ),
        Mistake("verify: a port in use", [*verify, "embedded", "--listen", http], in_use),
        Mistake("draft: a port in use", [*drafting, "--listen", http], in_use),
        Mistake("serve: a port in use", [*serve, "--listen", http], in_use),
        Mistake("gateway: a port in use", ["gateway", "--listen", http], in_use),
        Mistake("metrics: a port in use", [*verify, "embedded", "--metrics", http], in_use),
        Mistake("one port for two things", [*serve, "--listen", free, "--grpc", free], "two options name this address"),
        Mistake("beyond loopback", [*verify, "embedded", "--listen", "0.0.0.0:0"], "--insecure where"),
        Mistake("serve beyond loopback", [*serve, "--listen", "0.0.0.0:0"], "--insecure where"),
        Mistake("no certificate", [*verify, "embedded", "--tls-cert", "c", "--tls-key", "k"], "TLS cannot be used"),
        Mistake("a certificate without its key", [*verify, "embedded", "--tls-cert", "c"], "expected both --tls-cert"),
        Mistake("no token file", [*drafting, "--token-file", "/no/tokens"], "the token file cannot be used"),
        Mistake("serve: no token file", [*serve, "--token-file", "/no/tokens"], "the token file cannot be used"),
        Mistake("no token for verify", [*drafting, "--verify-token-file", "/no"], "cannot be secured"),
        Mistake("a setting out of range", [*drafting, "--policy", "linear", "--set", "depth=0"], "depth is 0"),
        Mistake("serve: an unknown setting", [*serve, "--set", "dept=1"], "has no setting dept"),
        Mistake("demo: an unknown policy", ["demo", "--policy", "nope"], "unknown policy 'nope'"),
        Mistake("none: a policy that drafts", [*alone, "--policy", "dyspec"], "policy dyspec needs a draft model, and"),
        Mistake("serve none: such a policy", [*serve_alone, "--policy", "linear"], "policy linear needs a draft model"),
        Mistake("demo none: such a policy", ["demo", "--draft-model", "none", "--policy", "hybrid"], "hybrid needs a"),
        Mistake("none: a setting that drafts", [*alone, "--set", "breadth=4"], "breadth is 4, expected 0, because"),
        *(
            Mistake(f"none: {option}", [*alone, option, value], f"{option} is an option of the draft model, and")
            for option, value in (
                ("--device", "cpu"),
                ("--dtype", "float32"),
                ("--weights", "int8"),
                ("--threads", "1"),
                ("--fixed-rows", "off"),
                ("--max-context", "100"),
                ("--kv-tokens", "100"),
                ("--draft-ahead", "on"),
            )
        ),
        Mistake(
            "serve none: --draft-device", [*serve_alone, "--draft-device", "cpu"], "--draft-device is an option of"
        ),
        Mistake("serve none: --draft-ahead", [*serve_alone, "--draft-ahead", "off"], "--draft-ahead is an option of"),
        Mistake("a GPU that is not there", [*verify, "embedded", "--device", "cuda:77"], "--device is cuda:77, but"),
        Mistake("serve: a GPU for the draft", [*serve, "--draft-device", "cuda:77"], "--draft-device is cuda:77, but"),
        Mistake("traces to nowhere", [*verify, "embedded", "--traces", "nowhere"], "--traces is 'nowhere'"),
        Mistake("a layer cache in a file", [*verify, "embedded", "--layer-cache", str(text)], "--layer-cache is"),
        Mistake("rows on a CPU", [*verify, "embedded", "--device", "cpu", "--fixed-rows-file", "f"], "on a GPU only"),
        Mistake(
            "serve: given rows", [*serve, "--fixed-rows", "8", "--fixed-rows-file", "f"], "expected --fixed-rows a"
        ),
        Mistake("a history in a folder", [*alone, "--history-file", str(text.parent)], "which is not a file"),
        Mistake("serve: a history nowhere", [*serve, "--history-file", "/no/file"], "expected a file in a folder that"),
        Mistake("no history", [*alone, "--history-tokens", "0", "--history-file", "h"], "--history-tokens is 0"),
        *(
            Mistake(f"a name that is too long: {command[0]} {command[-2]}", command, "File name too long")
            for command in (
                [*verify, _TOO_LONG],
                [*drafting, "--draft-model", _TOO_LONG],
                [*serve, "--draft-model", _TOO_LONG],
                ["check", "--target-model", _TOO_LONG],
                [*verify, "embedded", "--layer-cache", _TOO_LONG],
                [*drafting, "--record", _TOO_LONG],
                [*alone, "--history-file", _TOO_LONG],
            )
        ),
        Mistake("no draft service", ["generate", "x", "--server", free], "Connection refused"),
        Mistake("generate: an HTTP port", ["generate", "x", "--server", http], "it is an HTTP port"),
        Mistake("draft: an HTTP port", [*drafting, "--verify", http], "is an HTTP port"),
        Mistake("gateway: an HTTP port", ["gateway", "--server", http, "--listen", "127.0.0.1:0"], "is an HTTP port"),
        Mistake("no prompts", ["audit", *pair, "--prompts", "/no/file"], "cannot be read"),
    ]


def main() -> None:
    """Print the table; exit with status 1 if any mistake takes too long or gets a wrong answer."""
    bad = 0
    with tempfile.TemporaryDirectory() as folder, mistakes(Path(folder)) as all_of_them:
        for mistake in all_of_them:
            began = time.perf_counter()
            command = [sys.executable, "-m", "dynatree.cli.main", *mistake.command]
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
            seconds = time.perf_counter() - began
            lines = result.stderr.strip().splitlines()
            good = result.returncode == 1 and len(lines) == 1 and mistake.words in lines[0] and seconds <= MOST_SECONDS
            bad += not good
            print(f"{'ok ' if good else 'BAD'} {seconds:5.2f} s  {mistake.name:36} {result.stderr.strip()}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
