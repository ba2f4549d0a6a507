"""Tests baselines that are servers: fakes of both kinds on real sockets, and their faults."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import EmbeddedServices

from dynatree.bench.methods import parse_server
from dynatree.bench.record import load
from dynatree.bench.server_baseline import connect
from dynatree.cli.main import main
from tests.support.benchmark_modules import module

Answer = Callable[[str, dict[str, Any] | None], tuple[int, list[Any]]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve an answer for each path and body: a status and server-sent events. Yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, [value] = answer(self.path, None)
            self._send(status, json.dumps(value).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, events = answer(self.path, body)
            lines = [each if isinstance(each, str) else json.dumps(each) for each in events]
            self._send(status, "".join(f"data: {line}\n\n" for line in lines).encode())

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def llama_cpp(path: str, body: dict[str, Any] | None) -> tuple[int, list[Any]]:
    """Count up from the prompt's last token, two tokens at a time."""
    if path == "/props":
        return 200, [{}]
    assert path == "/completion"
    assert body is not None
    assert (body["temperature"], body["ignore_eos"], body["cache_prompt"]) == (0.0, True, False)
    tokens = [body["prompt"][-1] + number for number in range(1, body["n_predict"] + 1)]
    return 200, [*({"tokens": tokens[i : i + 2]} for i in range(0, len(tokens), 2)), {"tokens": [], "stop": True}]


def openai(named: bool) -> Answer:
    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, list[Any]]:
        if path == "/v1/models":
            return 200, [{"data": [{"id": "large"}]}]
        if path != "/v1/completions":
            return 404, [{}]
        assert body is not None
        assert (body["model"], body["temperature"]) == ("large", 0.0)
        ids = [{"token_ids": [number]} if named else {} for number in range(body["max_tokens"])]
        chunks = [{"choices": [{"text": "a", **each}]} for each in ids]
        return 200, [*chunks, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}, "[DONE]"]

    return answer


def test_llama_cpp_names_its_tokens() -> None:
    with serving(llama_cpp) as url:
        output = connect("llama.cpp", url)([5, 7], 5)
    assert output.token_ids == (8, 9, 10, 11, 12)
    assert [tokens for tokens, _ in output.arrivals] == [2, 4, 5]
    assert 0 < output.arrivals[-1][1] <= output.seconds


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("suffix", ["", "/v1", "/"])
def test_a_server_of_completions_may_name_its_tokens(named: bool, suffix: str) -> None:
    with serving(openai(named)) as url:
        output = connect("vllm", url + suffix)([5, 7], 4)
    assert output.token_ids == ((0, 1, 2, 3) if named else None)
    assert output.tokens == 4
    assert [tokens for tokens, _ in output.arrivals] == [1, 2, 3, 4]


def test_nobody_there() -> None:
    with serving(llama_cpp) as url:
        pass
    with pytest.raises(SystemExit, match=r"baseline x: .* does not answer"):
        connect("x", url)


def test_a_server_of_another_kind() -> None:
    with (
        serving(lambda path, body: (404, [{}])) as url,
        pytest.raises(SystemExit, match=r"answers neither /props \(llama.cpp\) nor /v1/models"),
    ):
        connect("x", url)


def test_a_server_that_refuses() -> None:
    def refuses(path: str, body: dict[str, Any] | None) -> tuple[int, list[Any]]:
        return (200, [{}]) if path == "/props" else (400, ["the prompt is too long"])

    with serving(refuses) as url, pytest.raises(SystemExit, match="answers 400: data: the prompt is too long"):
        connect("x", url)([1], 4)


