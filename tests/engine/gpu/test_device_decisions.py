"""Tests that the device decides as the host does: choices, acceptance, slots, and levels of drafts' trees.

Here the device is a CPU. `benchmarks/gpu/session.sh` tests graphs and bits on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from dynatree.common.decoding import Decoding
from dynatree.common.sampling import Sampling
from dynatree.common.tree import TokenTree
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.draft_session import DraftSession
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy, policy_names
from dynatree.engine.engine import Engine
from dynatree.engine.forward.attention import NAME
from dynatree.engine.forward.flat_forward import FlatForward
from dynatree.engine.gpu.decisions import accepted, chosen, ranking
from dynatree.engine.gpu.fixed_rows import gives_equal_bits
from dynatree.engine.gpu.fused_forward import FusedForward
from dynatree.engine.gpu.levels import Levels, RowLevelRunner
from dynatree.engine.gpu.row_runner import RowForward
from dynatree.engine.gpu.rows import RowSizes, Staging
from dynatree.engine.kv.kv_cache import KVCache, KVShape
from dynatree.engine.loading import load_engine
from dynatree.engine.sampling.choosing import choose, scores
from dynatree.engine.sampling.gumbel import gumbel
from dynatree.engine.settings import ModelSettings
from dynatree.verify.accept import accept
from dynatree.verify.session import SessionRequest
from dynatree.verify.verifier import Part, Verifier, verdicts_of
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.trees import random_trees

ROWS = 32
SAMPLINGS = [Sampling(), Sampling(temperature=0.7, seed=2**64 - 3)]


# Choices and acceptance


@given(random_trees(max_nodes=31), st.data())
def test_acceptance_on_the_device_is_that_of_the_host(tree: TokenTree, data: st.DataObject) -> None:
    """Choices are often tokens of the tree, so that accepted paths of every length occur."""
    choice = st.sampled_from(tree.token_ids) | st.integers(2, 9) if len(tree) else st.integers(2, 9)
    choices = data.draw(st.lists(choice, min_size=len(tree) + 1, max_size=len(tree) + 1))
    padding = data.draw(st.integers(0, 4))
    rows = len(tree) + 1 + padding
    parents = [0, *(1 + parent for parent in tree.parents), *range(rows - padding, rows)]
    token_ids = [99, *tree.token_ids, *[0] * padding]
    holds = accepted(torch.tensor(token_ids), torch.tensor(parents), torch.tensor([*choices, *[0] * padding]))
    nodes = [row - 1 for row in holds.nonzero()[:, 0].tolist() if 0 < row <= len(tree)]
    assert nodes == sorted(accept(tree, choices).accepted)


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]), min_size=1, max_size=6),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 2),
)
def test_choices_of_a_pass_are_those_of_each_session(temperatures: list[float], seed: int, position: int) -> None:
    logits = torch.randn(len(temperatures), 50, generator=torch.Generator().manual_seed(seed % 1000))
    noise = torch.stack([gumbel(seed, position + row, 50) for row in range(len(temperatures))])
    for values in (logits, logits.to(torch.bfloat16)):
        together = chosen(values, torch.tensor(temperatures), noise).tolist()
        ranks = ranking(values, torch.tensor(temperatures), noise)
        for row, temperature in enumerate(temperatures):
            sampling = Sampling(temperature=temperature, seed=seed)
            assert [together[row]] == choose(values[row : row + 1], [position + row], sampling)
            assert torch.equal(ranks[row], scores(values[row : row + 1], [position + row], sampling)[0].float())


# Rounds


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target = save_random_model(folder / "target", "gpt_neox", seed=1)
    save_noisy_copy(folder / "draft", target, seed=2)
    return folder


def load(model: Path, rows: tuple[int, ...], *, chooses_tokens: bool = True) -> Engine:
    options = {"sessions": 4, "speculative_slots": 512, "fixed_rows": rows}
    return load_engine(ModelSettings(str(model), chooses_tokens=chooses_tokens, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_pass_that_the_device_decides_is_that_of_the_host(folder: Path, sampling: Sampling) -> None:
    """Verdicts, keys and values are equal, also beside a session whose options only the host supports."""
    generator = random.Random(5)
    engines = [load(folder / "target", rows) for rows in ((), (ROWS,))]
    verifiers = [Verifier(engine, 64) for engine in engines]
    prompt = generator.choices(range(2, 2048), k=70)
    options = [sampling, Sampling(temperature=0.7, top_k=5), Sampling(frequency_penalty=1.3)]
    sessions = [
        [verifier.open(SessionRequest(tuple(prompt), 150, frozenset(), Decoding(each))) for each in options]
        for verifier in verifiers
    ]
    for verifier, opened in zip(verifiers, sessions, strict=True):
        for session in opened:
            verdicts_of(verifier.run([Part(session, prompt_tokens=session.unread)])[0])
    truth = [session.pending for session in sessions[0]]
    lengths = set()
    for _ in range(4):
        parts = []
        for place, session in enumerate(sessions[0]):
            # a chain of the true tokens, as far as one step ahead knows them, beside guesses
            following = _following(verifiers[0], session, generator.randrange(4))
            parts.append(_around(following, generator))
            lengths.add(len(following))
            assert session.pending == truth[place]
        both = [
            verdicts_of(verifier.run([Part(session, tree) for session, tree in zip(opened, parts, strict=True)])[0])
            for verifier, opened in zip(verifiers, sessions, strict=True)
        ]
        assert both[0] == both[1]
        truth = [session.pending for session in sessions[0]]
        for own, fixed in zip(*sessions, strict=True):
            assert own.committed == fixed.committed
            slots = [
                engine.kv_cache.slots(session.kv, session.length - 1)
                for engine, session in zip(engines, (own, fixed), strict=True)
            ]
            torch.testing.assert_close(slots[1], slots[0], rtol=1e-4, atol=1e-4)
    assert len(lengths) > 1
    assert max(session.length for session in sessions[0]) > 80


def _following(verifier: Verifier, session: Any, count: int) -> list[int]:
    """Return the session's next tokens, by plain decoding of a copy."""
    copy = verifier.open(session.request)
    verdicts_of(verifier.run([Part(copy, prompt_tokens=copy.unread)])[0])
    while copy.length < session.length + count:
        verdicts_of(verifier.run([Part(copy)])[0])
    tokens = copy.committed[session.length : session.length + count]
    verifier.close(copy)
    return list(tokens)


