"""`dynatree generate` against a scripted service: text, JSON, traces, and every way to fail."""

import io
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dynatree.cli.main import main
from dynatree.v1 import tree_pb2
from tests.support.certificates import Authority
from tests.support.fake_draft_service import (  # noqa: F401 - fixtures
    Fail,
    FakeDraftService,
    Hang,
    last,
    message,
    scored,
    service_fixture,
    traced,
)

COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


def start(*arguments: str) -> subprocess.Popen[str]:
    heed_interrupts()
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def heed_interrupts() -> None:
    """Undo that background jobs of a shell, and their children, ignore interrupts.

    This is not done between fork and exec, because gRPC may log to the child's stderr in a fork of this process.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_text_is_printed_as_it_arrives(service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    with start("generate", "Once", "--server", service.address) as process:
        assert process.stdout
        assert process.stdout.read(2) == "Hé"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (130, "\n", "")
    assert service.abandoned.wait(60)


def test_a_server_with_tls_asks_for_its_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Authority(tmp_path).pair("draft")
    server = grpc.server(ThreadPoolExecutor(1))
    keys = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", keys)
    server.start()
    try:
        assert main(["generate", "Once", "--server", f"127.0.0.1:{port}"]) == 1
        assert "if it has TLS, name its authority with --ca" in capsys.readouterr().err
    finally:
        server.stop(None)


def test_text_ends_with_one_newline(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once", "--server", service.address]) == 0
    assert capsys.readouterr() == ("Héllo\n", "")
    assert not service.requests[0].HasField("max_new_tokens")


def test_json_is_one_object_and_nothing_else(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once", "--server", service.address, "--json"]) == 0
    out, err = capsys.readouterr()
    completion = json.loads(out)
    assert list(completion) == ["text", "token_ids", "prompt_tokens", "finish_reason", "stats"]
    assert completion["text"] == "Héllo"
    assert "Héllo" in out
    assert (out.count("\n"), err) == (1, "")


def test_every_option_reaches_the_server(service: FakeDraftService) -> None:
    options = "--max-new-tokens 7 --temperature 0.5 --top-k 3 --top-p 0.75 --seed 9 --stop a --stop b --ignore-eos"
    policy = "--policy linear --set depth=8 --set widths=1,1,3 --set root=single --timeout 30"
    new = "--min-p 0.25 --repetition-penalty 1.5 --logit-bias 5=-2 --logit-bias 6=0.5 --scheme independent"
    counted = "--frequency-penalty -0.5 --presence-penalty 1.25"
    ends = "--stop-token-id 4 --stop-token-id 8"
    words = " ".join((options, policy, new, counted, ends)).split()
    assert main(["generate", "Once", "--server", service.address, *words]) == 0
    (request,) = service.requests
    assert (request.text, request.max_new_tokens, list(request.stop)) == ("Once", 7, ["a", "b"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 9)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 1.25)
    assert dict(sampling.logit_bias) == {5: -2.0, 6: 0.5}
    assert sampling.scheme == tree_pb2.SAMPLING_SCHEME_INDEPENDENT
    assert list(request.stop_token_ids) == [4, 8]
    assert (request.n, request.log_probs, request.trace) == (1, False, False)
    assert request.ignore_eos
    assert (request.policy.name, dict(request.policy.settings)) == ("linear", {"depth": 8.0})
    assert list(request.policy.list_settings["widths"].values) == [1.0, 1.0, 3.0]
    assert dict(request.policy.word_settings) == {"root": "single"}


def test_several_completions_have_a_heading_each(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1), message("llo", 2), last(), message("Good", 3, index=1), last(index=1)]
    assert main(["generate", "Once", "--server", service.address, "--n", "2"]) == 0
    assert capsys.readouterr() == ("--- completion 0\nHéllo\n--- completion 1\nGood\n", "")
    assert service.requests[0].n == 2


def test_several_completions_are_one_json_object(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1), last(), message("Good", 3, index=1), last(index=1)]
    assert main(["generate", "Once", "--server", service.address, "--n", "2", "--json"]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert [completion["text"], *(each["text"] for each in completion["alternatives"])] == ["Hé", "Good"]


def test_json_has_log_probs_on_request(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1, 2, log_probs=[-0.5, -1.5]), last()]
    assert main(["generate", "Once", "--server", service.address, "--json", "--log-probs"]) == 0
    assert json.loads(capsys.readouterr().out)["log_probs"] == [-0.5, -1.5]
    assert service.requests[0].log_probs


def test_json_has_the_likeliest_tokens_and_the_prompts_on_request(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.script = [*scored(), last()]
    options = ["--json", "--top-log-probs", "2", "--prompt-log-probs"]
    assert main(["generate", "Once", "--server", service.address, *options]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert completion["top_log_probs"][0] == [[1, -0.5], [4, -1.0]]
    assert (completion["prompt_ids"], completion["prompt_log_probs"]) == ([7, 8, 9], [-0.25, -4.0])
    assert (service.requests[0].top_log_probs, service.requests[0].prompt_log_probs) == (2, True)


@pytest.mark.parametrize("option", [["--log-probs"], ["--top-log-probs", "2"], ["--prompt-log-probs"]])
def test_log_probs_need_json(service: FakeDraftService, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    assert main(["generate", "Once", "--server", service.address, *option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: dynatree generate")
    assert err.endswith(f"error: {option[0]} needs --json\n")
    assert not service.requests


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_a_trace_has_a_line_for_each_round(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str], tmp_path: Path, json_too: list[str]
) -> None:
    path = tmp_path / "träce.jsonl"
    service.script = [message("Hé", 1), traced(0), traced(1), last(), traced(0, index=1), last(index=1)]
    arguments = ["generate", "Once", "--server", service.address, "--n", "2", "--trace", str(path), *json_too]
    assert main(arguments) == 0
    assert service.requests[0].trace
    assert "trace" not in capsys.readouterr().out
    rounds = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(round_["index"], round_["round"]) for round_ in rounds] == [(0, 0), (0, 1), (1, 0)]
    assert all(list(round_) == ["index", *traced(0).trace.DESCRIPTOR.fields_by_name] for round_ in rounds)
    assert (rounds[0]["parents"], rounds[0]["texts"]) == ([-1, 0, -1], ["a", "é", "�"])
    assert rounds[0]["parameters"] == {"depth": 4.0, "threshold": 0.375}


def test_a_trace_is_written_as_it_arrives(service: FakeDraftService, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    service.script = [traced(0), message("Hé", 1), Hang()]
    with start("generate", "Once", "--server", service.address, "--trace", str(path)) as process:
        assert process.stdout
        assert process.stdout.read(2) == "Hé"
        assert json.loads(path.read_text(encoding="utf-8"))["round"] == 0
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("\n", "")
    assert process.returncode == 130


def test_a_trace_that_cannot_be_opened_sends_nothing(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" / "trace.jsonl"
    assert main(["generate", "Once", "--server", service.address, "--trace", str(path)]) == 1
    assert capsys.readouterr() == ("", f"dynatree: error: cannot write {path}: No such file or directory\n")
    assert not service.requests


def test_a_refused_request_keeps_what_the_trace_file_held(service: FakeDraftService, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("before\n")
    service.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT)]
    assert main(["generate", "", "--server", service.address, "--trace", str(path)]) == 1
    assert path.read_text() == "before\n"
    service.script = [message("Hé", 1), traced(0), last()]
    assert main(["generate", "Once", "--server", service.address, "--trace", str(path)]) == 0
    assert "before" not in path.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_line(service: FakeDraftService, options: list[str]) -> None:
    service.script = [message("Hé", 1), last()]
    command = [*COMMAND, "generate", "Once", "--server", service.address, *options]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert process.stderr == "dynatree: error: cannot write the output: No space left on device\n"
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_trace_that_cannot_be_written_is_one_line(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.script = [message("Hé", 1), traced(0), Hang()]
    assert main(["generate", "Once", "--server", service.address, "--trace", "/dev/full"]) == 1
    assert capsys.readouterr() == ("Hé\n", "dynatree: error: cannot write /dev/full: No space left on device\n")
    assert service.abandoned.wait(60)


def test_the_prompt_is_read_whole_from_standard_input(
    service: FakeDraftService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Öncé\nupon\n".encode()), encoding="ascii"))
    assert main(["generate", "-", "--server", service.address]) == 0
    assert service.requests[0].text == "Öncé\nupon\n"


def test_standard_input_must_be_utf8(
    service: FakeDraftService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert main(["generate", "-", "--server", service.address]) == 1
    assert capsys.readouterr().err == "dynatree: error: standard input is not UTF-8: invalid start byte at byte 2\n"


@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_a_refused_request_is_one_line(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str], json_too: list[str]
) -> None:
    service.script = [Fail(grpc.StatusCode.INVALID_ARGUMENT, "temperature must not be negative")]
    assert main(["generate", "Once", "--server", service.address, "--temperature", "-1", *json_too]) == 1
    error = "dynatree: error: invalid request: temperature must not be negative\n"
    assert capsys.readouterr() == ("", error)


def test_a_failure_in_the_middle_keeps_the_text(service: FakeDraftService, capsys: pytest.CaptureFixture[str]) -> None:
    service.script = [message("Hé", 1), Fail(grpc.StatusCode.INTERNAL, "request 42")]
    assert main(["generate", "Once", "--server", service.address]) == 1
    error = "dynatree: error: the server failed: request 42 (tokens received: 1) [INTERNAL]\n"
    assert capsys.readouterr() == ("Hé\n", error)


def test_a_failure_in_the_middle_keeps_the_text_in_json(
    service: FakeDraftService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.script = [message("Hé", 1), Fail(grpc.StatusCode.INTERNAL, "request 42")]
    assert main(["generate", "Once", "--server", service.address, "--json"]) == 1
    partial = json.loads(capsys.readouterr().out)
    assert (partial["text"], len(partial["token_ids"]), partial["error"]["code"]) == ("Hé", 1, "INTERNAL")


def test_a_token_file_for_services(
    service: FakeDraftService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who\nalice:0123456789abcdef\n")
    assert main(["generate", "Once", "--server", service.address, "--token-file", str(file)]) == 1
    assert capsys.readouterr() == ("", f"dynatree: error: {file} must contain exactly one token and nothing else\n")


def test_nobody_at_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    assert main(["generate", "Once", "--server", address, "--timeout", "0.3"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dynatree: error: the server is unavailable")
    assert address in err


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once", "--server", "localhost"]) == 1
    assert (
        capsys.readouterr().err
        == "dynatree: error: 'localhost' is not an address; expected host:port, unix:PATH or dns:///name:port\n"
    )


def test_an_interrupt_with_json_prints_nothing(service: FakeDraftService) -> None:
    service.script = [message("Hé", 1), Hang()]
    with start("generate", "Once", "--server", service.address, "--json") as process:
        while not service.requests:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)
    assert (process.returncode, *output) == (130, "", "")
    assert service.abandoned.wait(60)


def test_a_reader_that_goes_away_is_no_traceback(service: FakeDraftService) -> None:
    service.script = [message("x" * 100_000, 1) for _ in range(20)]
    with start("generate", "Once", "--server", service.address) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
