"""Tests that models with unsupported computations are refused, and that served models give the right tokens."""

import logging
import sys
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MusicgenConfig, MusicgenMelodyConfig
from transformers.models.emu3 import Emu3TextConfig
from transformers.models.llama import modeling_llama

from dynatree.common.errors import StartupError
from dynatree.engine.adapters.registry import RECURRENT, adapt
from dynatree.engine.examined import examined
from dynatree.engine.forward import recurrent_batch
from dynatree.engine.forward.attention import NAME
from dynatree.engine.kv.locality import Locality
from dynatree.engine.loading import load_engine
from dynatree.engine.model.skeleton import skeleton
from dynatree.engine.offload import choice
from dynatree.engine.offload.choice import kv_bytes_of
from dynatree.engine.parallel.starting import started_ranks
from dynatree.engine.settings import ModelSettings
from dynatree.engine.small_engine import small_engine
from dynatree.engine.support import probe
from dynatree.engine.support.families import record_kv_shape, recurrent_size_of, recurs
from dynatree.engine.support.small_model import SPAN, small_model, spans
from tests.support.census import DTYPES
from tests.support.door import saved, served
from tests.support.families import tiny_config, tiny_model
from tests.support.kernel_builds import compiled
from tests.support.model_zoo import save_random_model

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


def in_every_dtype(model, folder, **settings):
    """Yield each dtype, and the result of serving the model in it."""
    path = saved(model, folder / "model")
    for dtype in DTYPES:
        yield dtype, served(path, dtype, **settings)


def check_refusal(model, folder, reason):
    for dtype, found in in_every_dtype(model, folder):
        assert found.refusal is not None, f"{dtype}: {found.wrong} of {found.compared} tokens are wrong"
        assert reason in found.refusal, dtype


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("doge", {}, "a mask of the model's own"),
        ("diffllama", {}, "it attends more than once in layer 0"),
        ("recurrent_gemma", {}, "linear_attention layers"),
        ("zaya", {}, "hybrid layers"),
        ("bloom", {}, "bloom models do not go through transformers' attention interface"),
        ("falcon", {"alibi": True}, "a position bias (ALiBi)"),
        # attention ignores these keys, but the cache of generate() does not
        ("mistral", {"sliding_window": 1}, "its sliding window is 1 token long"),
        ("llama", {"sliding_window": 100}, "generate() keeps a sliding window of 100 tokens"),
        ("llama", {"attention_chunk_size": 64}, "generate() keeps a sliding window of 64 tokens"),
        ("llama", {"sliding_window": 32} | WINDOWS, "generate() keeps a sliding window of 32 tokens"),
        ("gpt_neox", {"sliding_window": 64}, "generate() keeps a sliding window of 64 tokens"),
        ("granite", {"sliding_window": 64}, "generate() keeps a sliding window of 64 tokens"),
        ("llama", {"is_causal": False}, "tokens that see later ones"),
        ("roberta", {"is_decoder": True}, "gives different logits under tree attention"),
        ("bert", {}, "shows neither every earlier token"),
    ],
)
def test_what_is_not_computed_is_refused_in_every_dtype(tmp_path, family, changes, reason):
    check_refusal(tiny_model(tiny_config(family, **changes)), tmp_path, reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MusicgenConfig(), "musicgen is an encoder-decoder"),  # of several language models
        (MusicgenMelodyConfig(), "musicgen_melody is an encoder-decoder"),
        (Emu3TextConfig(vocab_size=2048), "no small model could be made of its configuration: Unrecognized config"),
    ],
    ids=["musicgen", "musicgen_melody", "emu3_text_model"],
)
def test_a_configuration_is_refused_in_one_line(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(StartupError) as refusal:
        examined(ModelSettings(str(tmp_path)))
    assert reason in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


ORIGINAL = 156  # the tokens of `served`
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE |= {"short_factor": [1.0 + pair / 8 for pair in range(8)], "long_factor": [2.0 + pair for pair in range(8)]}
NESTED = {"layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": LONGROPE}}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
        pytest.param("gemma3_text", NESTED, marks=pytest.mark.long),
    ],
)
def test_rotary_scaling_by_the_length_is_exact_within_the_original_context(tmp_path, family, changes):
    for dtype, found in in_every_dtype(tiny_model(tiny_config(family, **changes)), tmp_path, max_context=ORIGINAL):
        assert (found.refusal, found.wrong) == (None, 0), dtype
        assert found.compared > 20, dtype


@pytest.mark.parametrize("family", ["phi3", "gemma3_text"])
def test_longrope_beyond_the_original_context_is_refused(tmp_path, family):
    changes = {
        "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        "gemma3_text": NESTED,
    }
    path = saved(tiny_model(tiny_config(family, **changes[family])), tmp_path / "model")
    found = served(path, "float32", max_context=ORIGINAL + 1)
    assert found.refusal is not None
    assert found.refusal.endswith(f"the context is {ORIGINAL + 1}; expected --max-context of at most {ORIGINAL}")