def _around(path: list[int], generator: random.Random) -> TokenTree:
    """Return a tree with this path from the root, and other branches before and after it."""
    token_ids, parents, last = [], [], -1
    for token in path:
        guess = generator.randrange(2, 2048)
        if guess != token:
            token_ids.append(guess)
            parents.append(last)
        token_ids.append(token)
        parents.append(last)
        last = len(token_ids) - 1
    return TokenTree((*token_ids, 7 if 7 not in path else 8), (*parents, last))


# Equal bits


def test_the_trial_of_equal_bits_tells_who_gives_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with equal bits pass the trial; a forward pass whose last bit depends on a token's row does not."""
    engine = load(folder / "target", ())
    if not engine.batch_invariant:
        pytest.skip("this CPU has no kernels of the project's that give equal bits")
    assert all(gives_equal_bits(engine, rows) for rows in (1, 32, 256))
    assert engine.kv_cache.free_slots == engine.kv_cache.size
    run = engine.runner.run

    def by_row(segments: Any) -> list[Tensor]:
        logits = run(segments)
        if len(segments) == 2:
            tree = max(logits, key=len)
            tree[-1, 5] = torch.nextafter(tree[-1, 5], torch.tensor(torch.inf))
        return logits

    monkeypatch.setattr(engine.runner, "run", by_row)
    assert not gives_equal_bits(engine, 32)


# Levels of drafts' trees


