"""Tests the bundled pair: its size, its unchanged function when enlarged, and the commands that run on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree import embedded
from dynatree.bench.shipped_pair.grow import SHAPES, GrownShape, GrownWeights, grow, grown_config
from dynatree.bench.shipped_pair.grow import main as grow_command
from dynatree.bench.shipped_pair.train import tokens_per_round
from dynatree.cli import audit
from dynatree.cli.main import main
from dynatree.cli.reference import Reference
from dynatree.client import Client
from dynatree.v1 import draft_pb2, draft_pb2_grpc

pytestmark = pytest.mark.early

COMMAND = [sys.executable, "-m", "dynatree.cli.main"]


def test_the_pair_is_small_and_complete():
    files = [f for folder in (embedded.target_path(), embedded.draft_path()) for f in folder.iterdir()]
    assert {f.name for f in files} >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sum(f.stat().st_size for f in files) < 16e6


def test_the_pair_loads_as_any_other_model_and_writes_english():
    tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
    model = AutoModelForCausalLM.from_pretrained(embedded.target_path())
    assert model.dtype == torch.float32
    prompt = tokenizer("It was a dark and stormy night, and the", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, do_sample=False, max_new_tokens=60)[0])
    words = [word.strip(".,;:!?“”’‘\"'") for word in text.split()]
    assert len(words) > 40
    common = {"the", "of", "and", "to", "a", "in", "was", "I", "that", "it", "had", "he", "with", "as", "his", "not"}
    assert sum(word in common for word in words) > 10


def test_both_models_use_one_tokenizer():
    target, draft = (AutoTokenizer.from_pretrained(p) for p in (embedded.target_path(), embedded.draft_path()))
    assert target.get_vocab() == draft.get_vocab()


@pytest.mark.parametrize("max_shard_size", ["2GB", "10MB"])
@pytest.mark.parametrize(
    ("source", "hidden", "heads"), [(embedded.target_path(), 640, 8), (embedded.draft_path(), 256, 4)]
)
def test_a_grown_model_computes_the_same_function(tmp_path, source, hidden, heads, max_shard_size):
    layers = AutoModelForCausalLM.from_pretrained(source).config.num_hidden_layers
    shape = GrownShape(source, hidden, layers + 3, heads, vocab_size=2100)
    grow(shape, tmp_path, torch.float32, max_shard_size=max_shard_size)
    several = len(list(tmp_path.glob("*.safetensors"))) > 1
    assert several == (max_shard_size == "10MB") == (tmp_path / "model.safetensors.index.json").exists()
    small = AutoModelForCausalLM.from_pretrained(source)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert wide.config.hidden_size == hidden
    assert wide.config.num_hidden_layers == layers + 3
    tokens = torch.randint(2, 2048, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, got = small(tokens).logits, wide(tokens).logits
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert (got[..., :2048] - expected).abs().max() < 1e-3


@pytest.mark.parametrize(("name", "parameters"), [("12b", 11.8e9), ("2.8b", 2.78e9), ("70m", 70.4e6)])
def test_every_weight_of_a_shape_is_grown(name, parameters):
    shape = SHAPES[f"pythia-{name}"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(grown_config(shape), dtype=torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.01)
    weights = GrownWeights.of(shape, torch.bfloat16)
    grown = {each.replace("embed_out", "lm_head"): weights.make(each, "meta") for each in weights.sources}
    model.load_state_dict(grown, assign=True)  # refuses a name or shape that the model does not have


def test_a_model_grown_in_place_of_another_is_the_one_that_loads(tmp_path):
    for vocab_size, max_shard_size in ((2050, "2GB"), (2060, "4MB"), (2070, "2GB")):
        shape = GrownShape(embedded.target_path(), 320, 4, 4, vocab_size)
        grow(shape, tmp_path, max_shard_size=max_shard_size)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.shape == (vocab_size, 320)


def test_a_model_that_does_not_widen_to_a_shape_is_refused(tmp_path):
    with pytest.raises(ValueError, match="320 wide does not grow to 640 with 4 heads"):
        grow(GrownShape(embedded.target_path(), 640, 4, 4, 2048), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_that_is_there_is_grown_over(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    for out in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(SystemExit) as ended:
            grow_command(["pythia-70m", str(out)])
        assert ended.value.code == 2
        assert "already exists; expected a new or empty folder" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(SystemExit) as ended:
        grow_command(["pythia-70m", "/proc/none"])
    assert ended.value.code == 1
    assert "/proc/none cannot be written: " in capsys.readouterr().err


GROWING = """
import os, pathlib, sys
from dynatree.bench.memory import PeakMemory
from dynatree import embedded
from dynatree.bench.shipped_pair.grow import SHAPES, GrownShape, GrownWeights, grow, grown_config

