"""Models from GGUF files: the weights and tokens are those that transformers reads from the file."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dynatree.common.errors import StartupError
from dynatree.engine import loading
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.quantized import gguf_model
from dynatree.engine.quantized.gguf_model import load_gguf
from dynatree.engine.settings import ModelSettings
from tests.campaigns.fuzz_gguf import REFUSED, SERVED, outcomes
from tests.support.gguf_files import save_gguf
from tests.support.gguf_mutants import KINDS, Parts
from tests.support.kernel_builds import compiled

MIXTURES = [(("Q4_K", "Q6_K", "Q8_0"), True), (("Q4_0", "Q4_1", "F16"), False), (("Q5_0", "Q5_1", "Q5_K"), False)]
MIXTURES += [(("F32",), True)]


def transformers_model(path):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize(("kinds", "tied"), MIXTURES)
def test_the_weights_are_those_that_transformers_reads(tmp_path, kinds, tied):
    path = save_gguf(tmp_path / "model.gguf", kinds, seed=1, tied=tied)
    theirs = transformers_model(path).state_dict()
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    ours = load_gguf(path, config, torch.float32, native=False).state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@compiled
@pytest.mark.parametrize(("kinds", "tied"), MIXTURES)
def test_quantised_logits_are_close_to_those_of_the_weights_in_float32(tmp_path, kinds, tied):
    path = save_gguf(tmp_path / "model.gguf", kinds, seed=1, tied=tied)
    engine = load_engine(ModelSettings(str(path), dtype="float32", sessions=1))
    tokens = list(range(100, 160))
    kv = engine.kv_cache.reserve(len(tokens))
    with torch.inference_mode():
        (ours,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)))])
        theirs = transformers_model(path)(torch.tensor([tokens])).logits[0]
    error = (ours - theirs).square().mean().sqrt() / theirs.std()
    assert error < 0.03, "rows are rounded to 8 bits, by half a percent of their largest number"
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.9


def test_the_tokenizer_is_that_of_the_file(tmp_path):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)
    tokenizer = load_engine(ModelSettings(str(path), sessions=1)).tokenizer
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = "Once upon a time, there was a tree."
    assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "heads", "nan"])
def test_tensors_that_do_not_go_together_are_refused(tmp_path, change):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)
    reader = gguf.GGUFReader(path)
    at = {each.name: each for each in reader.tensors}
    raw = bytearray(path.read_bytes())
    if change == "missing":
        name, other, reason = b"blk.1.attn_k.weight", b"blk.9.attn_k.weight", "blk.9.attn_k.weight"
        raw = raw.replace(name, other)
    elif change == "unknown":
        raw = raw.replace(b"blk.1.attn_norm.weight", b"blk.1.attn_form.weight")
        reason = "no place for its tensor blk.1.attn_form.weight"
    elif change in ("shape", "heads"):
        key = b"llama.attention.head_count_kv"
        place = raw.index(key) + len(key) + 4
        raw[place : place + 4] = np.uint32({"shape": 4, "heads": 0}[change]).tobytes()
        reason = {"shape": "expected", "heads": "configuration"}[change]
    else:
        begin = int(at["blk.1.ffn_up.weight"].data_offset)
        raw[begin : begin + 2] = np.float16(np.nan).tobytes()
        reason = "blk.1.ffn_up.weight: a scale is NaN"
    path.write_bytes(raw)
    with pytest.raises(StartupError, match=reason):
        load_engine(ModelSettings(str(path), sessions=1))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"gpt2", b"bert", "stating tokenizer 'bert'"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.others", "tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused_before_the_weights_are(tmp_path, monkeypatch, old, new, reason):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    monkeypatch.setattr(loading, "quantized_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(StartupError, match=reason) as refusal:
        load_engine(ModelSettings(str(path), sessions=1))
    assert "\n" not in str(refusal.value)


def test_a_file_that_lacks_a_tensor_is_refused_before_any_is_read(tmp_path, monkeypatch):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)
    parts = Parts.of(path)
    parts.infos = [each for each in parts.infos if each.name != b"blk.2.ffn_up.weight"]
    path.write_bytes(parts.written()[0])
    monkeypatch.setattr(gguf_model._Loading, "_raw", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(StartupError, match=r"it lacks the tensor of model\.layers\.2\.mlp\.up_proj\.weight"):
        load_engine(ModelSettings(str(path), sessions=1))


def test_metadata_of_a_wrong_type_are_refused_with_the_cause(tmp_path):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1)
    parts = Parts.of(path)
    context = next(each for each in parts.pairs if each.key == b"llama.context_length")
    context.code, context.value = 8, b"\3\0\0\0\0\0\0\x00160"
    path.write_bytes(parts.written()[0])
    with pytest.raises(StartupError, match=r"could not be loaded: .*max_position_embeddings.*expected int, got str"):
        load_engine(ModelSettings(str(path), sessions=1))


def test_harmed_files_are_refused_in_a_line_or_served_as_transformers_reads_them():
    """The short form of `python -m tests.campaigns.fuzz_gguf`."""
    found = list(outcomes(first=0, count=3 * len(KINDS)))
    assert [each for each in found if each.end not in (SERVED, REFUSED)] == []
    assert {each.end for each in found} == {SERVED, REFUSED}
    assert {each.kind for each in found} == set(KINDS)
