"""Tests that drafting ahead while a tree is verified changes when tokens come, and never which."""

import random
import time
from functools import cache

import pytest
import torch

from dynatree import embedded
from dynatree.client import Client
from dynatree.common.sampling import Sampling, Scheme
from dynatree.draft.completion.ahead import DraftingAhead
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy, policy_names, residual_policies
from dynatree.engine.device import device_id
from dynatree.engine.forward.segment import Segment
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

pytestmark = pytest.mark.early

PROMPT = [5, 6, 7, 8]
SETTINGS = {"ngram": {"shortest": 1}, "throughput": {"shortest": 1}, "hybrid": {"shortest": 1}}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("target"), "gpt_neox", seed=5)


@pytest.fixture(scope="module")
def engine(target):
    return load_engine(ModelSettings(str(target), sessions=3, speculative_slots=512))


@pytest.fixture(scope="module")
def truth(engine):
    return greedy(engine, PROMPT, 60)


@torch.inference_mode()
def greedy(engine, prompt, count):
    tokens, kv = list(prompt), engine.kv_cache.reserve(len(prompt) + count)
    for _ in range(count):
        (logits,) = engine.forward([Segment(kv, 0, tokens, range(len(tokens)), keep=[len(tokens) - 1])])
        tokens.append(int(logits[0].argmax()))
    engine.kv_cache.release(kv)
    return tokens[len(prompt) :]


def draft_ahead(drafter, session, *, steps=100, max_depth=20, breadth=3):
    ahead = DraftingAhead(drafter, session, max_depth, breadth)
    taken = 0
    while taken < steps and ahead.step():
        taken += 1
    return taken


def test_a_hit_needs_no_forward(engine, truth):
    """The draft is the target, so the whole chain is accepted, and the bonus token was drafted ahead."""
    drafter = Drafter(EngineDraftModel(engine), 256)
    policy = create_policy("linear", {"depth": 4})
    session = drafter.open(PROMPT, Sampling(), 2048)
    assert drafter.grow(session, policy, 8, 256).draft_forwards == 4
    assert draft_ahead(drafter, session) > 4
    drafter.commit(session, truth[:5])
    growth = drafter.grow(session, policy, 8, 256)
    assert growth.draft_forwards == 0
    assert list(growth.tree.token_ids) == truth[5:9]
    drafter.close(session)


@pytest.mark.parametrize("policy", ["linear", "fixed", "dynatree", "dyspec", "opt-tree"])
@pytest.mark.parametrize("steps", [0, 1, 3, 100])
def test_the_next_tree_is_the_tree_of_a_fresh_start(engine, truth, policy, steps):
    drafter = Drafter(EngineDraftModel(engine), 256)
    policy = create_policy(policy, {})
    session = drafter.open(PROMPT, Sampling(), 2048)
    committed = list(PROMPT)
    # inside the tree, past it, and off it: a token that was not drafted
    for tokens in (truth[:2], truth[2:8], [*truth[8:10], 77], [91]):
        drafter.grow(session, policy, 8, 256)
        draft_ahead(drafter, session, steps=steps, breadth=policy.breadth)
        drafter.commit(session, tokens)
        committed += tokens
        reused = drafter.grow(session, policy, 8, 256).tree
        fresh_session = drafter.open(committed, Sampling(), 2048)
        fresh = drafter.grow(fresh_session, policy, 8, 256).tree
        drafter.close(fresh_session)
        assert (reused.token_ids, reused.parents) == (fresh.token_ids, fresh.parents)
        assert torch.allclose(torch.tensor(reused.log_probs), torch.tensor(fresh.log_probs), atol=1e-4)
    drafter.close(session)


def test_nothing_is_read_once_stopped_or_without_a_model_that_was_asked(engine):
    drafter = Drafter(EngineDraftModel(engine), 256)
    session = drafter.open(PROMPT, Sampling(), 2048)
    assert draft_ahead(drafter, session) == 0, "the root was not read: the policy did without the model"
    drafter.grow(session, create_policy("linear", {}), 8, 256)
    ahead = DraftingAhead(drafter, session, 20, 1)
    assert ahead.step()
    ahead.stop()
    assert not ahead.step()
    drafter.close(session)


def test_draws_are_not_read_ahead(engine):
    drafter = Drafter(EngineDraftModel(engine), 256)
    sampling = Sampling(temperature=1.0, seed=1, scheme=Scheme.RESIDUAL)
    session = drafter.open(PROMPT, sampling, 2048)
    drafter.grow(session, create_policy("linear", {}), 8, 256)
    assert draft_ahead(drafter, session) == 0
    drafter.close(session)


def test_reading_stays_within_the_rows_slots(engine):
    drafter = Drafter(EngineDraftModel(engine), 8)  # 16 speculative slots
    session = drafter.open(PROMPT, Sampling(), 2048)
    drafter.grow(session, create_policy("fixed", {"depth": 3, "breadth": 3, "tau": 0}), 8, 8)
    draft_ahead(drafter, session)
    assert session.speculative_slots <= 16
    drafter.close(session)


