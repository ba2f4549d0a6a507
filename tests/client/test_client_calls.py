"""Tests calls besides completions, chats as prompts, and metadata of one call, on the embedded pair."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EmbeddedServices

from dynatree.client import AsyncClient, AuthenticationError, Client, InvalidRequestError
from dynatree.serving.security import SecuritySettings
from tests.support.fake_draft_service import serving
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

TEXT = "It was 5 °C — “naïve” 🙂"
TOKEN = "sesame-1234567890"


@pytest.fixture(name="client")
def client_fixture(embedded_services: EmbeddedServices) -> Iterator[Client]:
    with Client(embedded_services.draft_address) as client:
        yield client


def test_the_vocabulary_spells_the_prompt(client: Client, embedded_services: EmbeddedServices) -> None:
    vocabulary = client.vocabulary()

    ids = client.generate(TEXT, max_new_tokens=1).prompt_ids
    assert b"".join(vocabulary[token] for token in ids).decode() == TEXT

    async def ask() -> tuple[bytes, ...]:
        async with AsyncClient(embedded_services.draft_address) as other:
            return await other.vocabulary()

    assert asyncio.run(ask()) == vocabulary


def test_a_server_that_serves_says_so(client: Client, embedded_services: EmbeddedServices, tmp_path: Path) -> None:
    async def ask(address: str) -> bool:
        async with AsyncClient(address) as other:
            return await other.is_serving(timeout=0.3 if address == nobody else 60.0)

    nobody = f"unix:{tmp_path}/nobody.sock"
    assert client.is_serving()
    assert asyncio.run(ask(embedded_services.draft_address))
    assert asyncio.run(ask(f"{nobody},{embedded_services.draft_address}"))
    assert not asyncio.run(ask(nobody))
    with Client(nobody) as lost:
        assert not lost.is_serving(timeout=0.3)


def test_a_chat_without_a_template_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        client.generate([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "chat", [[{"role": "user"}], [{"role": "user", "content": "Hi", "mood": "good"}], [{"role": "user", "content": 7}]]
)
def test_a_message_is_a_role_and_a_content(client: Client, chat: list[dict[str, object]]) -> None:
    with pytest.raises(TypeError, match=r"prompt\[0\]"):
        client.generate(chat)  # type: ignore[arg-type]


def test_a_call_has_metadata_of_its_own(tmp_path: Path) -> None:
    """It replaces the client's metadata, and no other call has it."""
    target = save_random_model(tmp_path / "target", "gpt2", seed=1)
    draft = save_noisy_copy(tmp_path / "draft", target, seed=2)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"anna:{TOKEN}\n")
    known = (("authorization", f"Bearer {TOKEN}"),)
    with (
        running_services(tmp_path, target, draft, security=SecuritySettings(tokens=tokens)) as services,
        Client(services.draft_address, token="wrong") as client,
    ):
        assert client.generate("a", max_new_tokens=2, metadata=known).token_ids
        assert client.model_info(metadata=known).target.name == "target"
        assert client.vocabulary(metadata=known)
        for call in (lambda: client.generate("a", max_new_tokens=2), client.model_info, client.vocabulary):
            with pytest.raises(AuthenticationError):
                call()

        async def ask() -> None:
            async with AsyncClient(services.draft_address) as other:
                assert (await other.generate("a", max_new_tokens=2, metadata=known)).token_ids
                assert await other.vocabulary(metadata=known)
                with pytest.raises(AuthenticationError):
                    await other.model_info()

        asyncio.run(ask())


def test_a_token_of_one_call_does_not_cross_the_network_in_plain_text() -> None:
    with Client("192.0.2.1:50051") as client, pytest.raises(ValueError, match="plain text"):
        client.generate("a", metadata=(("authorization", f"Bearer {TOKEN}"),))


def test_a_chat_is_sent_as_it_is(tmp_path: Path) -> None:
    with serving(tmp_path) as service, Client(service.address) as client:
        client.generate([{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}])
    [request] = service.requests
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", ""), ("user", "Hi")]
