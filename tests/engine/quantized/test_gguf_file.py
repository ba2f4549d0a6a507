"""Models from GGUF files: the weights and tokens are those that were written, and that transformers reads."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree import embedded
from dynatree.common.errors import StartupError
from dynatree.engine import loading
from dynatree.engine.cpu.native_experts import NativeExperts
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.locality import Locality
from dynatree.engine.loading import load_engine
from dynatree.engine.model.gguf_config import config_of
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.model.tokenizer import load_tokenizer
from dynatree.engine.offload import offloaded_model
from dynatree.engine.quantized.dequantized import dequantized_model
from dynatree.engine.quantized.gguf_file import GGUFFile
from dynatree.engine.served import served
from dynatree.engine.settings import ModelSettings
from tests.support.gguf_files import FAMILIES, GEMMAS, save_gguf, written_gguf
from tests.support.gguf_mutants import Parts
from tests.support.kernel_builds import compiled

MIXTURES = [(("Q4_K", "Q6_K", "Q8_0"), True), (("Q4_0", "Q4_1", "F16"), False), (("Q5_0", "Q5_1", "Q5_K"), False)]
MIXTURES += [(("F32",), True)]
WORDS = 300  # enough of the vocabulary where no text is read: every word of it takes time
CASES = [("llama", *mixture) for mixture in MIXTURES]
CASES += [(family, ("Q4_K", "Q6_K", "Q8_0", "F16"), family in GEMMAS) for family in list(FAMILIES)[1:]]


def same_weights(path, theirs):
    model = skeleton(config_of(str(path)), torch.float32)
    GGUFFile(path, model, native=False).fill(model)
    ours = model.state_dict()
    assert set(ours) == set(theirs.state_dict())
    return all(torch.equal(ours[name], tensor) for name, tensor in theirs.state_dict().items())


def in_32_bits(value):
    if isinstance(value, dict):
        return {key: in_32_bits(each) for key, each in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]} of {' '.join(case[1])}{', tied' * case[2]}")
def written(request, tmp_path_factory):
    """The path of a file of each case, and the model in float32 that was written into it."""
    family, kinds, tied = request.param
    path = tmp_path_factory.mktemp("written") / "model.gguf"
    return path, written_gguf(path, kinds, seed=1, tied=tied, family=family)


def test_the_weights_are_those_that_were_written(written):
    assert same_weights(*written)


def test_the_configuration_is_that_which_was_written(written):
    """As far as it concerns numbers; a file holds them in 32 bits."""
    path, model = written
    ours, theirs = config_of(str(path)).to_dict(), model.config.to_dict()
    others = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    assert {key: in_32_bits(ours[key]) for key in theirs.keys() - others} == {
        key: in_32_bits(theirs[key]) for key in theirs.keys() - others
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers(tmp_path, family):
    """Farther than the windows, with weights that the kernels do not round."""
    path = tmp_path / "model.gguf"
    model = written_gguf(path, ("F32",), seed=2, family=family)
    engine = load_engine(ModelSettings(str(path), dtype="float32", sessions=1))
    tokens = torch.randint(1, 2048, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    kv = engine.kv_cache.reserve(len(tokens))
    (logits,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)))])
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert logits.argmax(1).tolist() == expected.argmax(1).tolist()


@pytest.mark.parametrize(
    ("family", "layers", "values", "expected"),
    [
        ("gemma2", 46, {}, {"query_pre_attn_scalar": 16}),
        ("gemma3", 62, {}, {"query_pre_attn_scalar": 16}),
        ("gemma3", 2, {}, {"query_pre_attn_scalar": 32, "final_logit_softcapping": None}),
        ("gemma3", 2, {"final_logit_softcapping": 30.0}, {"final_logit_softcapping": 30.0}),
        (
            "gemma3",
            2,
            {"attention.sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("gemma3", 2, {"rope.freq_base_swa": 5e3}, {"rope_parameters": [5e3, 8.0]}),
    ],
)
def test_what_gemmas_files_name_and_what_llama_cpp_knows(tmp_path, family, layers, values, expected):
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": layers}
    named = {f"{family}.{key}": value for key, value in values.items()}
    written_gguf(path, ("F16",), seed=1, family=family, words=WORDS, values=named, **sizes)
    config = config_of(str(path))
    found = {name: getattr(config, name) for name in expected}
    if "rope_parameters" in found:
        rope = found["rope_parameters"]
        found["rope_parameters"] = [rope["sliding_attention"]["rope_theta"], rope["full_attention"]["factor"]]
    assert found == expected


@compiled
def test_the_blocks_of_experts_are_repacked_if_gate_and_up_are_of_one_type(tmp_path):
    """And dequantised if not; the kinds of a file's weights go to its tensors in turn."""
    path = tmp_path / "model.gguf"
    written = written_gguf(path, ("Q4_K", "Q6_K"), seed=1, family="qwen3moe", words=WORDS)
    settings = ModelSettings(str(path), dtype="float32", sessions=1)
    for each in load_engine(settings).model.model.layers:
        assert isinstance(each.mlp.experts, NativeExperts)
        assert {each.mlp.experts.gate_up.kind, each.mlp.experts.down.kind} == {"Q4_K", "Q6_K"}
    parts = Parts.of(path)
    name = next(each for each in parts.infos if each.name == b"blk.1.ffn_up_exps.weight")
    other = next(each for each in parts.infos if each.name == b"blk.1.ffn_down_exps.weight")
    assert name.code != other.code
    assert name.sizes == other.sizes
    name.code, other.code, name.offset, other.offset = other.code, name.code, other.offset, name.offset
    path.write_bytes(parts.written()[0])
    model = skeleton(config_of(str(path)), torch.float32)
    files = GGUFFile(path, model, native=True)
    files.fill(model)
    first, second, third = (each.mlp.experts for each in model.model.layers)
    assert [type(first), type(third)] == [NativeExperts] * 2
    assert torch.equal(second.gate_up_proj[:, :256], written.model.layers[1].mlp.experts.gate_up_proj[:, :256])


