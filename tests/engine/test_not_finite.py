"""Tests NaN and infinity wherever they arise: no token is chosen from them, and the session or the service ends."""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dynatree.client import Client, DynaTreeError
from dynatree.common.decoding import Decoding
from dynatree.common.errors import DeviceFailedError, NotFiniteError, StartupError
from dynatree.common.sampling import NOT_CHOSEN, Sampling, Scheme
from dynatree.common.tree import DraftDistribution, TokenTree
from dynatree.draft.growth.draft_model import EngineDraftModel
from dynatree.draft.growth.drafter import Drafter
from dynatree.draft.policies import create_policy, policy_names
from dynatree.engine import loading
from dynatree.engine.cpu import native_runner
from dynatree.engine.cpu.native_program import Program
from dynatree.engine.cpu.native_runner import NativeRunner
from dynatree.engine.engine import Engine
from dynatree.engine.forward.not_finite import check_weights
from dynatree.engine.gpu.decisions import chosen
from dynatree.engine.kv.prefix_cache import LEAST, PrefixCache
from dynatree.engine.loading import load_engine
from dynatree.engine.sampling.choosing import TokenHistories, choose
from dynatree.engine.sampling.gumbel import gumbel
from dynatree.engine.settings import ModelSettings
from dynatree.verify.accept import Verdict
from dynatree.verify.fault_watch import FaultWatch
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier, verdicts_of
from tests.support.kernel_builds import CAN_COMPILE
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

VALUES = (math.nan, math.inf, -math.inf)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.1, seed=4, top_k=5),
    Sampling(temperature=0.7, seed=5, top_p=0.8, min_p=0.05),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.01, temperature=0.5, seed=6),
    Sampling(frequency_penalty=0.5, presence_penalty=-1.0),
    Sampling(logit_bias={0: 1000.0, 3: -1000.0}),
)
RESIDUAL = Sampling(temperature=0.9, seed=7, scheme=Scheme.RESIDUAL)
FAULTS = 5  # choices in a row that fail before the device is tried (docs/guides/security.md)


# Choices


def _spoil(rows: torch.Tensor, row: int, column: int, value: float) -> None:
    """Return a row without information: with one NaN, one infinity, or only negative infinity."""
    rows[row, slice(None) if value == -math.inf else column] = value


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(2, 40),
    st.sampled_from(VALUES),
    st.sampled_from(SAMPLINGS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_a_row_that_is_not_finite_chooses_nothing_and_changes_no_other(
    count: int, vocab: int, value: float, sampling: Sampling, dtype: torch.dtype, data: st.DataObject
) -> None:
    row, column = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, vocab - 1))
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    spoiled = logits.clone()
    _spoil(spoiled, row, column, value)
    histories = TokenHistories([0, column, 1], [[column]] * count, generated=2)
    right = choose(logits, range(count), sampling, histories)
    got = choose(spoiled, range(count), sampling, histories)
    assert got[row] == NOT_CHOSEN
    assert got[:row] + got[row + 1 :] == right[:row] + right[row + 1 :]
    assert NOT_CHOSEN not in right
    if sampling.is_plain:
        noise = torch.stack([gumbel(sampling.seed, place, vocab) for place in range(count)])
        assert chosen(spoiled, torch.full((count,), sampling.temperature), noise).tolist() == got
        if sampling.greedy:
            assert chosen(spoiled, torch.zeros(count), None).tolist() == got


@settings(deadline=None)
@given(
    st.sampled_from(
        [Sampling(temperature=t, repetition_penalty=p) for t in (0.0, 1e-45, 1e-3) for p in (1e-45, 1.0, 100.0)]
    ),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -3.0, 3e38, -3e38, -math.inf]), min_size=2, max_size=6),
)
def test_no_option_makes_a_number_that_is_not_finite(sampling: Sampling, logits: list[float]) -> None:
    """Otherwise a caller could end the service."""
    logits[0] = 1.0
    assert choose(torch.tensor([logits]), [0], sampling, TokenHistories([0, 1], [[]], 0))[0] >= 0


# Rounds

LAYERS = 3


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_random_model(folder / "target", "llama", seed=1, num_hidden_layers=LAYERS)
    save_noisy_copy(folder / "draft", folder / "target", seed=2)
    return folder