@pytest.mark.parametrize("text", ["http://here", "=http://here", "name=here", "name="])
def test_what_is_no_server(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", "--prompts", "x.txt", "--baseline-server", text]) == 2
    assert "is not NAME=URL" in capsys.readouterr().err


def test_a_name_may_have_anything_but_an_equals_sign() -> None:
    method, url = parse_server("llama.cpp, drafting 5=http://127.0.0.1:8080/?a=b")
    assert (method.label, method.policy, url) == ("llama.cpp, drafting 5", None, "http://127.0.0.1:8080/?a=b")


def parting(path: str, body: dict[str, Any] | None) -> tuple[int, list[Any]]:
    """Answer as `llama_cpp`, with another token in the sixth place."""
    status, events = llama_cpp(path, body)
    if len(events) > 3:
        events[2]["tokens"][1] += 1
    return status, events


def test_a_server_that_drafts_is_compared_with_its_own_plain_decoding(
    embedded_services: EmbeddedServices, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "story.txt", tmp_path / "out.json"
    text.write_text("It was a dark and stormy night, and the captain had not come back to the house by the sea.\n" * 8)
    command = ["bench", "compare", "--server", embedded_services.draft_address, "--prompts", str(text)]
    command += ["--count", "2", "--prompt-tokens", "12", "--max-new-tokens", "8", "--warmup", "0", "--temperature", "0"]
    command += ["--policy", "linear", "--out", str(out)]
    with serving(llama_cpp) as plain, serving(parting) as other:
        for name, url in (("x", plain), ("x, drafting 3", other), ("x, drafting 5", plain), ("y, drafting 3", plain)):
            command += ["--baseline-server", f"{name}={url}"]
        assert main(command) == 0
    found = {run["label"]: (run.get("own_equal"), run.get("own_agrees")) for run in load(out)["runs"]}
    assert found == {
        "autoregressive": (None, None),
        "linear": (None, None),
        "x": (None, None),
        "x, drafting 3": (False, 5),
        "x, drafting 5": (True, 8),
        "y, drafting 3": (None, None),
    }
    said = capsys.readouterr().out
    assert "own: 2 of 2 part" in said
    assert "own: yes" in said


def test_compare_beside_servers(
    embedded_services: EmbeddedServices, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token ids of one server are known and differ; those of the other are unknown."""
    text, out = tmp_path / "story.txt", tmp_path / "out.json"
    text.write_text("It was a dark and stormy night, and the captain had not come back to the house by the sea.\n" * 8)
    with serving(llama_cpp) as one, serving(openai(False)) as other:
        command = ["bench", "compare", "--server", embedded_services.draft_address, "--prompts", str(text)]
        command += [
            "--count",
            "2",
            "--prompt-tokens",
            "12",
            "--max-new-tokens",
            "8",
            "--warmup",
            "0",
            "--temperature",
            "0",
        ]
        command += ["--policy", "linear", "--baseline-server", f"one={one}", "--baseline-server", f"other={other}"]
        assert main([*command, "--out", str(out)]) == 0
    runs = load(out)["runs"]
    assert {run["label"] for run in runs} == {"autoregressive", "linear", "one", "other"}
    assert {(run["label"], run["equal"], run["agrees"]) for run in runs} == {
        ("autoregressive", True, 8),
        ("linear", True, 8),
        ("one", None, 0),
        ("other", None, None),
    }
    assert all(run["tokens"] == 8 for run in runs)
    assert "equal to plain decoding: all of 4 outputs" in capsys.readouterr().out


def test_llama_cpp_serves_one_type_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command runs beside the servers of each type, and names them."""
    llama_cpp_script = module("llama_cpp")
    order: list[str] = []

    @contextmanager
    def servers(work: Path, target: str, draft: str, drafted: list[int], kind: str) -> Iterator[dict[str, str]]:
        order.append(f"{kind} starts")
        yield {f"llama.cpp {kind}": "http://here"}
        order.append(f"{kind} ends")

    monkeypatch.setattr(llama_cpp_script, "llama_servers", servers)
    monkeypatch.setattr(llama_cpp_script, "run", lambda command: order.append(" ".join(command)))
    models = ["--target-model", "t", "--draft-model", "d"]
    llama_cpp_script.main([*models, "--type", "Q8_0", "--type", "Q4_0", "--", "bench", "--out", "{type}.json"])
    assert order == [
        "Q8_0 starts",
        "bench --out Q8_0.json --baseline-server llama.cpp Q8_0=http://here",
        "Q8_0 ends",
        "Q4_0 starts",
        "bench --out Q4_0.json --baseline-server llama.cpp Q4_0=http://here",
        "Q4_0 ends",
    ]