@compiled
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_layers_of_mixtures_are_not_offloaded(tmp_path, kind):
    path = save_gguf(tmp_path / "model.gguf", (kind,), seed=1, family="qwen3moe", words=WORDS)
    settings = ModelSettings(str(path), sessions=1, resident_layers=0, layer_cache=tmp_path / "layers")
    for asked in (served, load_engine):
        with pytest.raises(StartupError, match="layers of a mixture of experts cannot be offloaded on this CPU"):
            asked(settings)
    assert not (tmp_path / "layers").exists()


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_file_without_a_part_of_the_experts_is_refused(tmp_path, part):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, family="qwen3moe", words=WORDS)
    parts = Parts.of(path)
    parts.infos = [each for each in parts.infos if each.name != f"blk.2.ffn_{part}_exps.weight".encode()]
    path.write_bytes(parts.written()[0])
    name = "down_proj" if part == "down" else "gate_up_proj"
    with pytest.raises(StartupError, match=rf"it lacks the tensor of model\.layers\.2\.mlp\.experts\.{name}"):
        served(ModelSettings(str(path)))


@pytest.mark.parametrize("family", ["mixtral", "qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("used", [0, 5, 9])
def test_a_number_of_chosen_experts_that_no_row_can_have_is_refused(tmp_path, family, used):
    path = tmp_path / "model.gguf"
    name = "llama" if family == "mixtral" else family
    written_gguf(path, ("Q8_0",), seed=1, family=family, words=WORDS, values={f"{name}.expert_used_count": used})
    with pytest.raises(StartupError, match=f"its {name}.expert_used_count is {used}, expected 1 to 4"):
        served(ModelSettings(str(path)))


def test_gemma_2_without_a_cap_has_none(tmp_path):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, family="gemma2", words=WORDS, values={"gemma2.attn_logit_softcapping": 0.0})
    assert config_of(str(path)).attn_logit_softcapping is None
    assert "capped scores" not in load_engine(ModelSettings(str(path), sessions=1)).kv_cache.shape.features


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemmas_without_a_window_see_all_tokens_in_all_layers(tmp_path, family):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, family=family, sliding_window=0)
    assert set(config_of(str(path)).layer_types) == {"full_attention"}
    engine = load_engine(ModelSettings(str(path), sessions=1))
    assert engine.kv_cache.shape.locality(0) == Locality()


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_the_weights_are_those_that_transformers_reads(tmp_path, family):
    path = save_gguf(tmp_path / "model.gguf", ("Q4_0", "Q6_K", "F16"), seed=1, family=family)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert same_weights(path, theirs)


