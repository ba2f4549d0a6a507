"""Tests that a useless draft model is logged once, and that no other draft model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynatree.client import Client
from dynatree.draft.growth import best_guesses
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

PLACES = 30
PROMPT = [11, 12, 13, 14]


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_guesses, "PLACES", PLACES)


def told(caplog: pytest.LogCaptureFixture) -> int:
    """Return the number of warnings."""
    return sum(f"of {PLACES} positions, so drafting" in each.getMessage() for each in caplog.records)


def test_a_draft_that_is_of_no_use_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guesses of n-grams, rounds without the draft, and sampling, under which good drafts err too, do not count."""
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    stranger = save_random_model(tmp_path / "stranger", "gpt_neox", seed=2)
    sampled: dict[str, Any] = {"temperature": 5.0, "seed": 1, "policy": "dyspec"}
    with running_services(tmp_path, target, stranger) as services, Client(services.draft_address) as client:
        for options in (
            {"policy": "ngram"},
            {"policy": "autoregressive"},
            {**sampled, "scheme": "independent"},
            {**sampled, "scheme": "residual"},
        ):
            client.generate(PROMPT, max_new_tokens=PLACES + 1, ignore_eos=True, **options)
            assert told(caplog) == 0
        for policy in ("linear", "hybrid", "dynatree"):
            client.generate(PROMPT, max_new_tokens=PLACES + 1, ignore_eos=True, policy=policy)
            assert told(caplog) == 1


def test_a_draft_that_is_often_right_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = save_random_model(tmp_path / "target", "llama", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=3)
    with running_services(tmp_path, target, draft) as services, Client(services.draft_address) as client:
        for sampled in ({}, {"temperature": 0.8, "seed": 1}):
            client.generate(PROMPT, max_new_tokens=PLACES + 1, ignore_eos=True, policy="hybrid", **sampled)
    assert told(caplog) == 0
