"""Tests that forward passes of fixed rows, as in CUDA graphs, equal those of the segments' own sizes."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynatree.client import Client
from dynatree.common.tree import TokenTree
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import ARCHITECTURES, CONTEXT, save_noisy_copy, save_random_model
from tests.support.services import running_services

ROWS = 32
NEW = 60  # tokens up to the end of the context


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engines(request, tmp_path_factory):
    folder = save_random_model(tmp_path_factory.mktemp(request.param), request.param, seed=4)
    settings = {"dtype": "float32", "sessions": 2, "speculative_slots": 64}
    return [load_engine(ModelSettings(str(folder), fixed_rows=rows, **settings)) for rows in ((), (ROWS,))]


def random_tree(generator, nodes):
    parents = tuple(generator.randrange(-1, node) for node in range(nodes))
    tokens = generator.sample(range(2, 2048), nodes)  # siblings differ
    return TokenTree(tuple(tokens), parents)


@pytest.mark.long
@torch.inference_mode()
def test_trees_of_every_size_give_the_same_logits_and_slots(engines):
    generator = random.Random(3)
    prompt = generator.choices(range(2, 2048), k=70)
    ranges = [engine.kv_cache.reserve(len(prompt) + 64) for engine in engines]
    for engine, kv in zip(engines, ranges, strict=True):
        engine.forward([Segment(kv, 0, prompt, range(len(prompt)), keep=[])])
    for nodes in (0, 1, 7, 30, 31, 32, 50):
        tree = random_tree(generator, nodes)
        root = len(prompt)
        positions = [root, *(root + depth for depth in tree.depths)]
        mask = ancestor_mask(tree.parents) if nodes else None
        segments = [Segment(kv, root, [9, *tree.token_ids], positions, mask=mask) for kv in ranges]
        (own,), (fixed,) = (engine.forward([each]) for engine, each in zip(engines, segments, strict=True))
        torch.testing.assert_close(fixed, own, rtol=1e-4, atol=1e-4)
        slots = [engine.kv_cache.slots(kv, segments[0].stop) for engine, kv in zip(engines, ranges, strict=True)]
        torch.testing.assert_close(slots[1], slots[0], rtol=1e-4, atol=1e-4)
    for engine, kv in zip(engines, ranges, strict=True):
        engine.kv_cache.release(kv)


@torch.inference_mode()
def test_a_tree_may_be_as_deep_as_it_has_nodes(tmp_path):
    """Its first branch is deeper than a prompt's piece is long, and the root of its second one ends a block of keys."""
    folder = save_random_model(tmp_path / "model", "llama", seed=4, max_position_embeddings=512)
    settings = {"sessions": 1, "speculative_slots": 400, "max_context": 500}
    parents = [*range(-1, 299), -1, *range(300, 399)]
    mask = ancestor_mask(parents)
    positions = [63 + depth for depth in (mask.sum(1) - 1).tolist()]
    tokens = random.Random(6).choices(range(2, 2048), k=64 + len(parents))
    results = []
    for rows in ((), (32,), (512,)):
        engine = load_engine(ModelSettings(str(folder), dtype="float32", fixed_rows=rows, **settings))
        kv = engine.kv_cache.reserve(len(tokens))
        engine.forward([Segment(kv, 0, tokens[:63], range(63), keep=[])])
        results.append(engine.forward([Segment(kv, 63, tokens[63:], positions, mask=mask)])[0])
    for fixed in results[1:]:
        torch.testing.assert_close(fixed, results[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_mask_may_reach_back_before_the_segment(engines):
    """A level of the draft's tree sees some of the nodes that were read before it."""
    prompt = list(range(50, 62))
    above = TokenTree((7, 8, 9), (-1, -1, 0))
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]], dtype=torch.bool)  # a child of node 2, and one of node 1
    results = []
    for engine in engines:
        kv = engine.kv_cache.reserve(64)
        engine.forward([Segment(kv, 0, prompt, range(12), keep=[])])
        engine.forward([Segment(kv, 12, above.token_ids, [12, 12, 13], mask=ancestor_mask(above.parents)[1:, 1:])])
        results.append(engine.forward([Segment(kv, 15, [3, 4], [14, 13], mask=mask, keep=[1])])[0])
        engine.kv_cache.release(kv)
    assert results[0].shape == (1, 2048)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"temperature": 0.7, "seed": 3}, marks=pytest.mark.long)],
    ids=["greedy", "sampled"],
)
def test_completions_equal_those_of_plain_transformers(tmp_path, options):
    target = save_random_model(tmp_path / "target", "llama", seed=7)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=8)
    prompt = random.Random(5).choices(range(2, 2048), k=CONTEXT - NEW)
    with running_services(tmp_path, target, draft, fixed_rows=(ROWS,)) as services, Client(services.draft_address) as c:
        outputs = [
            c.generate(prompt, policy=policy, max_new_tokens=NEW, ignore_eos=True, **options)
            for policy in ("autoregressive", "linear", "fixed", "dyspec")
        ]
    if not options:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        generated = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0
        )
        assert outputs[0].token_ids == tuple(generated[0, -NEW:].tolist())
    assert all(output.token_ids == outputs[0].token_ids for output in outputs)
    assert outputs[1].stats.tokens_per_round > 1.5
