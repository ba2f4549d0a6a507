"""Tests which models are served: five architectures exactly; other models are refused by name at load."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from dynatree.common.errors import StartupError
from dynatree.engine import loading, timing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.engine.timing import measure_forwards
from tests.support.model_zoo import ARCHITECTURES, VOCAB_SIZE, save_random_model, save_tokenizer

SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}


def save(model, folder):
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(name="attention", params=["native", "torch"])
def attention_fixture(request, monkeypatch):
    """Attention by the project's kernel, if compiled, and by torch with padding; both have equal bits."""
    if request.param == "torch":
        monkeypatch.setattr(loading, "is_native", lambda device, dtype: False)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("without_kernels", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_forward_over_the_kv_cache_equals_the_plain_model(tmp_path, architecture, without_kernels, monkeypatch):
    monkeypatch.setattr(loading, "is_batch_invariant", lambda dtype: without_kernels)
    path = save_random_model(tmp_path / "model", architecture, seed=5)
    engine = load_engine(ModelSettings(str(path)))
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCAB_SIZE, (50,), generator=generator).tolist()
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens])).logits[0]
    kv = engine.kv_cache.reserve(200)
    got = []
    for start, stop in ((0, 20), (20, 21), (21, 50)):  # prefill, one step, a chunk
        got += engine.forward([Segment(kv, start, tokens[start:stop], range(start, stop))])
    # the last token again as a tree's second node, which sees neither its first copy nor the slot between
    mask = torch.tensor([[False, False, True]])
    got += engine.forward([Segment(kv, 51, tokens[49:], [49], mask)])
    expected = torch.cat([expected, expected[49:]])
    assert (torch.cat(got) - expected).abs().max() < 1e-4


# The condition asks torch, not is_batch_invariant: if that were wrong, these tests would fail and not be skipped.
equal_bits = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512") or torch.cpu._is_amx_tile_supported(),
    reason="this processor's 16-bit kernels promise no such thing",
)


@pytest.mark.usefixtures("attention")
@equal_bits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_16_bits_a_token_has_the_same_bits_however_many_are_read_at_once(tmp_path, architecture, dtype):
    path = save_random_model(tmp_path / "model", architecture, seed=5)
    check_equal_bits(load_engine(ModelSettings(str(path), dtype=dtype, sessions=1)), 50)


@pytest.mark.long
@pytest.mark.usefixtures("attention")
@equal_bits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("start", [160, 340, 500])  # kernels split sums over keys into halves, and at 512
def test_in_16_bits_a_token_has_the_same_bits_in_a_wide_model_behind_a_long_context(tmp_path, start, dtype):
    wide = {"hidden_size": 320, "intermediate_size": 4096, "max_position_embeddings": 1000}
    path = save_random_model(tmp_path / "model", "gpt_neox", seed=5, **wide)
    check_equal_bits(load_engine(ModelSettings(str(path), dtype=dtype, sessions=1)), start)


def check_equal_bits(engine, start):
    """Check that chains of many lengths after `start` tokens have the bits of single steps."""
    longest = 70
    tokens = torch.randint(2, VOCAB_SIZE, (start + longest,), generator=torch.Generator().manual_seed(0)).tolist()

    def prefilled():
        kv = engine.kv_cache.reserve(start + longest)
        engine.forward([Segment(kv, 0, tokens[:start], range(start))])
        return kv

    kv = prefilled()
    steps = [engine.forward([Segment(kv, at, [tokens[at]], [at])])[0] for at in range(start, start + longest)]
    engine.kv_cache.release(kv)
    kv = prefilled()
    for count in (*range(1, 20), 31, 32, 33, 37, 64, 65, 66, 67, 70):
        stop = start + count
        (chain,) = engine.forward([Segment(kv, start, tokens[start:stop], range(start, stop))])
        assert torch.equal(chain, torch.cat(steps[:count])), count