@compiled
def test_the_memory_of_the_weights_is_known_from_the_header(written):
    path, _ = written
    model = skeleton(config_of(str(path)), torch.bfloat16)
    files = GGUFFile(path, model, native=True)
    told = files.bytes_of(model), files.bytes_of(model.model.layers[1], "model.layers.1.")
    files.fill(model)
    for module, size in zip((model, model.model.layers[1]), told, strict=True):
        layers = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
        panels = [part for each in layers for part in (each.weight, each.bias) if part is not None]
        assert size == sum(each.nbytes for each in (*module.parameters(), *panels))


@compiled
def test_quantised_logits_are_close_to_those_of_the_weights_in_float32(written):
    path, model = written
    engine = load_engine(ModelSettings(str(path), dtype="float32", sessions=1))
    # the layers of Qwen2-MoE's shared expert take turns in their types, which a program does not compute
    assert isinstance(engine.runner, NativeRunner) or model.config.model_type == "qwen2_moe"
    tokens = list(range(100, 160))
    kv = engine.kv_cache.reserve(len(tokens))
    with torch.inference_mode():
        (ours,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)))])
        theirs = model(torch.tensor([tokens])).logits[0]
    errors = (ours - theirs).square().mean(1)
    if any(isinstance(each, NativeExperts) for each in engine.model.modules()):
        # near-ties of a router wake other experts for a few rows
        errors = errors.median()
    error = errors.mean().sqrt() / theirs.std()
    assert error < 0.03, "rows are rounded to 8 bits, by half a percent of their largest number"
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.9


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def test_rotary_factors_give_the_scaling_of_llama3(tmp_path):
    """By the kernels, and by transformers, whose own reading of the file passes over the factors."""
    path = tmp_path / "model.gguf"
    written = written_gguf(path, ("F32",), seed=1, rope_parameters=LLAMA3)
    settings = ModelSettings(str(path), dtype="float32", sessions=1)
    engine, reference = load_engine(settings), dequantized_model(settings, "float32", torch.device("cpu"))
    expected = written.model.rotary_emb.inv_freq
    for model in (engine.model, reference):
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected, rtol=1e-6, atol=0)
    tokens = list(range(100, 160))
    kv = engine.kv_cache.reserve(len(tokens))
    with torch.inference_mode():
        (ours,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)))])
        theirs = written(torch.tensor([tokens])).logits[0]
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (plain - theirs).abs().max() > 0.01, "or the test tests nothing"


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE |= {"long_factor": [1.0 + each for each in range(16)], "short_factor": [1.0 + each / 8 for each in range(16)]}
LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 100, "family": "phi3"}


def test_the_short_factors_of_phi_3_are_served_up_to_its_original_context(tmp_path):
    path = tmp_path / "model.gguf"
    written = written_gguf(path, ("F32",), seed=1, **LONG)
    ours, theirs = config_of(str(path)), written.config
    scale = ours.rope_parameters.pop("attention_factor")
    assert scale == pytest.approx(written.model.rotary_emb.attention_scaling, rel=1e-7)
    assert scale > 1.01, "or the test tests nothing"
    assert ours.rope_parameters == theirs.rope_parameters
    assert ours.original_max_position_embeddings == theirs.original_max_position_embeddings
    engine = load_engine(ModelSettings(str(path), dtype="float32", sessions=1, max_context=100))
    tokens = list(range(100, 200))
    kv = engine.kv_cache.reserve(len(tokens))
    with torch.inference_mode():
        (logits,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)))])
        torch.testing.assert_close(logits, written(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(StartupError, match="changes with the sequence length beyond 100 tokens"):
        load_engine(ModelSettings(str(path), sessions=1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("none positive", r"rope_factors_short\.weight has a number that is not positive"),
        ("only one", r"its phi3\.rope\.scaling\.type is 'longrope', which is not read"),
        ("another type", r"its phi3\.rope\.scaling\.type is 'dynamic', which is not read"),
    ],
)
def test_factors_of_phi_3_that_are_not_computed_are_refused(tmp_path, change, reason):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, words=WORDS, **LONG)
    parts = Parts.of(path)
    short = next(each for each in parts.infos if each.name == b"rope_factors_short.weight")
    if change == "none positive":
        parts.data[short.offset : short.offset + 4] = np.float32(-1).tobytes()
    elif change == "only one":
        parts.infos.remove(short)
    else:
        kind = next(each for each in parts.pairs if each.key == b"phi3.rope.scaling.type")
        kind.value = (7).to_bytes(8, "little") + b"dynamic"
    path.write_bytes(parts.written()[0])
    with pytest.raises(StartupError, match=reason):
        config_of(str(path))


@pytest.mark.parametrize(
    ("family", "factor", "reason"),
    [
        ("llama", 0.0, r"rope_freqs\.weight has a number that is not positive"),
        ("llama", np.nan, r"rope_freqs\.weight has a number that is not positive"),
        ("qwen3", 1.0, r"no place for its tensor rope_freqs\.weight"),
    ],
)
def test_rotary_factors_that_are_not_computed_are_refused(tmp_path, family, factor, reason):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, family=family, rope_parameters=LLAMA3)
    place = next(int(each.data_offset) for each in gguf.GGUFReader(path).tensors if each.name == "rope_freqs.weight")
    raw = bytearray(path.read_bytes())
    raw[place + 4 : place + 8] = np.float32(factor).tobytes()
    path.write_bytes(raw)
    with pytest.raises(StartupError, match=reason):
        load_engine(ModelSettings(str(path), sessions=1))


