"""Tests the commands as real processes: a failed start prints one clear line, and a lost service loses no tokens."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dynatree.cli.main import main
from dynatree.client import Client, DynaTreeError, ServerUnavailableError
from dynatree.serving import healthcheck
from tests.support.forked import Forked
from tests.support.model_zoo import save_random_model
from tests.support.processes import wait_until

pytestmark = pytest.mark.early
COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


def run(*arguments, timeout=120):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout)


def assert_one_clear_line(result, *words, status=1):
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.strip().splitlines() if " INFO " not in line]
    assert len(lines) == 1 or status == 2, result.stderr
    for word in words:
        assert word in lines[-1]


@pytest.fixture
def run_here(capsys):
    """Call `run` in this process, which has already imported torch."""

    def ran(*arguments):
        capsys.readouterr()  # discard the progress messages of saving models
        status = main(arguments)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return ran


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    target = save_random_model(folder / "target", "llama", seed=1)
    draft = save_random_model(folder / "draft", "gpt_neox", seed=2)
    return target, draft


@contextmanager
def starting(folder):
    """Start services as forks, wait until each listens, and kill them at the end."""
    processes = []

    def started(name, *arguments):
        process = Forked([name, *arguments, "--threads", "1"], folder / f"{len(processes)}.log")
        processes.append(process)
        wait_until(lambda: f"dynatree {name}: " in log_of(process) or process.poll() is not None)
        assert process.poll() is None, log_of(process)
        return process

    try:
        yield started
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    with starting(tmp_path) as started:
        yield started


def log_of(process):
    return process.log.read_text()


class Pair:
    """A verify and a draft service with one session each; a stopped service is restarted when it is used."""

    def __init__(self, models, folder, start):
        self.verify, self.draft = f"unix:{folder}/verify.sock", f"unix:{folder}/draft.sock"
        self.processes = {}
        self._start = start
        self._arguments = {
            "verify": ["--target-model", str(models[0]), "--listen", self.verify],
            "draft": [
                *("--draft-model", str(models[1]), "--verify", self.verify, "--listen", self.draft),
                *("--resume-timeout", "5"),  # a lost session keeps its place this long
            ],
        }

    def run(self):
        for name, arguments in self._arguments.items():
            if name not in self.processes or self.processes[name].poll() is not None:
                self.processes[name] = self._start(name, *arguments, "--max-sessions", "1")
        return self


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with starting(folder) as start:
        yield Pair(models, folder, start)


@pytest.fixture
def running(pair):
    return pair.run()


def test_a_wrong_model_path():
    assert_one_clear_line(
        run("verify", "--target-model", "no such model", "--listen", "localhost:0"), "'no such model'"
    )


@pytest.mark.parametrize("path", ["/no/such", "./none", "../none", "no/such/model"])
def test_a_model_path_where_nothing_is_is_no_hub_name(run_here, path):
    result = run_here("verify", "--target-model", path, "--listen", "localhost:0")
    assert_one_clear_line(result, f"there is no model at {path}")


def test_an_unknown_option_is_an_error():
    result = run("verify", "--target-model", "embedded", "--max-session", "3")
    assert_one_clear_line(result, "unrecognized arguments: --max-session", status=2)


def test_an_address_that_is_none(run_here):
    result = run_here("verify", "--target-model", "embedded", "--listen", "localhost")
    assert_one_clear_line(result, "'localhost' is not an address", status=2)


def test_an_address_of_the_web(run_here):
    result = run_here("draft", "--draft-model", "embedded", "--verify", "http://localhost:50052")
    assert_one_clear_line(result, "'http://localhost:50052' is not an address", status=2)


def test_a_busy_port(models, run_here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_here("verify", "--target-model", str(models[0]), "--listen", address)
    assert_one_clear_line(result, f"cannot listen on {address}", "in use")


def test_a_socket_on_which_another_server_answers(models, running, run_here):
    result = run_here("verify", "--target-model", str(models[0]), "--listen", running.verify)
    assert_one_clear_line(result, "another server listens")


def test_a_socket_where_no_folder_can_be(models, run_here):
    result = run_here("verify", "--target-model", str(models[0]), "--listen", "unix:/proc/nope/x.sock")
    assert_one_clear_line(result, "cannot listen on unix:/proc/nope/x.sock")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("1000000000000", ["--kv-tokens 1000000000000 takes", "expected at most"]),
        ("100", ["--kv-tokens is 100", "one session can need"]),
    ],
)
def test_a_kv_cache_that_cannot_be(models, run_here, tokens, words):
    result = run_here("verify", "--target-model", str(models[0]), "--listen", "localhost:0", "--kv-tokens", tokens)
    assert_one_clear_line(result, *words)


def test_an_unreachable_verify_service(models, tmp_path, run_here):
    result = run_here(
        "draft", "--draft-model", str(models[1]), "--verify", f"unix:{tmp_path}/none.sock",
        "--listen", f"unix:{tmp_path}/draft.sock", "--verify-timeout", "1",
    )  # fmt: skip
    assert_one_clear_line(result, "no verify service answered at unix:", "within 1 s")


def test_a_draft_service_where_the_verify_service_should_be(models, tmp_path, running, run_here):
    other = ["--listen", f"unix:{tmp_path}/other.sock"]
    result = run_here("draft", "--draft-model", str(models[1]), "--verify", running.draft, *other)
    assert_one_clear_line(result, f"the service at {running.draft} is not a verify service")


def save_with_another_tokenizer(folder, family):
    model = save_random_model(folder, family, seed=2)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_tokens(["something else"])
    tokenizer.save_pretrained(model)
    return model


def test_different_tokenizers(tmp_path, running, start):
    """The draft service says how many tokens are shared, and completes with the target's tokens."""
    model = save_with_another_tokenizer(tmp_path / "other", "gpt_neox")
    address = f"unix:{tmp_path}/draft.sock"
    drafting = start("draft", "--draft-model", str(model), "--verify", running.verify, "--listen", address)
    with Client(address) as client, Client(running.draft) as same:
        assert (
            client.generate("Hello", max_new_tokens=5).token_ids == same.generate("Hello", max_new_tokens=5).token_ids
        )
    drafting.terminate()
    drafting.wait()
    assert "other and target have different tokenizers: 100% of the target's tokens" in log_of(drafting)


