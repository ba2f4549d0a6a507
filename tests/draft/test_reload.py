"""Tests the replacement of the draft model while the service runs, and what keeps the old one."""

from __future__ import annotations

import logging
import random
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dynatree import embedded
from dynatree.client import Client
from dynatree.common.errors import StartupError
from dynatree.draft import serve_draft
from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.draft.reload.replay import MOST_TOKENS, RecentText, RecentTexts
from dynatree.engine.model_thread import calls_left
from dynatree.engine.settings import ModelSettings
from tests.support.model_zoo import VOCAB_SIZE, save_noisy_copy, save_random_model
from tests.support.other_tokenizers import save_renumbered, save_with_tokenizer
from tests.support.processes import wait_until
from tests.support.services import Services, running_services
from tests.support.tokenizer_zoo import TOKENIZERS

PROMPTS = [random.Random(seed).choices(range(2, VOCAB_SIZE), k=9) for seed in range(2)]
CHAIN = {"policy": "linear", "policy_settings": {"depth": 4}}
FEW = {"logit_bias": {token: 12.0 + token % 2 for token in range(100, 104)}}
OPTIONS = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3, **FEW})


def put(path: Path, checkpoint: Path) -> None:
    """Put a checkpoint at a path, as an operator replaces a folder."""
    new = path.with_name("new")
    new.symlink_to(checkpoint)
    new.rename(path)