PATHS = ["kernels", "torch's", "fixed rows"]


@pytest.fixture(scope="module", name="engine", params=PATHS)
def engine_fixture(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    """A target for each way of computing forward passes."""
    if request.param == "kernels" and not CAN_COMPILE:
        pytest.skip("this machine has no C compiler, or no kernels of our own")
    rows = (32,) if request.param == "fixed rows" else ()
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "kernels":
            patch.setattr(loading, "is_native", lambda device, dtype: False)
        engine = load_engine(ModelSettings(str(folder / "target"), sessions=4, speculative_slots=64, fixed_rows=rows))
        assert isinstance(engine.runner, NativeRunner) == (request.param == "kernels")
        assert (engine.decider is not None) == (request.param == "fixed rows")
        yield engine


@contextmanager
def spoiled(engine: Engine, layer: int, row: int, column: int, value: float) -> Iterator[None]:
    """Put this number into a row of the hidden state before a layer in the next forward pass."""
    done: list[None] = []

    def once(hidden: Any) -> None:
        if not done and row < len(hidden):
            done.append(None)
            hidden[row, column] = value

    if isinstance(engine.runner, NativeRunner):
        with _by_layers(engine.runner, layer, once):
            yield
    else:
        block = engine.model.model.layers[layer]
        norm = block.input_layernorm  # fused forward passes call it too
        original = norm.forward

        def before(hidden: torch.Tensor) -> torch.Tensor:
            once(hidden.reshape(-1, hidden.shape[-1]))  # in place, so that the residual has it too
            return original(hidden)

        norm.forward = before
        try:
            yield
        finally:
            del norm.forward
    assert done, "or the test tests nothing"


@contextmanager
def _by_layers(runner: NativeRunner, layer: int, once: Any) -> Iterator[None]:
    """Return the kernels' calls split by layer, with a change of the first buffer before one layer."""
    program: Program = runner._program
    whole, call = runner._parts, native_runner.call
    size = ctypes.sizeof(program.operations) // len(program.operations)
    cuts = [0, program.layers[layer], len(program.operations)]
    at = ctypes.addressof(program.operations)
    runner._parts = [
        native_runner._Program(at + size * start, stop - start, program.shape) for start, stop in pairwise(cuts)
    ]
    calls = 0

    def called(function: str, *arguments: Any) -> None:
        nonlocal calls
        if calls % 2:
            width, rows = program.widths[0], runner._call.n
            memory = (ctypes.c_float * (rows * width)).from_address(runner._buffers[0])
            once(np.frombuffer(memory, dtype=np.float32).reshape(rows, width))
        calls += 1
        call(function, *arguments)

    native_runner.call = called  # type: ignore[assignment]
    try:
        yield
    finally:
        runner._parts, native_runner.call = whole, call


def _opened(verifier: Verifier, sampling: Sampling) -> VerifySession:
    return verifier.open(SessionRequest(tuple(range(5, 45)), 150, frozenset(), Decoding(sampling)))


def _tree(path: Sequence[int], sampling: Sampling) -> TokenTree:
    """Return a path with a wrong guess beside each of its tokens, in depth-first order."""
    tokens, parents, candidates, last = [], [], [], -1
    for token in path:
        tokens += [token, 7 if token != 7 else 8]
        parents += [last, last]
        last = len(tokens) - 2
    if sampling.residual:
        below = {parent: tuple(t for t, p in zip(tokens, parents, strict=True) if p == parent) for parent in parents}
        candidates = [
            DraftDistribution(below[node], (0.999, 0.001)) if node in below else None for node in range(-1, len(tokens))
        ]
    return TokenTree(tuple(tokens), tuple(parents), candidates=tuple(candidates))


@pytest.fixture(scope="module", name="truth")
def truth_fixture() -> dict[Any, Any]:
    """For each engine and options, the tokens that an unspoiled target commits."""
    return {}


def _truth(truth: dict[Any, Any], engine: Engine, sampling: Sampling) -> tuple[int, TokenTree, Verdict]:
    """Return the first token, a tree after it, and the verdict on the tree."""
    key = (id(engine), str(sampling))
    if key not in truth:
        verifier = Verifier(engine, 64)
        plain, session = _opened(verifier, sampling), _opened(verifier, sampling)
        verdicts_of(verifier.run([Part(each, prompt_tokens=40) for each in (plain, session)])[0])
        while plain.length < 44:
            verdicts_of(verifier.run([Part(plain)])[0])
        tree = _tree(plain.committed[41:], sampling)
        [verdict] = verdicts_of(verifier.run([Part(session, tree)])[0])
        assert verdict is not None
        assert sampling.residual or len(verdict.accepted) == 3
        truth[key] = plain.committed[40], tree, verdict
        for each in (plain, session):
            verifier.close(each)
    return truth[key]


ROWS = (-1, 0, 2, 4, 5, 3, 1)  # the nodes of a tree in depth-first order, after the root


@settings(max_examples=40, deadline=None)
@given(
    sampling=st.sampled_from([*SAMPLINGS[:3], SAMPLINGS[5], RESIDUAL]),
    layer=st.integers(0, LAYERS - 1),
    column=st.integers(0, 63),
    value=st.sampled_from([math.nan, math.inf]),
    piece=st.integers(0, 2),
    data=st.data(),
)
def test_what_depends_on_a_number_that_is_not_finite_commits_nothing(
    engine: Engine,
    truth: dict[Any, Any],
    sampling: Sampling,
    layer: int,
    column: int,
    value: float,
    piece: int,
    data: st.DataObject,
) -> None:
    """The number is in any row before any layer, of a prompt in two pieces or of a tree after it.

    In a row of the tree that is not accepted, it changes nothing. Another session commits its usual tokens.
    """
    pending, tree, verdict = _truth(truth, engine, sampling)
    greedy, _, following = _truth(truth, engine, Sampling())
    sizes = (15, 25, 1 + len(tree))
    row = data.draw(st.integers(0, sizes[piece] - 1))
    harmless = piece == 2 and ROWS[row] not in (-1, *verdict.accepted)
    verifier = Verifier(engine, 64)
    session, other = _opened(verifier, sampling), _opened(verifier, Sampling())
    parts = (Part(session, prompt_tokens=15), Part(session, prompt_tokens=25), Part(session, tree))
    beside = (Part(other, prompt_tokens=15), Part(other, prompt_tokens=25), Part(other))
    for number in range(piece + 1):
        with spoiled(engine, layer, row, column, value) if number == piece else nullcontext():
            results, _ = verifier.run([parts[number], beside[number]])
    if harmless:
        assert results[0] == verdict
    else:
        assert isinstance(results[0], NotFiniteError)
        assert session.committed[40:] == ([pending] if piece == 2 else [])
    assert not isinstance(results[1], Exception)
    assert other.committed[40:] == [greedy, *following.token_ids][:piece]
    verifier.close(session)
    verifier.close(other)


def test_what_a_broken_session_leaves_is_not_cached(engine: Engine) -> None:
    cache = PrefixCache(engine.kv_cache)
    for broken in (True, False):
        kv, _ = cache.reserve(100, (), "")
        assert kv is not None
        kv.broken = broken
        cache.release(kv, range(LEAST), "")
        assert bool(cache.slots) != broken
    cache._make_room(engine.kv_cache.size)


def test_log_probabilities_of_a_prompt_are_numbers(folder: Path) -> None:
    """Only the logits of a row may be NaN, for example from the last layer."""
    engine = load_engine(ModelSettings(str(folder / "target"), sessions=1))
    verifier = Verifier(engine, 64)
    session = verifier.open(SessionRequest((5, 6, 7, 8), 50, frozenset(), Decoding(Sampling(), prompt_log_probs=True)))
    run = engine.runner.run

    def broken(segments: Any) -> list[torch.Tensor]:
        logits = run(segments)
        logits[0][1, 9] = math.nan
        return logits

    engine.runner.run = broken  # type: ignore[method-assign]
    [result], _ = verifier.run([Part(session, prompt_tokens=4)])
    assert isinstance(result, NotFiniteError)


# Devices


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(["commits", "reads", "fails"]), min_size=1, max_size=4), max_size=20))
@example([["fails", "fails"], ["reads", "fails"], ["fails", "commits"], *[["fails"]] * 6])
def test_a_device_is_tried_after_a_few_faults_with_no_commit_between(passes: list[list[str]]) -> None:
    for sound in (False, True):
        counted: list[int] = []
        tried: list[int] = []

        async def trial(tried: list[int] = tried, sound: bool = sound) -> bool:
            tried.append(1)
            return sound

        watch = FaultWatch(counted.append, trial)
        outcomes = {"commits": Verdict((), (5,)), "reads": None, "fails": NotFiniteError()}
        in_a_row = trials = 0
        for each in passes:
            results = asyncio.run(_judged(watch, [outcomes[name] for name in each]))
            in_a_row = 0 if "commits" in each else in_a_row + each.count("fails")
            due = "fails" in each and in_a_row >= FAULTS
            for name, result in zip(each, results, strict=True):
                if name != "fails":
                    assert result is outcomes[name]
                else:
                    assert isinstance(result, DeviceFailedError) == (due and not sound)
            if due:
                in_a_row, trials = 0, trials + 1
        assert sum(counted) == sum(each.count("fails") for each in passes)
        assert len(tried) == trials