@pytest.mark.parametrize(
    ("settings", "message", "status"),
    [
        (["--set", "depth=0"], "depth is 0, expected a number in [1, 64]", 1),
        (["--set", "depth=8", "--set", "depth=4"], "argument --set: depth is given twice", 2),
    ],
)
def test_bad_policy_settings_are_refused_at_start(run_here, settings, message, status):
    pair = ["--draft-model", "embedded", "--verify", "localhost:1"]
    assert_one_clear_line(run_here("draft", *pair, "--policy", "linear", *settings), message, status=status)


def test_generate_without_a_server(tmp_path):
    assert_one_clear_line(run("generate", "x", "--timeout", "1", "--server", f"unix:{tmp_path}/none.sock"), "none.sock")


@pytest.mark.long
def test_a_verify_service_that_dies_and_comes_back(running):
    """The request in progress fails with its tokens if resuming is off; later ones succeed when the service is back."""
    service = running.processes["verify"]
    with Client(running.draft) as client:
        whole = client.generate("Hello", ignore_eos=True).token_ids
        stream = client.stream("Hello", ignore_eos=True)
        next(stream)
        os.kill(service.pid, signal.SIGKILL)
        service.wait()
        wait_until(lambda: healthcheck.failure(running.draft, 1.0) is not None)
        with (
            Client(running.draft, resume=False) as impatient,
            pytest.raises(DynaTreeError, match="no verify service is ready"),
        ):
            impatient.generate("Hello", max_new_tokens=5)
        running.run()
        rest = [token for chunk in stream for token in chunk.token_ids]
        assert stream.completion.token_ids == whole
        assert 0 < len(rest) < len(whole)
        assert stream.completion.stats.resumes == 1
        assert client.generate("Hello", ignore_eos=True).token_ids == whole
    assert "does not serve" in log_of(running.processes["draft"])


def test_both_services_from_start_to_drain(running):
    with Client(running.draft) as client:
        assert len(client.generate("Hello", max_new_tokens=5, ignore_eos=True).token_ids) == 5
    for name in ("draft", "verify"):
        process = running.processes[name]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert_nothing_is_wrong(process)


def assert_nothing_is_wrong(process):
    """Check that a log contains only the usual lines of services."""
    log = log_of(process)
    for line in log.splitlines():
        assert " INFO " in line or "the verify service at" in line, log


