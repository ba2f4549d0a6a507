"""Tests a draft service without a draft model: its tokens, its refusals, its tokenizer, and that it loads no torch."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dynatree.client import Client, InvalidRequestError
from dynatree.common.errors import FailedPreconditionError, PeerUnavailableError, StartupError
from dynatree.draft.policies import policy_names
from dynatree.draft.target import target_tokenizer
from dynatree.draft.target.verify_client import VerifyClient
from dynatree.serving import healthcheck
from dynatree.serving.channel import Connector
from tests.support.gguf_files import save_gguf
from tests.support.model_zoo import VOCAB_SIZE, save_random_model
from tests.support.processes import service, wait_until
from tests.support.refusals import REQUEST
from tests.support.services import Services, running_services

PLAIN = "autoregressive"
POLICIES = policy_names(has_model=False)
SHORTEST = {"ngram": {"shortest": 1}, "throughput": {"shortest": 1}}  # in so short a text only single tokens recur
NEW_TOKENS = 16
FEW = range(100, 104)
FEW_ONLY = {"logit_bias": {token: 12.0 + token % 2 for token in FEW}}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# A draft service that prints the loaded modules of torch when it ends.
REPORTING = """
import atexit, sys
torch = lambda: [name for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module]
atexit.register(lambda: print(torch()))
from dynatree.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module", name="target")
def target_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = save_random_model(tmp_path_factory.mktemp("m") / "target", "llama", seed=1, num_hidden_layers=2)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return target


@pytest.fixture(scope="module", name="services")
def services_fixture(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with running_services(tmp_path_factory.mktemp("s"), target, None) as services:
        yield services


@pytest.fixture(scope="module", name="client")
def client_fixture(services: Services) -> Iterator[Client]:
    with Client(services.draft_address) as client:
        yield client


def completed(client: Client, policy: str | None, prompt: list[int], **options: Any) -> Any:
    options = {"max_new_tokens": NEW_TOKENS, "policy_settings": SHORTEST.get(policy or "throughput"), **options}
    return client.generate(prompt, policy=policy, **options)


GREEDY = st.fixed_dictionaries({"temperature": st.just(0.0)})
SAMPLED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.8, 1.5]),
        "seed": st.integers(0, 2**64 - 1),
        "scheme": st.sampled_from(["gumbel", "independent"]),
        "top_p": st.sampled_from([None, 0.8]),
    }
)
RANDOM = st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=40)
REPEATING = st.lists(st.sampled_from(list(FEW)), min_size=1, max_size=40)


@settings(max_examples=8, deadline=None)
@given(prompt=RANDOM | REPEATING, options=GREEDY | SAMPLED, few=st.booleans())
def test_every_policy_gives_the_tokens_of_plain_decoding(
    client: Client, prompt: list[int], options: dict[str, Any], few: bool
) -> None:
    options = {**options, **(FEW_ONLY if few else {})}
    plain = completed(client, PLAIN, prompt, **options)
    assert plain.stats.draft_n == 0
    for policy in (*POLICIES, None):
        assert completed(client, policy, prompt, **options).token_ids == plain.token_ids, policy


def test_greedy_tokens_are_those_of_generate(client: Client, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for length in (1, 7, 60):
        prompt = random.Random(length).choices(range(2, VOCAB_SIZE), k=length)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=60, pad_token_id=0
            )
        for policy in (*POLICIES, None):
            completion = completed(client, policy, prompt, max_new_tokens=60)
            assert list(completion.token_ids) == output[0, length:].tolist(), policy


@pytest.mark.parametrize("policy", ["ngram", "throughput", None])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "seed": 5}], ids=["greedy", "sampled"])
def test_repeated_text_is_drafted_without_a_forward_pass(
    client: Client, policy: str | None, options: dict[str, Any]
) -> None:
    stats = completed(client, policy, [100, 101] * 10, max_new_tokens=100, **options, **FEW_ONLY).stats
    assert stats.draft_n_accepted > 10
    assert stats.round_parts["draft_forward"].total_seconds == 0.0


@pytest.mark.parametrize("policy", sorted({*policy_names()} - {*POLICIES}))
def test_a_policy_that_needs_a_draft_model_says_so(client: Client, policy: str) -> None:
    message = f"policy {policy} needs a draft model, and there is none; expected one of {', '.join(POLICIES)}"
    with pytest.raises(InvalidRequestError, match=f": {re.escape(message)}{REQUEST}$") as error:
        client.generate([5], policy=policy, max_new_tokens=2)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_no_setting_asks_for_a_draft_model(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="breadth is 4, expected 0, because there is no draft model"):
        client.generate([5], policy="throughput", policy_settings={"breadth": 4}, max_new_tokens=2)


