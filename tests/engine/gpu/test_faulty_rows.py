"""Tests that fixed rows end a session for the overflows that end it with plain forward passes, and for no others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dynatree.common.decoding import Decoding
from dynatree.common.errors import NotFiniteError
from dynatree.common.sampling import Sampling
from dynatree.common.tree import TokenTree
from dynatree.engine import loading
from dynatree.engine.engine import Engine
from dynatree.engine.forward.segment import Segment
from dynatree.engine.forward.tree_mask import ancestor_mask
from dynatree.engine.loading import load_engine
from dynatree.engine.settings import ModelSettings
from dynatree.verify.session import SessionRequest, VerifySession
from dynatree.verify.verifier import Part, Verifier, verdicts_of
from tests.support.model_zoo import save_random_model

LAYERS = 3
ROWS = 32
PLAIN, PENALISED = Sampling(), Sampling(repetition_penalty=1.3)  # chosen on the device, and on the host


@pytest.fixture(name="engine", params=[(), (ROWS,)], ids=["plain", "fixed"])
def engine_fixture(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A model of torch's modules, whose outputs the tests change."""
    monkeypatch.setattr(loading, "is_native", lambda device, dtype: False)
    folder = save_random_model(tmp_path / "model", "llama", seed=1, num_hidden_layers=LAYERS)
    return load_engine(ModelSettings(str(folder), sessions=10, fixed_rows=request.param))


@contextmanager
def overflowing(engine: Engine, name: str, row: int, number: int = 0) -> Iterator[None]:
    """Put infinity into a row of the output of a module, by its name, in the given one of the next forward passes."""
    module = engine.model.get_submodule(name)
    outputs: list[torch.Tensor] = []

    def changed(_: Any, __: Any, output: torch.Tensor) -> None:
        if len(outputs) == number:
            output.view(-1, output.shape[-1])[row, 5] = math.inf
        outputs.append(output)

    handle = module.register_forward_hook(changed)
    try:
        yield
    finally:
        handle.remove()
    assert len(outputs) > number, "or the test tests nothing"


def opened(verifier: Verifier, sampling: Sampling, first: int = 5) -> VerifySession:
    return verifier.open(SessionRequest(tuple(range(first, first + 40)), 150, frozenset(), Decoding(sampling)))


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("sampling", [PLAIN, PENALISED], ids=["device", "host"])
def test_no_token_is_committed_that_sees_a_key_or_value_that_overflows(
    engine: Engine, sampling: Sampling, name: str
) -> None:
    """The hidden state stays finite, and so do the logits, because zeros are stored.

    A tree has two tokens of plain decoding and a wrong guess in its last row. The other session goes on.
    """
    verifier = Verifier(engine, 64)
    plain, right = opened(verifier, sampling), opened(verifier, PLAIN, first=100)
    verifier.run([Part(plain, prompt_tokens=40), Part(right, prompt_tokens=40)])
    for _ in range(3):
        verifier.run([Part(plain), Part(right)])
    _, first, second, third = plain.committed[40:]
    tree = TokenTree((first, second, first + 1), (-1, 0, -1))
    for row in range(4):
        session, other = opened(verifier, sampling), opened(verifier, PLAIN, first=100)
        verdicts_of(verifier.run([Part(session, prompt_tokens=40), Part(other, prompt_tokens=40)])[0])
        with overflowing(engine, f"model.layers.{row % LAYERS}.self_attn.{name}", row):
            [result, beside], _ = verifier.run([Part(session, tree), Part(other)])
        if row == 3:
            assert not isinstance(result, Exception)
            assert result.token_ids == (first, second, third)
        else:
            assert isinstance(result, NotFiniteError)
            assert len(session.committed) == 41
        assert not isinstance(beside, Exception)
        assert other.committed == right.committed[:42]


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("tokens", [20, 40], ids=["one pass", "two passes of fixed rows"])
def test_no_token_is_committed_after_a_prompt_whose_key_or_value_overflows(
    engine: Engine, tokens: int, name: str
) -> None:
    """All 40 tokens of a prompt take two forward passes of 32 rows."""
    verifier = Verifier(engine, 64)
    for layer, row in enumerate((0, 7, 19)):
        session = opened(verifier, PLAIN)
        with overflowing(engine, f"model.layers.{layer}.self_attn.{name}", row):
            [result], _ = verifier.run([Part(session, prompt_tokens=tokens)])
        assert isinstance(result, NotFiniteError)
        assert session.kv.broken


def test_of_a_tree_in_two_forward_passes_only_the_tokens_that_see_an_overflow_are_nan(engine: Engine) -> None:
    """A prompt of ten tokens, a root with 40 children, and a token below the 35th child, whose key overflows."""
    ranges = [engine.kv_cache.reserve(60) for _ in range(2)]
    assert ranges[0] is not None
    assert ranges[1] is not None
    prompt = Segment(ranges[0], 0, range(5, 15), range(10))
    mask = ancestor_mask([-1] * 40 + [34])
    tree = Segment(ranges[1], 0, range(20, 62), [0, *[1] * 40, 2], mask=mask)
    row, number = (45 - ROWS, 1) if engine.most_rows else (45, 0)
    with overflowing(engine, "model.layers.1.self_attn.k_proj", row, number):
        logits = engine.forward([prompt, tree])
    assert [each.isfinite().all(1).logical_not().nonzero()[:, 0].tolist() for each in logits] == [[], [35, 41]]
    assert not any(each.broken for each in ranges if each)


@pytest.mark.parametrize("piece", [20, 40], ids=["two pieces", "one piece"])
def test_an_output_that_no_later_token_sees_changes_nothing(engine: Engine, piece: int) -> None:
    """The last layer's output becomes neither a key nor a value; only the prompt's last one becomes a choice."""
    verifier = Verifier(engine, 64)
    session = opened(verifier, PLAIN)
    [right] = verdicts_of(verifier.run([Part(session, prompt_tokens=40)])[0])
    for row in (0, 7, 18, 19):
        session = opened(verifier, PLAIN)
        with overflowing(engine, f"model.layers.{LAYERS - 1}.mlp.down_proj", row):
            results, _ = verifier.run([Part(session, prompt_tokens=piece)])
        if piece < 40:
            results, _ = verifier.run([Part(session, prompt_tokens=20)])
        assert results == [right]
        assert not session.kv.broken
    session = opened(verifier, PLAIN)
    verifier.run([Part(session, prompt_tokens=20)])
    with overflowing(engine, f"model.layers.{LAYERS - 1}.mlp.down_proj", 19):
        [result], _ = verifier.run([Part(session, prompt_tokens=20)])
    assert isinstance(result, NotFiniteError)
