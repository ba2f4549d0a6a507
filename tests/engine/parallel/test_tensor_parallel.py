"""Tests that a target over two ranks gives one process's tokens, and ends with a log line when a rank dies."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dynatree.client import Client
from dynatree.common.errors import StartupError
from dynatree.draft.policies import policy_names
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support import processes
from tests.support.forked import Forked
from tests.support.gguf_files import save_gguf
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.packed_checkpoints import save_packed
from tests.support.processes import is_running, wait_until
from tests.support.services import running_services

FAMILIES = {"gpt_neox": {}, "llama": {}, "qwen2": {"num_key_value_heads": 2}}
PROMPTS = int(os.environ.get("DYNATREE_PROMPTS", "3"))  # prompts of each policy; 20 take minutes
EX_SOFTWARE = 70
Started = tuple[str, Forked, Path]


def service(folder: Path, name: str, *arguments: str) -> AbstractContextManager[Started]:
    """A service with one core."""
    return processes.service(folder, name, *arguments, "--threads", "1")


def children(process: Forked) -> list[int]:
    """Return the processes of the followers."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    return [int(each) for each in listed.split()]


@pytest.mark.early
@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, family: str) -> None:
    """Every policy gives the tokens of plain decoding in one process, in float32, and nothing is left at the end."""
    target = save_random_model(tmp_path / "target", family, seed=1, **FAMILIES[family])
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    generator = random.Random(4)
    prompts = [generator.choices(range(2, 2048), k=generator.randrange(1, 60)) for _ in range(PROMPTS)]

    def tokens(client: Client, policy: str) -> list[tuple[int, ...]]:
        options = {"policy": policy, "max_new_tokens": 20, "ignore_eos": True}
        return [client.generate(prompt, **options).token_ids for prompt in prompts]

    with running_services(tmp_path, target, draft) as services, Client(services.draft_address) as client:
        plain = tokens(client, "autoregressive")
    with (
        service(tmp_path, "ranks", "verify", "--target-model", str(target), "--tensor-parallel", "2") as started,
        service(tmp_path, "drafting", "draft", "--draft-model", str(draft), "--verify", started[0]) as (server, *_),
        Client(server) as client,
    ):
        [follower] = children(started[1])
        for policy in policy_names():
            assert tokens(client, policy) == plain, policy
    wait_until(lambda: not is_running(follower))


@pytest.mark.long
def test_a_rank_that_dies_ends_the_service_with_a_line(tmp_path: Path) -> None:
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    with service(tmp_path, "verify", "verify", "--target-model", str(target), "--tensor-parallel", "2") as started:
        _, process, log = started
        [follower] = children(process)
        os.kill(follower, signal.SIGKILL)
        assert process.wait(20) == EX_SOFTWARE
        assert "rank 1 of the model has died (signal 9), so the service ends" in log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.0, 1.0, 3.0, None])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_followers_end_with_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float | None, number: signal.Signals
) -> None:
    """The service ends some seconds after the start, before the ranks have met; or once all serve (None)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    arguments = ("verify", "--target-model", str(target), "--tensor-parallel", "2", "--threads", "1")
    log = tmp_path / "log"
    process = Forked([*arguments, "--listen", f"unix:{tmp_path}/verify.sock"], log)
    try:
        wait_until(lambda: children(process) and (delay is not None or "dynatree verify:" in log.read_text()))
        time.sleep(delay or 0.0)
        [follower] = children(process)
    finally:
        process.send_signal(number)
    process.wait(20)
    wait_until(lambda: not is_running(follower))
    assert "Traceback" not in log.read_text()
    assert "rank 1" not in log.read_text()
    assert list(tmp_path.glob("dynatree-ranks-*")) == []


FAILING_RANK = """
import sys
from dynatree.common.errors import StartupError
from dynatree.engine import loading, rank_process
from dynatree.engine.parallel import ranks

def load_engine(words, ranks):
    print("fails", flush=True)
    raise {error}("the other end has closed the connection")