@pytest.fixture(scope="module")
def services(tmp_path_factory, target):
    draft = save_noisy_copy(tmp_path_factory.mktemp("draft"), target, seed=1)
    with running_services(tmp_path_factory.mktemp("sockets"), target, draft, ahead=True, prefix_cache=False) as running:
        yield running


@pytest.fixture(scope="module")
def ahead_client(services):
    with Client(services.draft_address) as client:
        yield client


@pytest.fixture(scope="module")
def plain(ahead_client):
    """Return the output of plain decoding for a prompt, computed once for all policies."""

    @cache
    def completion(prompt, options):
        return ahead_client.generate(
            prompt, policy="autoregressive", max_new_tokens=40, ignore_eos=True, **dict(options)
        ).token_ids

    return lambda prompt, options: completion(tuple(prompt), tuple(options.items()))


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[9], pytest.param([1, 40], marks=pytest.mark.long)], ids=["9", "others"])
def test_outputs_are_those_of_plain_decoding(ahead_client, plain, policy, options, lengths, monkeypatch):
    read = []
    step = DraftingAhead.step
    monkeypatch.setattr(DraftingAhead, "step", lambda self: read.append(step(self)) or read[-1])
    prompts = [random.Random(length).choices(range(2, 2048), k=length) for length in lengths]
    for prompt in prompts:
        ours = ahead_client.generate(
            prompt,
            policy=policy,
            policy_settings=SETTINGS.get(policy),
            max_new_tokens=40,
            ignore_eos=True,
            **options,
        )
        assert ours.token_ids == plain(prompt, options)
    if policy in ("autoregressive", "ngram"):
        assert not any(read)
    if policy in ("linear", "dynatree"):  # larger trees may contain all likely tokens
        assert any(read)


@pytest.mark.parametrize("policy", residual_policies())
def test_residual_sampling_repeats_with_and_without(ahead_client, policy):
    options = {"temperature": 1.0, "seed": 4, "scheme": "residual", "policy": policy, "max_new_tokens": 16}
    assert ahead_client.generate(PROMPT, **options).token_ids == ahead_client.generate(PROMPT, **options).token_ids


def test_a_failure_to_read_ahead_loses_no_token(ahead_client, monkeypatch, caplog):
    plain = ahead_client.generate(PROMPT, policy="autoregressive", max_new_tokens=30, ignore_eos=True)

    def fail(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(DraftingAhead, "step", fail)
    ours = ahead_client.generate(PROMPT, policy="linear", max_new_tokens=30, ignore_eos=True)
    assert ours.token_ids == plain.token_ids
    assert "drafting ahead failed" in caplog.text


def test_a_cancelled_stream_frees_its_row(services, ahead_client):
    deadline = time.monotonic() + 30
    for _ in range(6):  # more rounds than there are rows
        stream = ahead_client.stream(PROMPT, policy="linear", max_new_tokens=100, ignore_eos=True)
        next(stream)
        stream.close()
        while not services.idle:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_device_is_known_again_and_told_from_others():
    assert device_id(torch.device("cpu")) == device_id(torch.device("cpu"))
    assert device_id(torch.device("cpu")) != device_id(torch.device("meta"))


def test_a_tree_of_draws_is_the_same_where_it_has_just_room(engine):
    """Nodes of discarded draws are dropped, and the slots of the others are moved together."""
    more_than_room = 0
    for seed in range(6):
        grown = []
        for room in (24, 256):
            drafter = Drafter(EngineDraftModel(engine), room)
            session = drafter.open(PROMPT, Sampling(temperature=0.01, seed=seed, scheme=Scheme.RESIDUAL), 2048)
            policy = create_policy("dyspec", {"max_nodes": 24})
            for _ in range(2):
                grown.append(drafter.grow(session, policy, 16, room).tree)
                more_than_room += session.speculative_slots > 48
                drafter.commit(session, grown[-1].token_ids[:1] or [1])
            drafter.close(session)
        assert grown[:2] == grown[2:]
    assert more_than_room > 2


def test_nodes_whose_slots_were_freed_are_read_again():
    """They keep their proposals, so that a later tree may go on below them."""
    engine = load_engine(ModelSettings(str(embedded.draft_path()), sessions=1, speculative_slots=512))
    grown, more_than_room = [], 0
    for room in (16, 256):
        drafter = Drafter(EngineDraftModel(engine), room)
        session = drafter.open(PROMPT, Sampling(), 2048)
        policy = create_policy("dyspec", {"max_nodes": 64})
        for _ in range(40):
            grown.append(drafter.grow(session, policy, 16, 16).tree)
            more_than_room += session.speculative_slots > 32
            drafter.commit(session, grown[-1].token_ids[:1])
        drafter.close(session)
    assert grown[:40] == grown[40:]
    assert more_than_room > 2