@pytest.mark.usefixtures("attention")
@equal_bits
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_a_prompt_has_the_same_bits_in_whatever_pieces_it_is_read(tmp_path, dtype):
    """A prompt's keys and values therefore depend neither on other requests nor on the prefix cache."""
    wide = {"hidden_size": 320, "intermediate_size": 4096, "max_position_embeddings": 1000}
    path = save_random_model(tmp_path / "model", "gpt_neox", seed=5, **wide)
    engine = load_engine(ModelSettings(str(path), dtype=dtype, sessions=1))
    tokens = torch.randint(2, VOCAB_SIZE, (530,), generator=torch.Generator().manual_seed(0)).tolist()

    def read(length, *cuts):
        kv = engine.kv_cache.reserve(length)
        pieces = pairwise([0, *cuts, length])
        logits = [
            engine.forward([Segment(kv, start, tokens[start:stop], range(start, stop))])[0] for start, stop in pieces
        ]
        slots = engine.kv_cache.slots(kv, length).clone()
        engine.kv_cache.release(kv)
        return torch.cat(logits), slots

    for length, cuts in (
        (128, [(127,), (100,), (16, 32, 48)]),
        (200, [(1,), (100,), (199,), (64, 128)]),
        (530, [(300,), (512,), (529,), (256, 512)]),
    ):
        whole = read(length)
        for cut in cuts:
            for expected, got in zip(whole, read(length, *cut), strict=True):
                assert torch.equal(expected, got), (length, cut)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**SMALL, lru_width=32, num_attention_heads=2)),
            "recurrent_gemma has linear_attention layers, which DynaTree does not compute",
        ),
        (
            lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=2)),
            "bloom models do not go through transformers' attention interface",
        ),
    ],
    ids=["recurrent", "alibi"],
)
def test_what_cannot_be_exact_is_refused_at_load(tmp_path, model, message):
    path = save(model(), tmp_path / "model")
    with pytest.raises(StartupError, match=f"^model model cannot be served exactly: .*{message}"):
        load_engine(ModelSettings(path))


def test_a_window_as_long_as_the_context_is_no_window(tmp_path):
    config = MistralConfig(**SMALL, **ATTENTION, sliding_window=64, max_position_embeddings=64)
    engine = load_engine(ModelSettings(save(MistralForCausalLM(config), tmp_path / "model")))
    assert engine.kv_cache.shape.features == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder/here", "there is no model at no/such/folder/here: no such folder or file"),
        ("models/none.gguf", r"there is no model at models/none\.gguf: no such folder or file"),
        ("none/", "there is no model at none/: no such folder or file"),
        ("", "model .* could not be loaded"),
        ("not a name", "model 'not a name' could not be loaded"),
    ],
)
def test_a_wrong_model_path_is_one_line(name, message):
    with pytest.raises(StartupError, match=f"^{message}") as error:
        load_engine(ModelSettings(name))
    assert "\n" not in str(error.value)


def test_a_model_without_safetensors_is_refused(tmp_path):
    path = save_random_model(tmp_path / "model", "llama", 1)
    weights = path / "model.safetensors"
    weights.rename(path / "pytorch_model.bin")
    with pytest.raises(StartupError, match="could not be loaded"):
        load_engine(ModelSettings(str(path)))


def test_a_moved_slot_overlapping_its_target_is_safe(tmp_path):
    engine = load_engine(ModelSettings(str(save_random_model(tmp_path / "model", "llama", 1))))
    kv = engine.kv_cache.reserve(200)
    engine.forward([Segment(kv, 0, range(2, 12), range(10))])
    before = engine.kv_cache.slots(kv, 10).clone()
    engine.kv_cache.move(kv, [2, 4, 5, 9], 2)
    after = engine.kv_cache.slots(kv, 10)
    assert torch.equal(after[:, :, :, 2:6], before[:, :, :, [2, 4, 5, 9]])
    assert torch.equal(after[:, :, :, :2], before[:, :, :, :2])


BROKEN = 7  # a token whose keys and values are NaN, as after an overflow in float16


@pytest.fixture(name="breaking", params=["by the kernel", "no further", "to whole vectors", "in fixed rows"])
def breaking_fixture(request, tmp_path, monkeypatch):
    """An engine that gives NaN for one token, for each way of padding the keys."""
    if request.param != "by the kernel":
        monkeypatch.setattr(loading, "is_native", lambda device, dtype: False)
    monkeypatch.setattr(loading, "is_batch_invariant", lambda dtype: request.param == "to whole vectors")
    path = save_random_model(tmp_path / "model", "llama", 1)
    engine = load_engine(ModelSettings(str(path), fixed_rows=(32,) if request.param == "in fixed rows" else None))
    with torch.inference_mode():
        engine.model.get_input_embeddings().weight[BROKEN] = float("nan")
    return engine


def test_a_session_that_broke_does_not_break_the_next(breaking):
    logits = []
    for tokens in ([5] * 20, [BROKEN] * 40, [5] * 20):
        kv = breaking.kv_cache.reserve(100)
        for start, stop in ((0, 19), (19, 20)):
            last = breaking.forward([Segment(kv, start, tokens[start:stop], range(start, stop))])[0][-1]
        logits.append(last.clone())
        breaking.forward([Segment(kv, 20, tokens[20:] or [5], range(20, max(len(tokens), 21)))])
        breaking.kv_cache.release(kv)
    assert logits[1].isnan().all(), "or the test tests nothing"
    torch.testing.assert_close(logits[2], logits[0])