@pytest.mark.parametrize("max_context", [16, 17])
def test_a_window_counts_where_the_context_is_longer(tmp_path, max_context):
    path = saved(tiny_model(tiny_config("mistral", sliding_window=16)), tmp_path / "model")
    engine = load_engine(ModelSettings(str(path), max_context=max_context, sessions=1))
    assert engine.kv_cache.shape.features == (() if max_context == 16 else ("sliding windows",))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in ("llama", "gpt_neox", "qwen3_moe")),  # the others: test_census.py
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 100}),
        ("phi3", {"sliding_window": 16, "use_sliding_window": False}),  # a key that the family ignores
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16} | WINDOWS),
        ("gemma3", {}),
        ("gemma4_text", {"num_key_value_heads": 4, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2}),
        ("gpt_oss", {}),
        ("llama4_text", {}),
        ("deepseek_v3", {}),
        ("lfm2", {}),
        ("kimi_linear", {}),
        ("falcon_h1", {}),
    ],
)
def test_what_is_served_has_the_right_tokens(tmp_path, family, changes):
    for dtype, found in in_every_dtype(tiny_model(tiny_config(family, **changes)), tmp_path):
        assert (found.refusal, found.wrong) == (None, 0), dtype
        assert found.compared > 20, dtype


@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_offloaded_layers_have_their_own_localities(tmp_path, family):
    path = saved(tiny_model(tiny_config(family)), tmp_path / "model")
    found = served(path, "float32", resident_layers=1, layer_cache=tmp_path / "layers")
    assert (found.refusal, found.wrong) == (None, 0)


@compiled
def test_layers_with_experts_are_not_offloaded(tmp_path):
    """Torch would compute the experts: their bits would be others than in memory, and in other passes."""
    path = saved(tiny_model(tiny_config("gpt_oss")), tmp_path / "model")
    found = served(path, "float32", resident_layers=1, layer_cache=tmp_path / "layers")
    assert "the layers of a mixture of experts cannot be offloaded on this CPU" in found.refusal


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize(("family", "kind"), [("mistral", "window"), ("llama4_text", "chunk")])
def test_a_window_or_a_chunk_that_is_off_by_one_fails_the_probe(family, kind, step):
    def wrong(model, shape, context_length):
        assert any(getattr(each, kind) == SPAN for each in shape.localities)
        localities = tuple(
            replace(each, **{kind: SPAN + step}) if getattr(each, kind) else each for each in shape.localities
        )
        return small_engine(model, replace(shape, localities=localities), context_length)

    with torch.inference_mode(), pytest.raises(StartupError, match="gives different logits under tree attention"):
        probe.check_computation(tiny_config(family), 256, wrong)


@pytest.mark.parametrize("family", ["mistral", "llama4_text"])
def test_a_locality_that_is_off_by_one_agrees_with_no_mask(monkeypatch, family):
    lowest = Locality.lowest
    monkeypatch.setattr(Locality, "lowest", lambda self, positions: (lowest(self, positions) - 1).clamp(0))
    with torch.inference_mode(), pytest.raises(StartupError, match="shows neither every earlier token"):
        record_kv_shape(small_model(tiny_config(family), 256, seed=0), 256)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma4_text", "deepseek_v3", "lfm2", "qwen3_next"])
def test_the_bytes_of_a_token_follow_from_the_configuration(family):
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    adapt(model)
    with torch.inference_mode():
        shape = record_kv_shape(model, 256)
    assert kv_bytes_of(config, torch.float32) == shape.slot_bytes(torch.float32)


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "mamba", "mamba2", "minimax", "qwen3_next"])
def test_the_bytes_of_a_session_count_its_states_before_any_weights_are_loaded(family):
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    adapt(model)
    with torch.inference_mode():
        recorded = record_kv_shape(model, 256).recurrent
    unfilled = skeleton(config, torch.float32)
    assert recurrent_size_of(unfilled) == recorded
    settings = ModelSettings("", speculative_slots=100, max_context=156)
    keys = kv_bytes_of(config, torch.float32) * (256 if hasattr(config, "max_position_embeddings") else 100)
    states = recorded.session_bytes(True) + recorded.pass_bytes(101)
    assert choice._session_bytes(settings, config, unfilled) == keys + states


def test_tensor_parallel_ranks_refuse_what_they_do_not_compute(tmp_path):
    tiny_config("gpt_oss").save_pretrained(tmp_path)
    reason = "attention sinks and sliding windows, which --tensor-parallel does not compute"
    with pytest.raises(StartupError, match=reason):
        examined(ModelSettings(str(tmp_path), tensor_parallel=2))


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_tensor_parallel_refuses_models_without_heads(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=f"transformers has no plan to split {family} models"):
        started_ranks(ModelSettings(str(tmp_path), tensor_parallel=2), "model")


