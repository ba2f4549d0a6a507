"""The commands as real processes: what goes wrong at start is one clear line, and a dead service loses nothing."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from model_zoo import save_random_model
from transformers import PreTrainedTokenizerFast

from dynatree.client import Client, DynaTreeError

COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


def run(*arguments, timeout=120):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout)


def assert_one_clear_line(result, *words, status=1):
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 or status == 2, result.stderr
    for word in words:
        assert word in lines[-1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    target = save_random_model(folder / "target", "llama", seed=1)
    draft = save_random_model(folder / "draft", "gpt_neox", seed=2)
    return target, draft


@pytest.fixture
def start(tmp_path):
    """Start `dynatree NAME ...` and wait until it says that it listens; returns the process."""
    processes = []

    def started(*arguments):
        process = subprocess.Popen([*COMMAND, *arguments, "--threads", "1"], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stderr.readline()
        assert f"dynatree {arguments[0]}: " in line, line + process.stderr.read()
        return process

    yield started
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_wrong_model_path():
    assert_one_clear_line(
        run("verify", "--target-model", "no/such/model", "--listen", "localhost:0"), "'no/such/model'"
    )


def test_an_unknown_option_is_an_error():
    result = run("verify", "--target-model", "embedded", "--max-session", "3")
    assert_one_clear_line(result, "unrecognized arguments: --max-session", status=2)


def test_an_address_that_is_none(models):
    result = run("verify", "--target-model", str(models[0]), "--listen", "localhost")
    assert_one_clear_line(result, "'localhost' is not an address", status=2)


def test_a_busy_port(models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("verify", "--target-model", str(models[0]), "--listen", address)
    assert_one_clear_line(result, f"cannot listen on {address}", "in use")


def test_a_socket_on_which_another_server_answers(models, tmp_path, start):
    address = f"unix:{tmp_path}/verify.sock"
    start("verify", "--target-model", str(models[0]), "--listen", address)
    assert_one_clear_line(
        run("verify", "--target-model", str(models[0]), "--listen", address), "another server answers"
    )


def test_a_socket_where_no_folder_can_be(models):
    result = run("verify", "--target-model", str(models[0]), "--listen", "unix:/proc/nope/x.sock")
    assert_one_clear_line(result, "cannot listen on unix:/proc/nope/x.sock")


def test_more_sessions_than_memory(models):
    result = run("verify", "--target-model", str(models[0]), "--listen", "localhost:0", "--max-sessions", "1000000000")
    assert_one_clear_line(result, "1000000000 sessions", "does not fit into the device's memory")


def test_an_unreachable_verify_service(models, tmp_path):
    result = run(
        "draft", "--draft-model", str(models[1]), "--verify", f"unix:{tmp_path}/none.sock",
        "--listen", f"unix:{tmp_path}/draft.sock", "--verify-timeout", "1",
    )  # fmt: skip
    assert_one_clear_line(result, "no verify service answered at unix:", "within 1 s")


def test_different_tokenizers(models, tmp_path, start):
    other = save_random_model(tmp_path / "other", "gpt_neox", seed=2)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["something else"])
    tokenizer.save_pretrained(other)
    verify = f"unix:{tmp_path}/verify.sock"
    start("verify", "--target-model", str(models[0]), "--listen", verify)
    result = run("draft", "--draft-model", str(other), "--verify", verify, "--listen", f"unix:{tmp_path}/draft.sock")
    assert_one_clear_line(result, "draft model other and target model target have different tokenizers")


def test_bad_policy_settings_are_refused_at_start(models):
    result = run(
        "draft", "--draft-model", str(models[1]), "--verify", "localhost:1", "--policy", "linear", "--set", "depth=0"
    )
    assert_one_clear_line(result, "depth is 0, expected a number in [1, 64]")


def test_generate_without_a_server(tmp_path):
    assert_one_clear_line(run("generate", "x", "--server", f"unix:{tmp_path}/none.sock"), "none.sock")


def test_both_services_from_start_to_drain(models, tmp_path, start):
    verify, draft = f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/draft.sock"
    processes = [
        start("verify", "--target-model", str(models[0]), "--listen", verify),
        start("draft", "--draft-model", str(models[1]), "--verify", verify, "--listen", draft),
    ]
    with Client(draft) as client:
        assert len(client.generate("Hello", max_new_tokens=5, ignore_eos=True).token_ids) == 5
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_a_verify_service_that_dies_and_comes_back(models, tmp_path, start):
    """The request that it served fails, keeping its tokens; the next one after its return succeeds."""
    verify, draft = f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/draft.sock"
    target = ["verify", "--target-model", str(models[0]), "--listen", verify]
    service = start(*target)
    start("draft", "--draft-model", str(models[1]), "--verify", verify, "--listen", draft, "--max-sessions", "1")
    with Client(draft) as client:
        whole = client.generate("Hello", ignore_eos=True).token_ids
        stream = client.stream("Hello", ignore_eos=True)
        next(stream)
        os.kill(service.pid, signal.SIGKILL)
        with pytest.raises(DynaTreeError) as error:
            list(stream)
        kept = error.value.token_ids
        assert len(kept) > 0
        assert kept == whole[: len(kept)]
        service.wait()
        with pytest.raises(DynaTreeError, match="verify service"):
            client.generate("Hello", max_new_tokens=5)
        start(*target)
        deadline = time.monotonic() + 30
        while True:
            try:
                assert client.generate("Hello", ignore_eos=True).token_ids == whole
                break
            except DynaTreeError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