async def _judged(watch: FaultWatch, results: Sequence[Any]) -> Sequence[Any]:
    return await watch.judged(results)


def test_a_device_is_sound_unless_one_token_alone_has_no_finite_number(engine: Engine) -> None:
    verifier = Verifier(engine, 64)
    free = engine.kv_cache.free_slots
    assert verifier.is_sound()
    run = engine.runner.run

    def broken(segments: Any) -> list[torch.Tensor]:
        return [torch.full_like(each, math.nan) for each in run(segments)]

    engine.runner.run = broken  # type: ignore[method-assign]
    try:
        assert not verifier.is_sound()
    finally:
        engine.runner.run = run  # type: ignore[method-assign]
    assert engine.kv_cache.free_slots == free
    all_of_it = engine.kv_cache.reserve(free)
    assert all_of_it is not None
    assert verifier.is_sound(), "no slot is free to try"
    engine.kv_cache.release(all_of_it)


def test_a_prompt_that_overflows_ends_its_sessions_and_not_the_service(folder: Path, tmp_path: Path) -> None:
    """The prompt may be sent repeatedly, without other requests between."""
    with (
        running_services(tmp_path, folder / "target", folder / "draft") as services,
        Client(services.draft_address) as client,
    ):
        right = client.generate([5, 6, 7], max_new_tokens=8).token_ids
        run = services.target.runner.run

        def overflowing(segments: Any) -> list[torch.Tensor]:
            logits = run(segments)
            for segment, each in zip(segments, logits, strict=True):
                if 9 in segment.token_ids:
                    each.fill_(math.nan)
            return logits

        services.target.runner.run = overflowing  # type: ignore[method-assign]
        for _ in range(2 * FAULTS):
            with pytest.raises(DynaTreeError, match="INTERNAL: the target model's numbers are not finite"):
                client.generate([9, 9, 9], max_new_tokens=8)
        services.target.runner.run = run  # type: ignore[method-assign]
        assert client.generate([5, 6, 7], max_new_tokens=8).token_ids == right