@pytest.mark.parametrize(
    ("settings", "device", "reason"),
    [
        ({"chooses_tokens": False}, "cpu", "a draft cannot go back before a state; expected another --draft-model"),
        (
            {"copy": ModelSettings("", weights="int4")},
            "cpu",
            "--draft-model self:int4 cannot go back .* expected another",
        ),
        ({}, "cuda", "they are computed on a CPU only"),
        ({"fixed_rows": (8,)}, "cpu", "--fixed-rows does not compute them"),
        ({"tensor_parallel": 2}, "cpu", "--tensor-parallel does not compute them"),
        ({"weights": "int8"}, "cpu", "with quantised weights a tree could change its tokens"),
        ({"weights": "int4", "dtype": "bfloat16"}, "cpu", "with quantised weights a tree could change its tokens"),
    ],
)
def test_options_that_recurrent_layers_do_not_have_are_refused_by_name(tmp_path, monkeypatch, settings, device, reason):
    monkeypatch.setattr("dynatree.engine.examined.chosen_device", lambda _: torch.device(device))
    monkeypatch.setattr("dynatree.engine.examined.check_computation", None)  # they are refused before the probe
    tiny_config("lfm2").save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=f"lfm2 has recurrent layers, and {reason}"):
        examined(ModelSettings(str(tmp_path), **settings))


@pytest.mark.parametrize(
    ("family", "function", "option"),
    [
        ("qwen3_5_text", "torch_chunk_gated_delta_rule", "initial_state"),
        ("lfm2", "causal_conv1d_fn", "seq_idx"),
        ("mamba2", "mamba2_chunk_scan", "z"),
        ("mamba", "mamba_selective_scan", "initial_state"),
    ],
)
def test_an_option_of_a_mixer_that_is_not_computed_is_refused_by_name(monkeypatch, family, function, option):
    model = skeleton(tiny_config(family), torch.float32)
    modeling = sys.modules[type(model).__module__]
    adapted = getattr(modeling, function)

    @wraps(adapted)  # it is known as adapted by an attribute
    def called(*args, **options):
        return adapted(*args, **options | {option: torch.zeros(1)})

    monkeypatch.setattr(modeling, function, called)
    with pytest.raises(StartupError, match=f"its recurrent layers have {option}, which DynaTree does not compute"):
        record_kv_shape(small_model(tiny_config(family), 256, seed=0), 256)


def test_every_recurrent_family_says_so_in_its_configuration():
    assert [family for family in sorted(RECURRENT) if not recurs(tiny_config(family).get_text_config())] == []
    attending = tiny_config("granitemoehybrid", layer_types=["full_attention"] * 4)
    assert not recurs(attending), "Granite 4 micro"


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5_text"])
def test_no_packages_are_advised_that_would_change_nothing(family, caplog, monkeypatch):
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    monkeypatch.setattr(logger, "filters", [])
    caplog.set_level(logging.WARNING, logger.name)
    logging.Logger.warning_once.cache_clear()  # transformers says each line once
    model = tiny_model(tiny_config(family), 0)
    model(torch.ones(1, 4, dtype=torch.long))
    assert "install `causal_conv1d`" in caplog.text
    caplog.clear()
    logging.Logger.warning_once.cache_clear()
    adapt(model)
    model(torch.ones(1, 4, dtype=torch.long))
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        *(
            (family, each)
            for family in ("lfm2", "qwen3_next", "mamba2", "bamba", "jamba")
            for each in ("siblings are seen", "a state is not folded")
        ),
        ("qwen3_next", "a state is folded twice"),
    ],
)
def test_a_mistake_in_recurrent_layers_fails_the_probe(monkeypatch, family, mistake):
    if mistake == "siblings are seen":
        monkeypatch.setattr(recurrent_batch, "_ancestors", lambda segment, kept: None)
    else:
        scan = recurrent_batch._Part.scan
        times = 2 if "twice" in mistake else 0

        def wrong(self, key, each, tokens):
            def fold(state, records):
                for _ in range(times):
                    state = each.fold(state, records)
                return state

            return scan(self, key, replace(each, fold=fold), tokens)

        monkeypatch.setattr(recurrent_batch._Part, "scan", wrong)
    with torch.inference_mode(), pytest.raises(StartupError, match="gives different logits under tree attention"):
        probe.check_computation(tiny_config(family), 256, partial(small_engine))


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gemma4_text"])
def test_forward_passes_of_fixed_rows_have_the_right_tokens(tmp_path, family):
    found = served(saved(tiny_model(tiny_config(family)), tmp_path / "model"), "float32", fixed_rows=(32,))
    assert (found.refusal, found.wrong) == (None, 0)


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_bounds_of_time_steps_are_refused(tmp_path, family):
    for limit, reason in (((0.0, float("inf")), None), ((0.01, 0.1), "obeys in the prompt only")):
        path = saved(tiny_model(tiny_config(family, time_step_limit=limit)), tmp_path / str(limit[0]))
        found = served(path, "float32")
        assert (found.refusal is None) if reason is None else (reason in found.refusal)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"multi_query": True}, marks=pytest.mark.long),
        pytest.param({"multi_query": False}, marks=pytest.mark.long),
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        pytest.param(
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, marks=pytest.mark.long
        ),
        pytest.param({"parallel_attn": False, "bias": True}, marks=pytest.mark.long),
    ],
    ids=["7B", "own keys", "40B", "11B", "biases"],
)
def test_falcon_has_the_right_tokens(tmp_path, changes):
    for dtype, found in in_every_dtype(tiny_model(tiny_config("falcon", **changes)), tmp_path):
        assert (found.refusal, found.wrong) == (None, 0), dtype
        assert found.compared > 20, dtype


