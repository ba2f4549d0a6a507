"""Tests `dynatree serve`, from one command to the first answered request, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from dynatree import embedded
from dynatree.client import Client
from tests.campaigns.interrupted_starts import COMMANDS, interrupted, verify_service

pytestmark = [pytest.mark.early, pytest.mark.long]


class Serve:
    """A running `dynatree serve`."""

    def __init__(self, folder: Path, *options: str, draft: bool) -> None:
        self._log = folder / "serve.log"
        models = ("--target-model", "embedded", *(("--draft-model", "embedded") if draft else ()))
        command = [sys.executable, "-m", "dynatree.cli.main", "serve", *models, *options]
        with self._log.open("wb") as log:
            # A terminal interrupts the whole process group; so does the test.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(folder)},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str, seconds: float = 120.0) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(pattern, self.log):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(self.log)

    def members(self) -> list[str]:
        """Return the processes of its group."""
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,stat=,args=", "-g", str(self.process.pid)], capture_output=True
        )
        return [line for line in listed.stdout.decode().splitlines() if " Z" not in line]

    def maps_of(self, service: str) -> str:
        """Return the names of the files that a service has mapped into its memory."""
        process = next(line for line in self.members() if "cli.service_pair" in line and f" {service} " in line)
        return Path(f"/proc/{process.split()[0]}/maps").read_text()


@contextmanager
def serving(folder: Path, *options: str, draft: bool = True) -> Iterator[Serve]:
    serve = Serve(folder, *options, draft=draft)
    try:
        yield serve
    finally:
        if serve.process.poll() is None:
            os.killpg(serve.process.pid, signal.SIGKILL)
        serve.process.wait()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("number", "to_the_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_one_command_serves_and_leaves_nothing(tmp_path: Path, number: signal.Signals, to_the_group: bool) -> None:
    grpc_address = f"unix:{tmp_path}/grpc.sock"
    with serving(tmp_path, "--http", "127.0.0.1:0", "--grpc", grpc_address) as serve:
        command = shlex.split(serve.wait_for(r"Try\s+(curl .*)"))
        answered = subprocess.run([*command, "-sS"], capture_output=True, timeout=60, check=True)
        with Client(grpc_address) as client:
            expected = client.generate("Once upon a time", max_new_tokens=32)
        assert json.loads(answered.stdout)["choices"][0]["text"] == expected.text
        assert len(serve.members()) == 3
        serve.process.send_signal(signal.SIGHUP)
        serve.wait_for("(SIGHUP: new requests get the draft embedded)")
        with Client(grpc_address) as client:
            assert client.generate("Once upon a time", max_new_tokens=32).text == expected.text

        if to_the_group:
            os.killpg(serve.process.pid, number)
        else:
            serve.process.send_signal(number)
        assert serve.process.wait(30) in (0, 130, 128 + number), serve.log
        assert serve.members() == []
        assert "Traceback" not in serve.log
        assert re.findall("WARNING .* does not serve", serve.log) == []
        left = {path.name for path in tmp_path.iterdir()} - {"serve.log", "grpc.sock"}
        assert not {name for name in left if name.startswith("dynatree-")}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_at_any_moment_of_a_start_ends_it_in_order(name: str) -> None:
    """`interrupted_starts.py`, run as a program, tries more moments."""
    with verify_service() if name == "draft" else nullcontext("") as verify:
        starting = [interrupted(name, moment, verify, after=" INFO ") for moment in (0.0, 0.5)]
        ends = [*starting, interrupted(name, None, verify)]
    assert [end for end in ends if not end.good] == []
    assert [end.status for end in ends] == [0 if end.ready else 130 for end in ends]
    assert [end.ready for end in (ends[0], ends[2])] == [False, True]  # a fast machine may be ready after half a second


def test_a_target_alone(tmp_path: Path) -> None:
    """Without a draft model, text is drafted from n-grams, in a process that has no torch.

    The example command is a chat, because this target has a chat template.
    """
    target, grpc_address = tmp_path / "chatty", f"unix:{tmp_path}/grpc.sock"
    shutil.copytree(embedded.target_path(), target)
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    options = ("--target-model", str(target), "--http", "127.0.0.1:0", "--grpc", grpc_address)
    with serving(tmp_path, *options, draft=False) as serve:
        command = shlex.split(serve.wait_for(r"Try\s+(curl .*)"))
        assert " INFO dynatree.cli.draft: no draft model: drafting from n-grams alone\n" in serve.log
        answered = subprocess.run([*command, "-sS"], capture_output=True, timeout=60, check=True)
        with Client(grpc_address) as client:
            chat = client.generate([{"role": "user", "content": "What is a token tree?"}], max_new_tokens=32)
            plain = client.generate("Once upon a time", max_new_tokens=32, policy="autoregressive")
            again = client.generate("Once upon a time", max_new_tokens=200)
        assert json.loads(answered.stdout)["choices"][0]["message"]["content"] == chat.text
        assert again.text.startswith(plain.text)
        assert again.stats.draft_n_accepted > 0
        url = serve.wait_for(r"serving HTTP on (\S+)")
        listed = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=30))["data"][0]
        assert (listed["draft_model"], "dyspec" in listed["policies"]) == ("none", False)
        assert ("libtorch" in serve.maps_of("verify"), "libtorch" in serve.maps_of("draft")) == (True, False)


def test_a_target_larger_than_the_memory(tmp_path: Path) -> None:
    """Layers are offloaded to a cache, and trees may be larger than usual."""
    large = ("--resident-layers", "1", "--layer-cache", str(tmp_path / "cache"), "--max-tree-nodes", "300")
    grpc_address = f"unix:{tmp_path}/grpc.sock"
    with serving(tmp_path, "--http", "127.0.0.1:0", "--grpc", grpc_address, *large) as serve:
        serve.wait_for(r"Try\s+(curl .*)")
        assert len(list((tmp_path / "cache").glob("*/layer-*.bin"))) > 1
        with Client(grpc_address) as client:
            policy = {"policy": "dyspec", "policy_settings": {"max_nodes": 300}}
            stats = client.generate("Once", max_new_tokens=30, ignore_eos=True, **policy).stats
            assert stats.nodes_per_round > 256


def test_http_says_that_the_models_are_loading_and_everything_ends_with_a_service(tmp_path: Path) -> None:
    """HTTP reports this from the moment that the port is open until the services are ready.

    The start needs no token of a service that asks for one.
    """
    tokens = tmp_path / "tokens"
    tokens.write_text("anna:0123456789abcdef\n")
    with serving(tmp_path, "--http", "127.0.0.1:0", "--token-file", str(tokens)) as serve:
        url = serve.wait_for(r"HTTP is open on (\S+);")
        for path in ("/health", "/v1/models", "/v1/chat/completions"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url + path, data=b"{}" if "chat" in path else None, timeout=30)
            error = json.loads(refused.value.read())["error"]
            assert (refused.value.code, error["code"]) == (503, "loading")
            assert int(refused.value.headers["Retry-After"]) > 0
        assert urllib.request.urlopen(f"{url}/version", timeout=30).status == 200
        serve.wait_for(r"Try\s+(curl .*)")
        assert urllib.request.urlopen(f"{url}/health", timeout=30).status == 200
        assert "cli.verify: loading embedded, 12 MB on the disk" in serve.log
        assert "request refused" not in serve.log
        assert_all_ends_with_a_service(serve)


def assert_all_ends_with_a_service(serve: Serve) -> None:
    verify = next(line for line in serve.members() if "cli.service_pair" in line and " verify " in line)
    os.kill(int(verify.split()[0]), signal.SIGKILL)
    assert serve.process.wait(30) == 1
    assert "the verify service has ended" in serve.log
    assert serve.members() == []


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    with serving(tmp_path, "--http", "127.0.0.1:0", "--draft-model", "./nowhere") as serve:
        assert serve.process.wait(60) == 1
        assert serve.log == "dynatree: error: there is no model at ./nowhere: no such folder or file\n"
    with serving(tmp_path, "--http", "127.0.0.1:0", "--device", "cuda:77") as serve:
        assert serve.process.wait(60) == 1
        assert serve.log.startswith("dynatree: error: --device is cuda:77, but NVIDIA's driver finds no GPU")
    with serving(tmp_path, "--http", "0.0.0.0:0") as serve:
        assert serve.process.wait(60) == 1
        assert "--insecure" in serve.log