def test_a_client_is_told_of_a_fault_which_is_nobody_elses(folder: Path, tmp_path: Path) -> None:
    with (
        running_services(tmp_path, folder / "target", folder / "draft") as services,
        Client(services.draft_address) as client,
    ):
        right = client.generate([5, 6, 7], max_new_tokens=8).token_ids
        run = services.target.runner.run

        def broken(segments: Any) -> list[torch.Tensor]:
            logits = run(segments)
            for each in logits:
                each[..., -1] = math.nan
            return logits

        services.target.runner.run = broken  # type: ignore[method-assign]
        with pytest.raises(DynaTreeError, match="INTERNAL: the target model's numbers are not finite") as error:
            client.generate([5, 6, 7], max_new_tokens=8)
        assert (error.value.code, list(error.value.token_ids)) == (grpc.StatusCode.INTERNAL, [])
        services.target.runner.run = run  # type: ignore[method-assign]
        assert client.generate([5, 6, 7], max_new_tokens=8).token_ids == right
        counted = services.verify_registry.get_sample_value("dynatree_not_finite_choices_total")
        assert counted == 2, "a draft service tries a session once more"


# Weights


@pytest.mark.parametrize("resident", [None, 0, 1])
def test_weights_that_are_not_finite_are_refused_at_the_start(
    folder: Path, tmp_path: Path, resident: int | None
) -> None:
    """The check covers weights that no probe reads, every kind of layer, and offloaded layers."""
    path = save_random_model(tmp_path / "model", "llama", seed=1, num_hidden_layers=2)
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        for value in VALUES:
            changed = {key: each.clone() for key, each in tensors.items()}
            changed[name].view(-1)[-1] = value
            save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
            settings_ = ModelSettings(
                str(path),
                sessions=1,
                resident_layers=resident,
                layer_cache=tmp_path / "cache",
                chooses_tokens=value > 0,
            )
            with pytest.raises(
                StartupError, match=r"model model cannot be served: its weight .* holds NaN or infinity"
            ):
                load_engine(settings_)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_weights_of_8_bits_are_checked(dtype: torch.dtype) -> None:
    weight = torch.zeros(1100, 1000).to(dtype)  # more than are converted at a time
    check_weights("m", [("weight", weight.t())])
    weight.view(torch.uint8)[-1, -1] = 0x7F  # NaN
    with pytest.raises(StartupError, match="its weight weight holds NaN or infinity"):
        check_weights("m", [("weight", weight.t())])