loading.load_engine, ranks.Ranks = load_engine, lambda *arguments: None
sys.argv[1:] = ["1", "2", "{store}"]
rank_process.main()
"""


@pytest.mark.long
@pytest.mark.parametrize("error", ["StartupError", "RuntimeError"])
@pytest.mark.parametrize("leads", [True, False])
def test_a_failing_rank_prints_one_line_and_none_once_rank_0_has_ended(tmp_path: Path, error: str, leads: bool) -> None:
    store = tmp_path / "folder" / "store"
    store.parent.mkdir()
    code = FAILING_RANK.format(error=error, store=store)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(pickle.dumps(pickle.dumps("settings")))
        process.stdin.flush()
        assert process.stdout.readline() == b"fails\n"
        if not leads:
            process.stdin.close()
        printed = process.stderr.read().decode()
    assert process.returncode == (EX_SOFTWARE if leads else 0)
    assert printed == ("dynatree: rank 1 of the model: the other end has closed the connection\n" if leads else "")
    assert not store.parent.exists()


FORWARDS = """
import os, signal, sys
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.engine.parallel import ranks
from dynatree.engine.forward.segment import Segment

ranks.SLOW_SECONDS, ranks.STANDSTILL_SECONDS = 2.0, 8.0
engine = load_engine(ModelSettings(sys.argv[1], sessions=1, device="cpu", tensor_parallel=2))
kv = engine.kv_cache.reserve(20)


def forward():
    return engine.forward([Segment(kv, 0, range(5, 14), range(9))])[0]


assert forward().equal(forward())
"""
FAILING = """
def fail(*_):
    handle.remove()
    raise MemoryError


handle = engine.model.model.layers[1].register_forward_pre_hook(fail)
for attempt in (forward, forward, lambda: engine.kv_cache.copy(kv, kv, 5), lambda: engine.kv_cache.move(kv, [3], 2)):
    try:
        attempt()
    except ranks.RankError as error:
        print(error)
"""
STANDING_STILL = """
from subprocess import check_output

[follower] = check_output(["pgrep", "-P", f"{os.getpid()}", "-f", "rank_process"], text=True).split()
print(follower, flush=True)
os.kill(int(follower), signal.SIGSTOP)
forward()
"""


OVERFLOWING = """
from dynatree.engine.forward.tree_mask import ancestor_mask

for token in (1998, 1999):
    kv = engine.kv_cache.reserve(6)
    engine.forward([Segment(kv, 0, [5, 6], range(2))])
    tree = Segment(kv, 2, [7, token, 8, 9], [2, 3, 4, 3], mask=ancestor_mask((-1, 0, -1)))
    print(engine.forward([tree])[0].isfinite().all(1).tolist(), kv.broken)
    prompt = engine.forward([Segment(kv, 2, [7, token, 8], range(2, 5))])[0]
    print(prompt.isfinite().any().item(), kv.broken)
    print(engine.forward([Segment(kv, 5, [9], [5])])[0].isfinite().any().item(), kv.broken)
    engine.kv_cache.release(kv)