@pytest.mark.long
def test_a_verify_service_that_comes_back_with_another_model(models, tmp_path, start):
    """Requests are checked against the new model, and the statistics about the old one are dropped."""
    verify, draft = f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/draft.sock"

    def serve(model):
        return start("verify", "--target-model", str(model), "--listen", verify)

    service = serve(models[0])
    drafting = start("draft", "--draft-model", str(models[1]), "--verify", verify, "--listen", draft)
    longer = save_random_model(tmp_path / "longer", "gpt2", seed=3, n_positions=400)
    mismatched = save_with_another_tokenizer(tmp_path / "mismatched", "llama")
    with Client(draft) as client:
        assert client.model_info().target.name == "target"
        client.generate("Hello", max_new_tokens=5)
        service.kill()
        service.wait()
        assert client.model_info().target.name == "target"  # as far as it knows
        service = serve(longer)
        wait_until(lambda: client.model_info().target.name == "longer")
        assert client.model_info().target.context_length == 400
        options = {"max_new_tokens": 60, "ignore_eos": True}
        plain = client.generate("Hello", policy="autoregressive", **options)
        assert client.generate("Hello", policy="linear", **options).token_ids == plain.token_ids
        service.kill()
        service.wait()
        serve(mismatched)
        with pytest.raises(DynaTreeError, match=r"out of reach|different tokenizers") as error:
            client.generate("Hello", max_new_tokens=5)
        wait_until(lambda: "different tokenizers" in failure(client))
        assert "draft model draft and target model mismatched" in failure(client)
        assert error.value.token_ids == ()
    drafting.terminate()
    drafting.wait()
    log = log_of(drafting)
    assert f"the verify service at {verify} now has longer (float32)" in log
    assert "different tokenizers" in log


def failure(client):
    with pytest.raises(DynaTreeError) as error:
        client.generate("Hello", max_new_tokens=5)
    return str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("stopped", ["draft", "verify"])
def test_a_completion_that_outlasts_the_grace_is_ended_with_its_reason(models, tmp_path, start, stopped):
    verify, draft = f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/draft.sock"
    grace = ["--grace", "0"]
    options = ["--verify", verify, "--listen", draft, "--resume-timeout", "0.5", *grace]
    processes = {
        "verify": start("verify", "--target-model", str(models[0]), "--listen", verify, *grace),
        "draft": start("draft", "--draft-model", str(models[1]), *options),
    }
    reason = {"draft": "the service is shutting down", "verify": "verify service"}[stopped]
    with Client(draft, resume=False) as client:
        stream = client.stream("Hello", ignore_eos=True, policy="autoregressive", n=64)
        next(stream)
        processes[stopped].send_signal(signal.SIGTERM)
        with pytest.raises(ServerUnavailableError, match=rf"{reason}.*tokens received: \d+") as error:
            list(stream)
        assert len(error.value.token_ids) > 0
    assert processes[stopped].wait(20) == 0
    assert_nothing_is_wrong(processes[stopped])


@pytest.mark.long
@pytest.mark.parametrize(("stopped", "leaves"), [("draft", False), ("draft", True), ("verify", False)])
def test_a_client_that_reads_nothing_holds_up_no_stop(tmp_path, start, stopped, leaves):
    verify, draft = f"unix:{tmp_path}/verify.sock", f"unix:{tmp_path}/draft.sock"
    address_of = {"verify": verify, "draft": draft}
    grace, patience = ["--grace", "0"], ["--resume-timeout", "0.5"]
    processes = {
        "verify": start("verify", "--target-model", "embedded", "--listen", verify, *grace),
        "draft": start("draft", "--draft-model", "embedded", "--verify", verify, "--listen", draft, *grace, *patience),
    }
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with Client(draft, channel_options=small_window, resume=False) as client:
        stream = client.stream("Once upon a time", policy="hybrid", trace=True, ignore_eos=True)
        next(stream)
        wait_until(lambda: is_idle(processes["verify"]))  # the stream's buffer is full
        processes[stopped].send_signal(signal.SIGTERM)
        if leaves:
            wait_until(lambda: healthcheck.failure(address_of[stopped], timeout=1.0))  # the service is stopping
            stream.close()
        assert processes[stopped].wait(20) == 0
        assert_nothing_is_wrong(processes[stopped])
        if not leaves:
            with pytest.raises(ServerUnavailableError):
                list(stream)


def is_idle(process):
    """Whether a process uses less than a tenth of a CPU core."""
    before = processor_seconds(process)
    time.sleep(0.5)
    return processor_seconds(process) - before < 0.05


def processor_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("command", "own", "expected"),
    [("verify", {}, "20000 1"), ("draft", {"GOMP_SPINCOUNT": "7"}, "7 1"), ("generate", {}, "None None")],
)
def test_services_set_the_environment_of_their_models_and_a_choice_of_the_user_stands(command, own, expected):
    names = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    code = f"import os; from dynatree.cli.main import main; main(['{command}', '--help'])"
    code += f"; print(*map(os.environ.get, {names}))"
    result = subprocess.run([sys.executable, "-c", code], env={**inherited, **own}, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == expected, result.stderr