@pytest.mark.parametrize("name", ["model.GGUF", "model"])
def test_a_file_may_have_any_name(tmp_path, name):
    path = save_gguf(tmp_path / name, ("Q8_0",), seed=1)
    with pytest.raises(StartupError, match=f"model {name} is a GGUF file"):
        ModelSettings(str(path), weights="int8")
    engine = load_engine(ModelSettings(str(path), sessions=1))
    assert (engine.info.name, served(ModelSettings(str(path))).weights) == (name, "Q8_0")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_that_of_the_file(tmp_path, family):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, family=family)
    theirs = AutoTokenizer.from_pretrained(embedded.target_path())
    text = "Once upon a time, there was a tree."
    assert load_tokenizer(str(path))(text)["input_ids"] == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "qwen3",
            {"values": {"qwen3.rope.scaling.type": "yarn"}},
            "rope.scaling.type is 'yarn', which is not read",
        ),
        (
            "gemma3",
            {"values": {"gemma3.attention.scale": 0.5}},
            "attention.scale is 0.5, which is not read",
        ),
        (
            "qwen3moe",
            {"values": {"qwen3moe.expert_gating_func": 2}},
            "expert_gating_func is 2, which is not read",
        ),
        ("qwen2moe", {"values": {"qwen2moe.expert_weights_scale": 2.5}}, "expert_weights_scale is 2.5, which is not"),
        ("mixtral", {"values": {"llama.expert_weights_norm": False}}, "expert_weights_norm is False, expected True"),
        ("mixtral", {"values": {"llama.expert_group_count": 2}}, "expert_group_count is 2, which is not read"),
        (
            "gemma2",
            {"values": {"gemma2.rope.scaling.type": "linear"}},
            "rope.scaling.type is 'linear', which is not read",
        ),
        ("smollm3", FAMILIES["phi3"], "its smollm3.rope.dimension_count is 32, expected 64"),
    ],
)
def test_features_that_are_not_computed_are_refused(tmp_path, family, changes, reason):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, family=family, **changes)
    with pytest.raises(StartupError, match=reason):
        load_engine(ModelSettings(str(path), sessions=1))


def test_a_sliding_window_is_that_of_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, family="phi3", sliding_window=100)
    engine = load_engine(ModelSettings(str(path), sessions=1))
    assert engine.kv_cache.shape.locality(0) == Locality(window=100)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rope.scaling.type", "linear"), ("rope.scaling.factor", 4.0), ("attention.sliding_window", 4096)),
        *(("attention.clamp_kqv", 8.0), ("attention.scale", 0.1), ("final_logit_softcapping", 30.0)),
        *(("logit_scale", 16.0), ("residual_scale", 0.22), ("attention.max_alibi_bias", 8.0), ("swin_norm", True)),
        *(("attention.key_length", 32), ("attention.value_length", 128), ("a_key_of_tomorrow", "yes")),
        ("attention.causal", False),
    ],
)
def test_a_key_that_changes_the_model_and_is_not_read_is_refused(tmp_path, key, value):
    """By it, transformers would compute another model, since it passes over such keys."""
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, values={f"llama.{key}": value}, words=WORDS)
    with pytest.raises(StartupError, match=rf"its llama\.{key} is .*, (which is not read|expected 64|expected True)"):
        config_of(str(path))