@pytest.fixture(scope="module", name="loaded")
def loaded_fixture(folder: Path) -> list[Engine]:
    return [load(folder / "draft", rows, chooses_tokens=False) for rows in ((), (16, 64))]


@pytest.fixture(name="drafts")
def drafts_fixture(loaded: list[Engine]) -> Iterator[list[Engine]]:
    yield loaded
    for engine in loaded:
        engine.kv_cache._ranges.clear()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "autoregressive"])
def test_trees_over_levels_that_were_read_together_are_the_same(
    drafts: list[Engine], policy: str, sampling: Sampling
) -> None:
    generator = random.Random(3)
    loop = generator.choices(range(2, 2048), k=6)
    prompt = loop * 4  # so that n-grams occur
    drafters = [Drafter(EngineDraftModel(engine), 256) for engine in drafts]
    sessions = [drafter.open(prompt, sampling, 2000) for drafter in drafters]
    policies = [create_policy(policy, {}) for _ in drafters]
    forwards = [0, 0]
    for _ in range(3):
        grown = [
            drafter.grow(session, each, 12, 64)
            for drafter, session, each in zip(drafters, sessions, policies, strict=True)
        ]
        trees = [each.tree for each in grown]
        forwards = [total + each.draft_forwards for total, each in zip(forwards, grown, strict=True)]
        if policy != "throughput":  # its trees depend on time
            assert trees[1].token_ids == trees[0].token_ids
            assert trees[1].parents == trees[0].parents
            assert trees[1].log_probs == pytest.approx(trees[0].log_probs, abs=1e-3)
        path = trees[0].path(generator.randrange(len(trees[0]))) if len(trees[0]) else ()
        committed = [*(trees[0].token_ids[node] for node in path), generator.randrange(2, 2000)]
        for drafter, session in zip(drafters, sessions, strict=True):
            drafter.commit(session, committed)
    assert forwards[1] <= forwards[0]


@settings(max_examples=15, deadline=None)
@given(
    prompt=st.lists(st.integers(2, 40), min_size=1, max_size=70),
    commits=st.lists(st.tuples(st.integers(0, 200), st.integers(2, 1999)), max_size=4),
    shape=st.fixed_dictionaries({"depth": st.integers(1, 6), "breadth": st.integers(1, 4)}),
    sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 2**64 - 1)),
    vocab_size=st.integers(1990, 2048),
)
def test_growth_on_the_device_is_that_of_the_host(
    loaded: list[Engine],
    prompt: list[int],
    commits: list[tuple[int, int]],
    shape: dict[str, int],
    sampling: Sampling,
    vocab_size: int,
) -> None:
    """Trees have any depth and breadth, and grow after any committed path of the previous tree."""
    policy = create_policy("fixed", {**shape, "tau": 0, "max_nodes": 60})
    drafters = [Drafter(EngineDraftModel(engine), 64) for engine in loaded]
    sessions = [drafter.open(prompt, sampling, vocab_size, limit=150) for drafter in drafters]
    for place, token in [*commits, (0, 2)]:
        own, device = (
            drafter.grow(session, policy, 8, 60).tree for drafter, session in zip(drafters, sessions, strict=True)
        )
        assert (device.token_ids, device.parents) == (own.token_ids, own.parents)
        assert device.log_probs == pytest.approx(own.log_probs, abs=1e-3)
        path = own.path(place % (len(own) + 1) - 1)
        for drafter, session in zip(drafters, sessions, strict=True):
            drafter.commit(session, [*(own.token_ids[node] for node in path), token])
    for drafter, session in zip(drafters, sessions, strict=True):
        drafter.close(session)