def test_a_token_that_broke_breaks_no_token_that_does_not_see_it(breaking):
    """A guess that the target never makes must not affect its choices, neither in that round nor in the next."""
    logits = []
    siblings = torch.eye(3, dtype=torch.bool)
    for guess in (9, BROKEN):
        kv = breaking.kv_cache.reserve(100)
        breaking.forward([Segment(kv, 0, [5] * 19, range(19))])
        tree = breaking.forward([Segment(kv, 19, [6, guess, 8], [19] * 3, mask=siblings)])[0].clone()
        after = breaking.forward([Segment(kv, 20, [5], [20])])[0].clone()
        logits.append((tree[0], tree[2], after[0]))
        breaking.kv_cache.release(kv)
    assert tree[1].isnan().all(), "or the test tests nothing"
    for broken, whole in zip(*reversed(logits), strict=True):
        torch.testing.assert_close(broken, whole)


@pytest.mark.parametrize(
    ("length", "max_rows", "sizes"),
    [(64, 64, [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32]), (256, 17, [1, 2, 3, 4, 5, 6, 8, 12, 16]), (8, 64, [1, 2, 3, 4])],
)
def test_what_forwards_take_is_measured_within_the_context(tmp_path, length, max_rows, sizes):
    path = save_random_model(tmp_path / "model", "gpt2", seed=5, n_positions=length)
    engine = load_engine(ModelSettings(str(path), sessions=1))
    costs = measure_forwards(engine, max_rows)
    assert [cost.rows for cost in costs] == sizes
    assert all(0.0 < cost.seconds < 60.0 for cost in costs)
    assert engine.kv_cache.free_slots == engine.kv_cache.size


def test_the_rows_measured_wake_as_many_experts_as_random_tokens(tmp_path):
    """Neighbouring ids are special tokens and bytes in many vocabularies; here their embeddings are equal."""
    # this activation has no program, which would not call the modules
    path = save_random_model(tmp_path / "model", "qwen3_moe", seed=5, hidden_act="gelu")
    engine = load_engine(ModelSettings(str(path), sessions=1))
    with torch.inference_mode():
        engine.model.model.embed_tokens.weight[:64] = engine.model.model.embed_tokens.weight[0]
    woken = []
    engine.model.model.layers[0].mlp.experts.register_forward_pre_hook(
        lambda _, given: woken.append((len(given[1]), len(given[1].unique())))
    )
    measure_forwards(engine, 16)
    least = dict(woken)
    assert least[1] == 3
    assert least[16] > 6, f"{least[16]} of 8"


def test_the_rows_that_take_one_forward_more_are_measured_too(tmp_path):
    path = save_random_model(tmp_path / "model", "gpt2", seed=5, n_positions=256)
    engine = load_engine(ModelSettings(str(path), sessions=1, fixed_rows=(32,)))
    assert [cost.rows for cost in measure_forwards(engine, 100)][-6:] == [32, 33, 48, 64, 65, 97]


def test_a_model_that_is_slow_is_not_measured_for_long(tmp_path, monkeypatch):
    engine = load_engine(ModelSettings(str(save_random_model(tmp_path / "model", "gpt2", seed=5)), sessions=1))
    rows = []
    monkeypatch.setattr(timing, "_seconds", lambda engine, row, context, count: rows.append(count) or 3.0)
    assert [cost.rows for cost in measure_forwards(engine, 64)] == [1, 2, 4]
    assert rows == [1, 1, 2, 4], "the first warms up"


def test_small_sizes_are_measured_more_often_and_the_least_counts(tmp_path, monkeypatch):
    engine = load_engine(ModelSettings(str(save_random_model(tmp_path / "model", "gpt2", seed=5)), sessions=1))
    rows = []

    def seconds(engine, row, context, count):
        rows.append(count)
        return 0.13 * count - 0.001 * rows.count(count)

    monkeypatch.setattr(timing, "_seconds", seconds)
    costs = {cost.rows: cost.seconds for cost in measure_forwards(engine, 6)}
    assert Counter(rows[1:]) == {1: 5, 2: 3, 3: 2, 4: 2, 5: 2, 6: 2}
    least = {1: 0.13 - 0.006, 2: 0.26 - 0.003, 3: 0.39 - 0.002, 4: 0.52 - 0.002, 5: 0.65 - 0.002, 6: 0.78 - 0.002}
    assert costs == pytest.approx(least)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [({1: 1.0, 2: 0.5, 4: 0.3, 6: 0.4}, 4), ({1: 1.0, 2: 0.99, 4: 0.97, 6: 3.0}, 1), ({1: 9, 2: 8, 4: 7, 6: 1}, 6)],
)
def test_a_draft_runs_on_the_fewest_threads_that_are_as_fast(seconds, chosen, tmp_path, monkeypatch):
    engine = load_engine(ModelSettings(str(save_random_model(tmp_path / "model", "llama", seed=1)), sessions=1))
    set_to = [6]
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: set_to[-1])
    monkeypatch.setattr(timing.torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(timing, "REST_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_seconds", lambda *_: seconds[set_to[-1]])
    assert timing.choose_threads(engine) == chosen == set_to[-1]
    assert engine.kv_cache.free_slots == engine.kv_cache.size