out, source, peak = pathlib.Path(sys.argv[1]), embedded.target_path(), PeakMemory({"own": os.getpid()})
grow(GrownShape(source, 320, 4, 4, 2048), out / "first")  # loads what growing needs
peak.reset()
before = peak.read()["own"]
grow(GrownShape(source, 640, 32, 8, 2048), out / "second", max_shard_size="42MB")
print(before, peak.read()["own"])
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_growing_needs_the_memory_of_a_file_not_of_a_model(tmp_path):
    """The peak is Linux's VmHWM, because a child's `ru_maxrss` begins with its parent's.

    The allocator returns memory as it does for the weights of a large shape.
    """
    result = subprocess.run(
        [sys.executable, "-c", GROWING, str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, peak = map(int, result.stdout.split())
    files = [each.stat().st_size for each in (tmp_path / "second").glob("*.safetensors")]
    assert len(files) >= 8
    assert 0 < peak - before < 2 * max(files)


class Scripted(torch.nn.Module):
    """A draft that is wrong wherever the next token is 0."""

    def forward(self, tokens, **_):
        following = torch.roll(tokens, -1, dims=1)
        logits = torch.nn.functional.one_hot(torch.where(following == 0, 1, following), 10).float()
        return type("Output", (), {"logits": logits})


def test_calibration_counts_rounds():
    text = torch.tensor([[5, 5, 5, 5, 0, 5, 5, 5, 0, 5, 5]])
    # rounds of a chain of 2 after a prompt of 2: 5 5 0 | 5 5 5 | 0 | 5 5; the end cuts the last one
    assert tokens_per_round(Scripted(), text, prompt_length=2, chain=2) == pytest.approx(9 / 4)


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240)


PAIR = ["--target-model", "embedded", "--draft-model", "embedded"]


DEMO = ["demo", "--max-new-tokens", "48", "--breakdown"]


@pytest.mark.long
@pytest.mark.usefixtures("shared_pair")
def test_demo_ends_with_text_and_a_table(capsys):
    assert main(DEMO) == 0
    assert_a_demo(capsys.readouterr().out)


@pytest.mark.long
def test_demo_with_services_of_its_own():
    result = run(*DEMO)
    assert result.returncode == 0, result.stderr
    assert_a_demo(result.stdout)


def assert_a_demo(output):
    for row in ("tokens/s", "speedup", "tokens per round", "acceptance", "round cost", "wire", "outside the forwards"):
        assert row in output
    assert "same tokens" in output
    assert "NO" not in output


@pytest.mark.long
@pytest.mark.usefixtures("shared_pair")
def test_audit_finds_no_divergence_in_the_pair(capsys):
    assert main(["audit", *PAIR, "--max-new-tokens", "32"]) == 0
    assert "EQUAL: 9 prompts" in capsys.readouterr().out


@pytest.mark.long
def test_audit_with_services_of_its_own():
    result = run("audit", *PAIR, "--max-new-tokens", "8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "EQUAL: 9 prompts" in result.stdout


@pytest.mark.usefixtures("shared_pair")
@pytest.mark.parametrize("command", ["demo", "audit"])
def test_policy_settings_reach_the_service(command, capsys):
    assert main([command, *PAIR, "--max-new-tokens", "8", "--policy", "linear", "--set", "dept=3"]) == 1
    assert "policy linear has no setting dept;" in capsys.readouterr().err


@pytest.mark.usefixtures("shared_pair")
def test_audit_reports_the_first_divergence(monkeypatch, capsys):
    """If the reference chooses another token at one position, the audit prints position, tokens and margin."""
    generate = Reference.generate

    def wrong(self, prompt_ids, count):
        tokens = generate(self, prompt_ids, count)
        return [*tokens[:3], (tokens[3] + 1) % 2048, *tokens[4:]]

    monkeypatch.setattr(Reference, "generate", wrong)
    status = main(["audit", *PAIR, "--max-new-tokens", "8"])
    output = capsys.readouterr().out
    assert status == 1
    assert "DIFFERENT at new token 3 of prompt 1" in output
    assert "top-2 margin" in output


def test_audit_of_prompts_that_are_not_there(tmp_path):
    result = run("audit", *PAIR, "--prompts", str(tmp_path / "no"))
    assert result.returncode == 1
    assert result.stderr == f"dynatree: error: {tmp_path}/no cannot be read: No such file or directory\n"


def test_audit_of_prompts_that_are_not_utf_8(tmp_path):
    (tmp_path / "latin").write_bytes("Café".encode("latin-1"))
    with pytest.raises(SystemExit, match="latin is not UTF-8: unexpected end of data at byte 3"):
        audit._prompts(tmp_path / "latin")


def test_generate_json_through_real_processes(embedded_services):
    arguments = ["--server", embedded_services.draft_address, "--max-new-tokens", "20", "--json"]
    result = run("generate", "It was a dark", *arguments)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert set(answer) == {"text", "token_ids", "prompt_tokens", "finish_reason", "stats"}
    assert len(answer["token_ids"]) == 20
    assert answer["finish_reason"] == "length"
    tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
    assert answer["text"] == tokenizer.decode(answer["token_ids"])


def test_stop_strings_and_seeds_through_real_processes(embedded_services):
    with Client(embedded_services.draft_address) as client:
        whole = client.generate("It was a dark", max_new_tokens=80)
        word = whole.text.split()[6]
        stopped = client.generate("It was a dark", max_new_tokens=80, stop=[word])
        assert stopped.finish_reason == "stop"
        assert stopped.text == whole.text[: whole.text.index(word)]
        assert whole.token_ids[: len(stopped.token_ids)] == stopped.token_ids
        sampled = client.generate("It was a dark", max_new_tokens=40, temperature=0.8, seed=5)
        plain = client.generate("It was a dark", max_new_tokens=40, temperature=0.8, seed=5, policy="autoregressive")
        assert sampled.token_ids == plain.token_ids
        assert sampled.stats.seed == 5
        assert (
            sampled.token_ids != client.generate("It was a dark", max_new_tokens=40, temperature=0.8, seed=6).token_ids
        )


def test_the_chunks_join_to_the_completion(embedded_services):
    with Client(embedded_services.draft_address) as client:
        stream = client.stream("Call me", max_new_tokens=64)
        chunks = list(stream)
        assert len(chunks) > 1
        assert "".join(chunk.text for chunk in chunks) == stream.completion.text
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == stream.completion.token_ids


def test_both_services_say_what_their_forwards_took_at_start(embedded_services):
    with grpc.insecure_channel(embedded_services.draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        info = stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=30)
    assert [cost.rows for cost in info.target.forward_costs] == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256]
    assert [cost.rows for cost in info.draft.forward_costs] == [1, 2, 3, 4, 5, 6]
    assert all(cost.seconds > 0 for model in (info.target, info.draft) for cost in model.forward_costs)