# Drafts


@pytest.mark.parametrize("fixed_rows", [(), (16, 64)], ids=["host", "device"])
@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "autoregressive"])
def test_a_draft_proposes_nothing_by_numbers_that_are_not_finite(
    folder: Path, drafts: dict[Any, Engine], policy: str, fixed_rows: tuple[int, ...]
) -> None:
    """For any share of such rows, any policy and any scheme, drafts are finite and no round fails."""
    engine = drafts[fixed_rows]
    generator = torch.Generator().manual_seed(1)
    loop = [9, 8, 7, 6]
    schemes = [Sampling(), SAMPLINGS[1]] + ([RESIDUAL] if create_policy(policy, {}).supports_residual else [])
    for sampling in schemes:
        for share in (0.3, 1.0):
            drafter = Drafter(EngineDraftModel(engine), 256)
            session = drafter.open(loop * 4, sampling, 2048, limit=150)
            each = create_policy(policy, {})
            with _broken_rows(engine, share, generator):
                for _ in range(3):
                    tree = drafter.grow(session, each, 6, 40).tree
                    assert all(-math.inf < log_prob <= 0.0 for log_prob in tree.log_probs)
                    if share == 1.0 and policy not in ("ngram", "hybrid", "throughput"):
                        assert len(tree) == 0
                    drafter.commit(session, [*(tree.token_ids[node] for node in tree.path(len(tree) - 1)), 9])
            drafter.close(session)


@pytest.fixture(scope="module", name="drafts")
def drafts_fixture(folder: Path) -> dict[Any, Engine]:
    options = {"sessions": 4, "speculative_slots": 512, "chooses_tokens": False}
    return {
        rows: load_engine(ModelSettings(str(folder / "draft"), fixed_rows=rows, **options)) for rows in ((), (16, 64))
    }


@contextmanager
def _broken_rows(engine: Engine, share: float, generator: torch.Generator) -> Iterator[None]:
    """Make a share of the final norm's rows NaN."""
    forward = engine.model.lm_head.forward

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        rows = torch.rand(hidden.shape[:-1], generator=generator) < share
        return forward(hidden).masked_fill(rows[..., None], math.nan)

    run = engine.runner.run

    def broken_run(segments: Any) -> list[torch.Tensor]:
        return [
            each.masked_fill(torch.rand(len(each), 1, generator=generator) < share, math.nan) for each in run(segments)
        ]

    if engine.level_runner is None:
        engine.runner.run = broken_run  # type: ignore[method-assign]
    engine.model.lm_head.forward = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.model.lm_head.forward
        if engine.level_runner is None:
            engine.runner.run = run  # type: ignore[method-assign]