class Draft:
    """A path at which one of several checkpoints is put."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.path = folder / "draft"
        self.good = save_noisy_copy(folder / "good", target, seed=2)
        self.better = save_noisy_copy(folder / "better", target, seed=3, noise=0.0)
        self.poor = save_random_model(folder / "poor", "llama", seed=7, num_hidden_layers=1)
        self.put(self.good)

    def put(self, checkpoint: Path) -> None:
        put(self.path, checkpoint)


@pytest.fixture(name="target")
def target_fixture(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "target", "llama", seed=1, num_hidden_layers=2)


@pytest.fixture(name="draft")
def draft_fixture(tmp_path: Path, target: Path) -> Draft:
    return Draft(tmp_path, target)


@pytest.fixture(name="services")
def services_fixture(tmp_path: Path, target: Path, draft: Draft) -> Iterator[Services]:
    with running_services(tmp_path, target, draft.path) as services:
        yield services


@pytest.fixture(name="client")
def client_fixture(services: Services) -> Iterator[Client]:
    with Client(services.draft_address) as client:
        yield client


def reloads(services: Services, outcome: str) -> float:
    return services.draft_registry.get_sample_value("dynatree_draft_reloads_total", {"outcome": outcome}) or 0.0


def reload(services: Services, outcome: str) -> None:
    """Reload and wait for the outcome."""
    before = reloads(services, outcome)
    services.reload()
    wait_until(lambda: reloads(services, outcome) > before)


@pytest.mark.long
def test_completions_across_reloads_are_those_of_plain_decoding(
    services: Services, client: Client, draft: Draft
) -> None:
    """A request keeps the draft model that it began with, which is freed when the last such request has ended."""
    asked = [(prompt, options) for prompt in PROMPTS for options in OPTIONS]
    stopped: list[bool] = []

    def traffic() -> list[tuple[int, ...]]:
        made: list[tuple[int, ...]] = []
        while not stopped:
            made += completed()
        return made

    def completed(**policy: Any) -> list[tuple[int, ...]]:
        return [
            client.generate(prompt, max_new_tokens=40, **policy or CHAIN, **each).token_ids for prompt, each in asked
        ]

    expected = completed(policy="autoregressive")
    begun = client.stream(PROMPTS[0], max_new_tokens=40, n=64, **CHAIN, **OPTIONS[0])
    tokens = [*next(begun).token_ids]
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(traffic)
        draft.put(draft.better)
        reload(services, "taken")
        stopped.append(True)
        made = running.result()
    assert made == expected * (len(made) // len(expected))
    assert completed() == expected

    second = weakref.ref(services.drafts.current.source.model)
    draft.put(draft.good)
    draft.put(draft.better)
    services.reload()  # begins when the first model is no longer used
    tokens += [token for chunk in takewhile(lambda chunk: chunk.index == 0, begun) for token in chunk.token_ids]
    assert tuple(tokens) == expected[0]
    assert (reloads(services, "taken"), second()) == (1, services.drafts.current.source.model)
    begun.close()
    wait_until(lambda: reloads(services, "taken") == 2)
    wait_until(lambda: second() is None)
    done = client.generate(PROMPTS[1], max_new_tokens=40, **CHAIN)
    assert (done.token_ids, done.stats.draft_n_accepted) == (expected[2], done.stats.draft_n)  # it is the target's copy


def test_a_worse_or_a_broken_checkpoint_leaves_the_old_one(
    services: Services, client: Client, draft: Draft, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = client.generate(PROMPTS[0], max_new_tokens=40, **CHAIN)
    before = services.drafts.current
    broken = shutil.copytree(draft.good, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    other = save_with_tokenizer(tmp_path / "other", draft.good, TOKENIZERS["words"]())
    longer = save_random_model(tmp_path / "longer", "llama", seed=1, max_position_embeddings=4096)
    reasons = {
        draft.poor: "recent tokens, it guesses",
        broken: "could not be loaded",
        other: "cannot be matched with another one",
        longer: "one session can need",
        tmp_path / "nowhere": "there is no model",
    }
    for checkpoint, reason in reasons.items():
        draft.put(checkpoint)
        caplog.clear()
        reload(services, "refused")
        (message,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
        assert message.startswith("SIGHUP: the draft stays good (float32, cpu): ")
        assert reason in message
        assert "\n" not in message
    assert services.drafts.current is before
    again = client.generate(PROMPTS[0], max_new_tokens=40, **CHAIN)
    assert (again.token_ids, again.stats.draft_n_accepted) == (expected.token_ids, expected.stats.draft_n_accepted)
    assert reloads(services, "taken") == 0


def test_a_model_with_another_tokenizer_is_matched_with_the_target_and_histories_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, histories = tmp_path / "draft", SuffixIndexes(10_000)
    put(path, embedded.draft_path())
    with (
        running_services(tmp_path, embedded.target_path(), path, dtype="float32", histories=histories) as services,
        Client(services.draft_address) as client,
    ):
        prompt = "The old man said"
        expected = client.generate(prompt, max_new_tokens=40, **CHAIN)
        before = services.drafts.current.source
        put(path, save_renumbered(tmp_path / "renumbered", embedded.draft_path(), dropped=0))
        with caplog.at_level(logging.INFO, "dynatree"):
            reload(services, "taken")
        (compared,) = [each.args for each in caplog.records if "recent tokens" in each.msg]
        assert isinstance(compared, tuple)
        assert (compared[0], compared[1]) == (40, compared[2]), "the same model, with other token ids"
        source = services.drafts.current.source
        assert source.translation is not None
        assert source.info.tokenizer_fingerprint == before.info.tokenizer_fingerprint
        again = client.generate(prompt, max_new_tokens=40, store=False, **CHAIN)
        assert (again.token_ids, again.stats.draft_n_accepted) == (expected.token_ids, expected.stats.draft_n_accepted)
        hits = histories.hits
        recalled = client.generate(prompt, max_new_tokens=40, policy="throughput")
        assert (recalled.token_ids, histories.hits > hits) == (expected.token_ids, True)

        put(path, save_renumbered(tmp_path / "smaller", embedded.draft_path(), dropped=1700))
        reload(services, "refused")
        assert services.drafts.current.source is source


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_service_that_stops_does_not_wait_for_a_model_that_loads(
    tmp_path: Path, target: Path, draft: Draft, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """It may be killed before the model is loaded, and has the histories to save.

    A model for a GPU loads on the old model's thread.
    """
    begun, free = threading.Event(), threading.Event()

    def load(settings: ModelSettings) -> NoReturn:
        begun.set()
        free.wait()
        raise StartupError("too late")

    try:
        with running_services(tmp_path, target, draft.path) as services:
            object.__setattr__(services.drafts.current.source.info, "device", device)
            monkeypatch.setattr(serve_draft, "load_engine", load)
            services.reload()
            begun.wait()
        assert calls_left()
    finally:
        free.set()
    wait_until(lambda: not calls_left())


def test_without_a_model_there_is_none_to_reload(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_services(tmp_path, target, None) as services:
        reload(services, "refused")
    assert "SIGHUP: the draft stays n-grams alone: it has no checkpoint of its own" in caplog.text


def test_recent_texts_are_the_ends_of_the_last_completions() -> None:
    recent = RecentTexts()
    recent.add([], [4])  # nothing comes before it
    recent.add([1, 2, 3], [4, 5])
    recent.add(range(300), [7])
    recent.add([], range(300))
    ends = (*range(300 - MOST_TOKENS + 1, 300), 7), tuple(range(300 - MOST_TOKENS, 300))
    assert recent.copy() == (
        RecentText((1, 2, 3, 4, 5), 3),
        RecentText(ends[0], MOST_TOKENS - 1),
        RecentText(ends[1], 1),
    )
    for token in range(16):
        recent.add([token], [token])
    assert len(recent.copy()) == 16
    assert all(text.start == 1 for text in recent.copy())