DEEP = {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6}
DEEP |= {"num_local_experts": 32, "num_experts_per_tok": 4}


@pytest.mark.parametrize("seed", [1, 3])
def test_near_ties_of_routers_in_16_bits_are_no_reason(tmp_path, seed):
    path = saved(tiny_model(tiny_config("gpt_oss", **DEEP), seed), tmp_path / "model")
    assert load_engine(ModelSettings(str(path), dtype="bfloat16", sessions=1)).model.dtype == torch.bfloat16


@pytest.mark.parametrize(("chosen", "experts"), [(17, 17), (17, 32), (20, 40)])
def test_more_chosen_experts_than_a_small_model_has_are_no_reason(tmp_path, chosen, experts):
    changes = {"num_local_experts": experts, "num_experts_per_tok": chosen}
    found = served(saved(tiny_model(tiny_config("mixtral", **changes)), tmp_path / "model"), "float32")
    assert (found.refusal, found.wrong) == (None, 0)


class Mistaken:
    """An engine whose nodes see all nodes of the tree before them."""

    def __init__(self, engine):
        self.model, self.kv_cache, self._engine = engine.model, engine.kv_cache, engine

    def forward(self, segments):
        return self._engine.forward([replace(each, mask=None) for each in segments])


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_a_wrong_mask_fails_the_probe_in_16_bits(tmp_path, family):
    path = saved(tiny_model(tiny_config(family)), tmp_path / "model")
    engine = load_engine(ModelSettings(str(path), dtype="bfloat16", sessions=1))
    with torch.inference_mode(), pytest.raises(StartupError, match="gives different logits under tree attention"):
        probe.check_outputs(Mistaken(engine), 256)


def test_a_masked_token_of_the_output_layer_is_no_reason(tmp_path):
    model = tiny_model(tiny_config("phi"))
    with torch.no_grad():
        model.lm_head.bias[7:9] = float("-inf")
    assert served(saved(model, tmp_path / "model"), "float32").refusal is None


def test_a_configuration_is_probed_once_wherever_it_lies(tmp_path, monkeypatch):
    probed = []
    monkeypatch.setattr(probe, "_SERVED", {})
    monkeypatch.setattr(probe, "small_model", lambda *given: probed.append(given) or small_model(*given))
    for name in ("one", "another"):
        load_engine(ModelSettings(str(save_random_model(tmp_path / name, "llama", seed=1)), sessions=1))
    assert len(probed) == 1


@pytest.mark.parametrize("window", [8, 24, 60, 90])
def test_a_window_that_no_configuration_names_is_found(tmp_path, monkeypatch, window):
    """A family may mask inside its own attention, which only its outputs show."""
    original = modeling_llama.eager_attention_forward

    def windowed(module, query, key, value, attention_mask, **options):
        places = torch.arange(query.shape[2])
        hidden = places[None] <= places[:, None] - window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(query.dtype).min).to(query.dtype)
        return original(module, query, key, value, attention_mask + mask, **options)

    path = saved(tiny_model(tiny_config("llama")), tmp_path / "model")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", windowed)
    monkeypatch.setattr(probe, "_SERVED", {})
    with pytest.raises(StartupError, match="gives different logits under tree attention"):
        load_engine(ModelSettings(str(path), dtype="bfloat16"))


def test_a_small_model_outgrows_every_span_and_keeps_its_layers():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    small = small_model(config, 131072, seed=0).config
    assert max(spans(small)) == 16
    assert small.num_hidden_layers == 6
    assert small.layer_types == config.layer_types
    assert small.hidden_size < config.hidden_size
    assert max(spans(small_model(config, 4096, seed=0).config)) == 4096, "a window as long as the context stays"