def test_residual_sampling_is_plain_decoding(client: Client) -> None:
    options = {"temperature": 0.7, "seed": 3, "scheme": "residual"}
    plain = completed(client, PLAIN, [100, 101], **options)
    assert client.generate([100, 101], max_new_tokens=NEW_TOKENS, **options).token_ids == plain.token_ids
    with pytest.raises(InvalidRequestError, match=f"scheme residual does not allow; expected one of {PLAIN}{REQUEST}$"):
        client.generate([5], policy="throughput", **options)


def test_the_service_says_that_it_has_no_draft_model(client: Client) -> None:
    info = client.model_info()
    assert (info.draft.name, info.draft.parameters, info.draft.dtype, info.draft.device) == ("none", 0, "", "")
    assert info.policies == ("throughput", "autoregressive", "ngram")


def test_texts_and_chats_are_read_by_the_targets_tokenizer(client: Client) -> None:
    assert client.model_info().chat_template
    text = client.generate("the sea", max_new_tokens=4, ignore_eos=True)
    ids = client.tokenize("the sea").token_ids
    assert text.token_ids == client.generate(ids, max_new_tokens=4, ignore_eos=True).token_ids
    chat = client.generate([{"role": "user", "content": "the sea"}], max_new_tokens=4, ignore_eos=True)
    assert (chat.text, chat.token_ids) == (text.text, text.token_ids)


def test_a_tokenizer_that_is_another_one_here_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_tokenizer, "fingerprint", lambda _: "another")
    with (
        pytest.raises(StartupError, match=r"^the tokenizer of target differs from the target's once it is loaded"),
        running_services(tmp_path, target, None),
    ):
        pass


async def asked_for_its_tokenizer(address: str) -> None:
    client = VerifyClient(address, Connector())
    try:
        await client.tokenizer_files(5.0)
    finally:
        await client.close()


def test_services_that_send_no_tokenizer(services: Services, tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"^the service at unix:.* is too old to send its tokenizer$"):
        asyncio.run(asked_for_its_tokenizer(services.draft_address))
    with pytest.raises(PeerUnavailableError, match=r"^the verify service is out of reach$"):
        asyncio.run(asked_for_its_tokenizer(f"unix:{tmp_path}/nobody.sock"))


@pytest.mark.parametrize("kind", ["folder", "GGUF"])
def test_the_process_loads_no_torch(target: Path, tmp_path: Path, kind: str) -> None:
    model = target if kind == "folder" else save_gguf(tmp_path / "model.gguf", ["Q8_0"], seed=1)
    address = f"unix:{tmp_path}/draft.sock"
    history = tmp_path / "history"
    if kind == "GGUF":
        history.write_text("no history")
    command = [sys.executable, "-c", REPORTING, "draft", "--draft-model", "none", "--listen", address]
    command += ["--history-file", str(history)]
    with service(tmp_path, "verify", "verify", "--target-model", str(model), "--threads", "1") as (verify, _, _):
        draft = subprocess.Popen([*command, "--verify", verify], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            wait_until(lambda: draft.poll() is not None or healthcheck.failure(address, timeout=1.0) is None)
            with Client(address) as client:
                options = {"max_new_tokens": 40, "temperature": 0.5, "seed": 1, "ignore_eos": True}
                plain = client.generate("the sea, the sea", policy=PLAIN, **options)
                assert client.generate("the sea, the sea", **options).text == plain.text
        finally:
            draft.send_signal(signal.SIGTERM)
            output, errors = draft.communicate(timeout=30)
    assert draft.returncode == 0, errors.decode()
    if kind == "GGUF":
        assert (
            f"the history {history} is neither used nor replaced: it is no history, or it is damaged" in errors.decode()
        )
    else:
        (kept,) = json.loads(history.read_text())["principals"]
        assert kept["sequences"][0][-40:] == list(plain.token_ids), "a shutdown saves the history"
    assert output.decode() == "[]\n", "no module of torch is loaded"
    assert " INFO dynatree.cli.draft: no draft model: drafting from n-grams alone\n" in errors.decode()
    assert f" INFO dynatree draft: n-grams alone for {model.name} on {address}\n" in errors.decode()
    assert "PyTorch" not in errors.decode()