@compiled
@pytest.mark.parametrize("kinds", [("F16",), ("Q4_1", "Q8_0"), ("Q6_K", "F32")])
def test_a_draft_is_rounded_as_it_is_loaded(tmp_path, monkeypatch, kinds):
    """The whole model is never in memory as floats; blocks are rounded too, but no target's weights are."""
    path = save_gguf(tmp_path / "model.gguf", kinds, seed=1)
    settings = {"chooses_tokens": False, "weights": "int8", "dtype": "float32", "sessions": 1}
    parts, quantize = [], offloaded_model.quantize
    monkeypatch.setattr(offloaded_model, "quantize", lambda part, *more: parts.append(part) or quantize(part, *more))
    engine = load_engine(ModelSettings(str(path), **settings))
    assert parts == list(engine.model.model.layers)
    assert engine.info.numerics.startswith("int8 weights")
    whole = load_engine(ModelSettings(str(path), dtype="float32", sessions=1))
    tokens = list(range(40))
    ours, theirs = (
        each.forward([Segment(each.kv_cache.reserve(40), 0, tokens, range(40))])[0] for each in (engine, whole)
    )
    assert (ours - theirs).square().mean().sqrt() < 0.05 * theirs.std()
    assert {each.format_name for each in engine.model.modules() if isinstance(each, QuantizedLinear)} == {"int8"}
    with pytest.raises(StartupError, match="is a GGUF file, which has its own precision"):
        ModelSettings(str(path), weights="int8")


def test_keys_that_change_nothing_are_accepted(tmp_path):
    neutral = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0, "attention.clamp_kqv": 0.0}
    neutral |= {"logit_scale": 1.0, "attention.key_length": 64, "attention.causal": True, "swin_norm": False}
    path = tmp_path / "model.gguf"
    written_gguf(path, ("Q8_0",), seed=1, values={f"llama.{key}": value for key, value in neutral.items()}, words=WORDS)
    assert config_of(str(path)).num_hidden_layers == 3


def test_a_file_without_a_size_is_refused(tmp_path):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, family="gemma", words=WORDS)
    path.write_bytes(path.read_bytes().replace(b"gemma.block_count", b"gemma.block_total"))
    with pytest.raises(StartupError, match=r"it has no gemma\.block_count"):
        load_engine(ModelSettings(str(path), sessions=1))


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "heads", "nan"])
def test_tensors_that_do_not_go_together_are_refused(tmp_path, change):
    """`served` knows what the header tells, and says it with the same words."""
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, words=WORDS)
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
    with pytest.raises(StartupError, match=reason) as refused:
        load_engine(ModelSettings(str(path), sessions=1))
    if change != "nan":
        with pytest.raises(StartupError) as told:
            served(ModelSettings(str(path)))
        assert str(told.value) == str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"gpt2", b"bert", "stating tokenizer 'bert'"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.others", "tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused_before_the_weights_are(tmp_path, monkeypatch, old, new, reason):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, words=WORDS)
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    monkeypatch.setattr(loading, "quantized_model", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(StartupError, match=reason) as refusal:
        load_engine(ModelSettings(str(path), sessions=1))
    assert "\n" not in str(refusal.value)


def test_a_file_that_lacks_a_tensor_is_refused_before_any_is_read(tmp_path, monkeypatch):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, words=WORDS)
    parts = Parts.of(path)
    parts.infos = [each for each in parts.infos if each.name != b"blk.2.ffn_up.weight"]
    path.write_bytes(parts.written()[0])
    monkeypatch.setattr(GGUFFile, "_raw", lambda *_, **__: pytest.fail("a tensor was read"))
    with pytest.raises(StartupError, match=r"it lacks the tensor of model\.layers\.2\.mlp\.up_proj\.weight"):
        load_engine(ModelSettings(str(path), sessions=1))


def test_metadata_of_a_wrong_type_are_refused_with_the_cause(tmp_path):
    path = save_gguf(tmp_path / "model.gguf", ("Q8_0",), seed=1, words=WORDS)
    parts = Parts.of(path)
    context = next(each for each in parts.pairs if each.key == b"llama.context_length")
    context.code, context.value = 8, b"\3\0\0\0\0\0\0\x00160"
    path.write_bytes(parts.written()[0])
    with pytest.raises(StartupError, match=r"could not be loaded: .*max_position_embeddings.*expected int, got str"):
        load_engine(ModelSettings(str(path), sessions=1))
