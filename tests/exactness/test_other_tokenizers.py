"""Tests drafts of another tokenizer: tokens equal plain decoding's, and trees those of a draft that shares it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynatree import embedded
from dynatree.client import Client
from dynatree.draft.policies import policy_names
from tests.support.model_zoo import save_random_model
from tests.support.other_tokenizers import save_renumbered, save_with_tokenizer
from tests.support.services import running_services
from tests.support.tokenizer_zoo import llama_2

pytestmark = pytest.mark.early

PROMPTS = ("The naïve café was closed, and the old man said", "She counted: 1, 2, 3 🙂🙂 and")
SAMPLED = {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The embedded pair, whose draft has another tokenizer: with other ids, and without 600 of its 2048 tokens."""
    folder = tmp_path_factory.mktemp("s")
    draft = save_renumbered(folder / "draft", embedded.draft_path(), dropped=600)
    yield from open_client(folder, draft)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A random draft with a tokenizer of another kind, which puts a space and a special token before each text."""
    folder = tmp_path_factory.mktemp("s")
    model = save_random_model(folder / "model", "llama", seed=1)
    yield from open_client(folder, save_with_tokenizer(folder / "draft", model, llama_2()))


def open_client(folder: Path, draft: Path, **options: Any) -> Iterator[Client]:
    running = running_services(folder, embedded.target_path(), draft, dtype="float32", **options)
    with running as services, Client(services.draft_address) as client:
        yield client


INDEPENDENT = {**SAMPLED, "scheme": "independent", "repetition_penalty": 1.2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        pytest.param("smaller", {}, id="smaller-greedy", marks=pytest.mark.long),
        pytest.param("smaller", SAMPLED, id="smaller-gumbel"),
        pytest.param("smaller", INDEPENDENT, id="smaller-independent", marks=pytest.mark.long),
        pytest.param("byte_fallback", {}, id="byte fallback-greedy"),
        pytest.param("byte_fallback", SAMPLED, id="byte fallback-gumbel", marks=pytest.mark.long),
        pytest.param("byte_fallback", INDEPENDENT, id="byte fallback-independent", marks=pytest.mark.long),
    ],
)
def test_every_policy_gives_the_tokens_of_plain_decoding(
    pair: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    client: Client = request.getfixturevalue(pair)
    for prompt in PROMPTS:
        plain = client.generate(prompt, max_new_tokens=16, policy="autoregressive", **options)
        for policy in policy_names():
            drafted = client.generate(prompt, max_new_tokens=16, policy=policy, **options)
            assert drafted.token_ids == plain.token_ids, policy


@pytest.mark.long
def test_a_draft_with_other_ids_grows_the_same_trees(tmp_path: Path) -> None:
    """Also over many rounds, so its context and its KV cache hold the same text."""
    traces = []
    renumbered = save_renumbered(tmp_path / "renumbered", embedded.draft_path(), dropped=0)
    for draft in (embedded.draft_path(), renumbered):
        for client in open_client(tmp_path, draft):
            for options in ({}, SAMPLED, {**SAMPLED, "scheme": "residual"}):
                completion = client.generate(PROMPTS[0], max_new_tokens=40, policy="dyspec", trace=True, **options)
                traces.append([(each.token_ids, each.parents, each.accepted_nodes) for each in completion.trace])
    assert traces[:3] == traces[3:]
    assert all(any(accepted for _, _, accepted in trace) for trace in traces)


def test_a_prompt_that_the_draft_cannot_read_whole(tmp_path: Path) -> None:
    """Longer than the draft's context in the draft's tokens, though not in the target's: nothing is drafted."""
    model = save_random_model(tmp_path / "model", "llama", seed=1)
    draft = save_with_tokenizer(tmp_path / "draft", model, llama_2())
    for client in open_client(tmp_path, draft, draft_context=100):
        text = "internationalisation of the committee " * 4
        drafted = client.generate(text, max_new_tokens=5, policy="linear")
        assert drafted.stats.draft_n == 0
        assert drafted.token_ids == client.generate(text, max_new_tokens=5, policy="autoregressive").token_ids
        assert client.generate("Hello", max_new_tokens=9, policy="linear").stats.draft_n > 0