"""


def run_forwards(tmp_path: Path, then: str, target: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a process that leads two ranks, with a fault."""
    target = target or save_random_model(tmp_path / "target", "llama", seed=1)
    command = [sys.executable, "-c", FORWARDS + then, str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_ranks_that_are_out_of_step_compute_nothing_more(tmp_path: Path) -> None:
    """Otherwise the next forward pass would be summed with the one that failed on one rank."""
    done = run_forwards(tmp_path, FAILING)
    assert done.stdout.splitlines() == ["the ranks of the model are no longer in step: MemoryError"] * 4, done


@pytest.mark.long
def test_a_rank_that_stands_still_ends_the_process_with_a_line(tmp_path: Path) -> None:
    done = run_forwards(tmp_path, STANDING_STILL)
    assert done.returncode == EX_SOFTWARE, done
    lines = done.stderr.splitlines()
    assert "a forward pass has taken 2 s; a rank of the model may hang" in lines
    assert "a rank of the model has hung for 8 s, so the service ends" in lines
    wait_until(lambda: not is_running(int(done.stdout)))


@pytest.mark.long
def test_heads_of_a_follower_that_overflow_count_on_rank_0(tmp_path: Path) -> None:
    """The first layer's second key head, which is the follower's, overflows at one token; its second value head, too.

    In a tree only the tokens that see this token depend on it, and after a prompt all later ones.
    """
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    tensors = load_file(target / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    for column, (token, name) in enumerate(((1998, "k_proj"), (1999, "v_proj"))):
        embeddings[:, column] = 0.0
        embeddings[token] = 0.0
        embeddings[token, column] = 1.0
        tensors[f"model.layers.0.self_attn.{name}.weight"][16:, column] = 3e38
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    done = run_forwards(tmp_path, OVERFLOWING, target)
    assert done.stdout.splitlines() == 2 * ["[True, False, False, True] False", "False True", "False True"], done


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("gpt2", 2, "transformers has no plan to split gpt2 models over several devices"),
        ("llama", 3, "4 heads and 2 key heads cannot be split over 3 devices"),
        ("qwen2", 2, "4 heads and 1 key heads cannot be split over 2 devices"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(tmp_path: Path, family: str, size: int, message: str) -> None:
    model = save_random_model(tmp_path / "model", family, seed=1)
    with pytest.raises(StartupError, match=message):
        load_engine(ModelSettings(str(model), tensor_parallel=size))


@pytest.mark.long
def test_ctrl_c_lets_a_completion_end_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends the signal to the whole process group."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    with (
        service(tmp_path, "verify", "verify", "--target-model", str(target), "--tensor-parallel", "2") as started,
        service(tmp_path, "draft", "draft", "--draft-model", str(draft), "--verify", started[0]) as (server, *_),
        Client(server) as client,
    ):
        _, process, log = started
        stream = client.stream([5] * 9, max_new_tokens=100, ignore_eos=True)
        tokens = len(next(stream).token_ids)
        os.killpg(process.pid, signal.SIGINT)
        assert tokens + sum(len(chunk.token_ids) for chunk in stream) == 100
        assert process.wait(20) == 0
        assert "Traceback" not in log.read_text()
    assert list(tmp_path.glob("dynatree-ranks-*")) == []


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_random_model(tmp_path / "model", "llama", seed=1)
    with pytest.raises(StartupError, match="--tensor-parallel and --fixed-rows cannot be combined"):
        load_engine(ModelSettings(str(model), tensor_parallel=2, fixed_rows=(32,)))
    with pytest.raises(StartupError, match="first devices of a machine, but --device is cuda:1"):
        load_engine(ModelSettings(str(model), tensor_parallel=2, device="cuda:1"))
    with pytest.raises(StartupError, match="there is no model at"):
        load_engine(ModelSettings(str(tmp_path / "nope"), tensor_parallel=2))
    with monkeypatch.context() as beside_a_gpu:
        beside_a_gpu.setattr("torch.cuda.is_available", lambda: True)
        with pytest.raises(StartupError, match="--device cpu would use this machine's GPUs; expected CUDA_VISIBLE_DEV"):
            load_engine(ModelSettings(str(model), tensor_parallel=2, device="cpu"))
    for layers in (0, 1):
        with pytest.raises(StartupError, match="--tensor-parallel and --resident-layers cannot be combined"):
            load_engine(ModelSettings(str(model), tensor_parallel=2, resident_layers=layers))
    with pytest.raises(StartupError, match="--tensor-parallel: the weights of a GGUF file are not split"):
        load_engine(ModelSettings(str(save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)), tensor_parallel=2))
    packed, _ = save_packed(tmp_path, "gptq", 4)
    with pytest.raises(StartupError, match="quantised weights, which do not go together with --tensor-parallel"):
        load_engine(ModelSettings(str(packed), tensor_parallel=2))
    with pytest.raises(StartupError, match="--tensor-parallel and --layer-cache cannot be combined"):
        load_engine(ModelSettings(str(model), tensor_parallel=2, layer_cache=tmp_path))
    with pytest.raises(StartupError, match="--tensor-parallel and --fixed-rows-file cannot be combined"):
        load_engine(ModelSettings(str(model), tensor_parallel=2, fixed_rows_file=tmp_path / "rows.json"))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(StartupError, match=r"pip install 'dynatree\[parallel\]'"):
        load_engine(ModelSettings(str(model), tensor_parallel=2))