def test_several_sessions_levels_are_read_in_one_call(drafts: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session has its own context, root and options, and gets the same trees as alone."""
    generator = random.Random(8)
    policy = create_policy("fixed", {})
    drafter = Drafter(EngineDraftModel(drafts[1]), 256)
    prompts = [generator.choices(range(2, 2048), k=size) for size in (3, 64, 90)]
    calls = _count(monkeypatch, Levels, "read")

    def opened(place: int) -> DraftSession:
        """Open a session whose prompt is read, followed by two unread tokens."""
        session = drafter.open(prompts[place], Sampling(temperature=place * 0.5, seed=place), 2048 - place, limit=150)
        drafter.prefill(session, policy)
        drafter.commit(session, [5, 6])
        return session

    alone = []
    for place in range(3):
        session = opened(place)
        alone.append(drafter.grow(session, policy, 3, 64).tree)
        drafter.close(session)
    growings = [drafter.growing(opened(place), policy, 3, 64) for place in range(3)]
    expansions = [next(each) for each in growings]
    calls.clear()
    spent = drafter.expand_all(expansions)
    assert len(calls) == 1
    together = [_finished(drafter, *each) for each in zip(growings, spent, strict=True)]
    assert [(each.token_ids, each.parents) for each in together] == [(each.token_ids, each.parents) for each in alone]


@pytest.mark.parametrize("ends", ["context", "slots"])
def test_levels_of_a_call_fit_each_of_its_sessions(
    drafts: list[Engine], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A call reads as many levels for all sessions as the deepest one wants. Others may have no room for so many."""
    model = EngineDraftModel(drafts[1])
    drafter = Drafter(model, 16)  # so small a tree leaves few slots
    policy = create_policy("fixed", {})
    sessions = []
    for size, levels in ((5, 8), (90, 3), (90, 3)):
        session = drafter.open([5] * size, Sampling(), 2048, limit=92 if ends == "slots" else 200)
        drafter.prefill(session, policy)
        drafter.commit(session, [6])
        session.levels = levels
        sessions.append(session)
    if ends == "context":
        monkeypatch.setattr(model, "context_length", 94)
    read, calls = Levels.read, []

    def checked(self: Levels, wanted: Any, moves: Any) -> Any:
        calls.append((self.sizes.levels, len(wanted)))
        for each in wanted:
            (session,) = (session for session in sessions if session.kv is each.segment.kv)
            assert each.segment.stop + self.sizes.slots <= session.kv.size
            assert len(session.committed) + self.sizes.levels <= model.context_length
        return read(self, wanted, moves)

    monkeypatch.setattr(Levels, "read", checked)
    expansions = [next(drafter.growing(session, policy, 3, 16)) for session in sessions]
    drafter.expand_all(expansions[:2])
    drafter.expand_all(expansions[2:])
    assert calls == [(8, 1), (2, 1)]


def _finished(drafter: Drafter, growing: Any, spent: Any) -> TokenTree:
    try:
        while True:
            (spent,) = drafter.expand_all([growing.send(spent)])
    except StopIteration as end:
        tree: TokenTree = end.value.tree
        return tree


def _count(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Return a list that grows by one with each call of a method."""
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


# Operations that a graph may contain


class Recorded(TorchDispatchMode):
    """Records every operation's name, and the shapes of its arguments and their places in `buffers`."""

    def __init__(self, buffers: list[Tensor]) -> None:
        super().__init__()
        self._buffers = {tensor.untyped_storage().data_ptr(): place for place, tensor in enumerate(buffers)}
        self.operations: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation, then run it."""
        self.operations.append((str(func), *map(self._told, args)))
        return func(*args, **(kwargs or {}))

    def _told(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            held = None if value.is_meta else self._buffers.get(value.untyped_storage().data_ptr())
            return tuple(value.shape), value.dtype, held, value.storage_offset() if held is not None else None
        return tuple(map(self._told, value)) if isinstance(value, (list, tuple)) else str(value)


@contextmanager
def recorded(engine: Engine) -> Iterator[list[tuple[Any, ...]]]:
    """Record the operations that run within the context."""
    forward = engine.decider.forwards[0]  # type: ignore[union-attr]
    buffers = [
        forward.buffers.token_ids,
        forward.buffers._staged.host,
        engine.kv_cache.data,
        forward._choices,
        *engine.model.parameters(),
    ]
    with Recorded(buffers) as mode:
        yield mode.operations


def test_two_rounds_have_equal_operations_on_equal_buffers_and_one_copy_each_way(folder: Path) -> None:
    """Graphs are captured in one round and replayed in rounds of other sessions, lengths and trees."""
    engine = load(folder / "target", (ROWS,))
    verifier = Verifier(engine, 64)
    rounds = []
    for size, tree in ((9, TokenTree()), (130, _around([5, 6, 9, 11], random.Random(1)))):
        session = verifier.open(SessionRequest((3,) * size, 150, frozenset(), Decoding(Sampling())))
        verdicts_of(verifier.run([Part(session, prompt_tokens=size)])[0])
        with recorded(engine) as operations:
            verdicts_of(verifier.run([Part(session, tree)])[0])
        copies = [place for place, each in enumerate(operations) if each[0].startswith("aten.copy_")]
        up = [place for place in copies if operations[place][2][2] == 1]
        down = [place for place in copies if operations[place][1][2] == 3]
        assert (len(up), len(down)) == (1, 1)
        rounds.append(operations[up[0] : down[0] + 1])  # the operations before are the host's
    assert len(rounds[0]) > 100
    assert rounds[0] == rounds[1]
    waits = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.lift_fresh.default", "aten.is_nonzero"}
    assert not waits & {each[0] for each in rounds[1]}
    made_on_the_host = [each for each in rounds[1] if "_to_copy" in each[0] and "device" in str(each)]
    assert made_on_the_host == []


def test_a_draft_reads_all_levels_with_one_copy_each_way(drafts: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter(EngineDraftModel(drafts[1]), 256)
    session = drafter.open([5] * 20, Sampling(), 2048)
    policy = create_policy("fixed", {"depth": 2, "breadth": 3, "tau": 0})
    tree = drafter.grow(session, policy, 2, 64).tree
    sent = _count(monkeypatch, Staging, "send")
    with Recorded([]) as mode:
        # the second branch, whose slots move, and a token that was not drafted
        drafter.commit(session, [tree.token_ids[1], 7 if 7 not in tree.token_ids else 8])
        drafter.grow(session, policy, 2, 64)
    names = [each[0] for each in mode.operations]
    assert len(sent) == 1
    assert names.count("aten.topk.default") == 2, "the nodes of two levels"
    assert names.count("dynatree.rank.default") == 3, "their continuations, and the root's"
    assert "aten._local_scalar_dense.default" not in names
    assert "aten.lift_fresh.default" not in names, "no tensor is made of numbers of the host"


@pytest.mark.long
@torch.inference_mode()
def test_forwards_decisions_and_levels_run_without_numbers(folder: Path) -> None:
    """Meta tensors have no numbers, so an operation that made the host wait for the device would raise."""
    config = AutoConfig.from_pretrained(folder / "target")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    meta = torch.device("meta")
    kv_cache = KVCache(KVShape(3, 4, 16), 300, torch.float32, meta, read_beyond=1)
    forward = RowForward(FlatForward(model, kv_cache.shape), kv_cache, RowSizes(ROWS, 16, 4), 160, None, decides=True)
    fused = FusedForward(model)
    assert fused(forward.buffers.token_ids[None], forward.buffers.positions[None], forward._attention).is_meta
    with Recorded([]) as mode:
        assert forward.run().shape == (ROWS, 2048)
        logits, choices = forward._decided()
        assert logits.shape == (ROWS, 2048)
        assert choices.shape == (ROWS,)
        level_runner = RowLevelRunner(FlatForward(model, kv_cache.shape), kv_cache, 4, 16, 160, None)
        told = [call._all_levels() for call in level_runner._calls]
    assert all(each.is_meta and each.dtype == torch.int32 for each in told)
    assert sum(each[0].startswith("dynatree.tree_attention") for each in mode.operations) > 3 * 20
