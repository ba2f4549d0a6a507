"""Tests text through both services and the gateway, with a tokenizer that spells most characters as bytes."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from dynatree.client import Client
from dynatree.v1 import draft_pb2, draft_pb2_grpc
from tests.support.gateways import running_gateway
from tests.support.services import Services, running_services
from tests.support.tokenizer_zoo import TOKENIZERS, bytes_of

# The target repeats this text; each token has one successor. It has characters of two, three and four bytes, one with a
# with a special token inside, one that is never finished, a byte that belongs to none, and words.
SAID = re.split(" ", "▁the F0 9F 99 82 ▁said E6 BC A2 E0 A4 <|im_start|> A8 FF he ED 95 9C C3 A9 F1 ▁a D8 B9 .")
TEXT = " the🙂 said漢न\ufffdhe한é\ufffd aع."


def save_chain(folder: Path, tokenizer: PreTrainedTokenizerBase, wrong: int = 0) -> Path:
    """Save a model whose likeliest next token is the last one's successor, except for every `wrong`th token."""
    ids = tokenizer.convert_tokens_to_ids(
        [f"<0x{each}>" if len(each) == 2 and not each.islower() else each for each in SAID]
    )
    assert len({*ids}) == len(SAID)
    size = 384
    assert len(tokenizer) <= size
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=1,
    )
    config.max_position_embeddings, config.eos_token_id = 160, 2
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(0.01 * torch.eye(size))
        for place, id_ in enumerate(ids):
            step = 2 if wrong and place % wrong == 0 else 1
            model.lm_head.weight[ids[(place + step) % len(ids)], id_] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture() -> PreTrainedTokenizerBase:
    return TOKENIZERS["llama 2"]()


@pytest.fixture(scope="module", name="services")
def services_fixture(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("text")
    target = save_chain(folder / "target", tokenizer)
    with running_services(folder, target, save_chain(folder / "draft", tokenizer, wrong=5)) as services:
        yield services


@pytest.fixture(scope="module", name="client")
def client_fixture(services: Services) -> Iterator[Client]:
    with Client(services.draft_address) as client:
        yield client


def check_text(client: Client, policies: Sequence[str], lengths: Sequence[int]) -> None:
    """Check that each policy gives the same text, whole, streamed and with stop strings, also for sampled ids.

    Each policy meets every length, and stop strings at every other one.
    """
    tokenizer = TOKENIZERS["llama 2"]()
    for (number, length), sampling in product(enumerate(lengths), ({}, {"temperature": 8.0, "seed": 3})):
        wanted = client.generate("he.", max_new_tokens=length, policy="autoregressive", ignore_eos=True, **sampling)
        assert len(wanted.token_ids) == length
        data = b"".join(bytes_of(tokenizer, token_id) for token_id in wanted.token_ids)
        assert wanted.text == data.decode(errors="replace")
        assert sampling or (TEXT * 3).startswith(wanted.text.removesuffix("\ufffd"))
        for place, policy in enumerate(policies, number):
            stop = ("never", "漢?") if place % 2 else ()
            options = {"max_new_tokens": length, "policy": policy, "stop": stop, "ignore_eos": True, **sampling}
            completion = client.generate("he.", log_probs=True, **options)
            assert (completion.token_ids, completion.text) == (wanted.token_ids, wanted.text), options
            assert "".join(chunk.text for chunk in client.stream("he.", **options)) == wanted.text


def test_requests_give_the_text_of_the_ids(client: Client) -> None:
    check_text(client, ("linear", "dynatree"), (4, 12, 40))


@pytest.mark.long
def test_every_policy_gives_the_text_of_the_ids(client: Client) -> None:
    policies = client.model_info().policies
    assert len(policies) > 8
    check_text(client, policies, (2, 5, 11, 60))


def test_a_stop_string_ends_the_text_wherever_rounds_end(client: Client) -> None:
    for stop in ("漢", "🙂 s", "न\ufffd", "he한", "é\ufffd a"):
        ends = [client.generate("he.", max_new_tokens=40, stop=stop, policy=each) for each in ("linear", "dynatree")]
        for completion in ends:
            assert (completion.text, completion.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")
        assert len({completion.token_ids for completion in ends}) == 1


def test_special_tokens_are_in_the_text_on_request(client: Client) -> None:
    """One stands between the bytes of a character."""
    for policy in ("linear", "dynatree"):
        completion = client.generate("he.", max_new_tokens=20, policy=policy, skip_special_tokens=False)
        assert completion.text.startswith(TEXT.replace("न", "\ufffd<|im_start|>\ufffd")[:24])


def test_the_token_that_ends_a_completion_has_no_text(services: Services, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether it is special or not, and also if all of it was received before the draft service was lost."""
    for text, token in ((" the🙂", "▁said"), (" the🙂 said漢", "<0xE0>"), (" the🙂 said漢न\ufffdhe", "<0xED>")):
        end = int(tokenizer.convert_tokens_to_ids(token))  # type: ignore[arg-type]
        request = draft_pb2.GenerateRequest(
            text="he.", max_new_tokens=40, stop_token_ids=[end], log_probs=True, special_tokens_in_text=False
        )
        with grpc.insecure_channel(services.draft_address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
            responses = list(stub.Generate(request, timeout=30.0))
            ids = [token for each in responses for token in each.token_ids]
            assert ids[-1] == end
            assert "".join(each.text for each in responses) == text
            assert [offset for each in responses for offset in each.text_offsets][-1] == len(text)
            request.resume.token_ids[:] = ids
            assert "".join(each.text for each in stub.Generate(request, timeout=30.0)) == text


def test_a_client_that_resumes_in_mid_stream_gets_the_rest(services: Services) -> None:
    def asked(**resume: Any) -> tuple[str, list[int], list[int]]:
        request = draft_pb2.GenerateRequest(
            text="he.", max_new_tokens=40, stop=["aع. t"], log_probs=True, resume=draft_pb2.Resume(**resume)
        )
        request.policy.name = "linear"
        responses = list(stub.Generate(request, timeout=30.0))
        return (
            "".join(each.text for each in responses),
            [token for each in responses for token in each.token_ids],
            [offset for each in responses for offset in each.text_offsets],
        )

    with grpc.insecure_channel(services.draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        text, token_ids, offsets = asked()
        for count in range(1, len(token_ids), 2):
            for characters in {max(0, offsets[count] - 3), offsets[count]}:
                rest = asked(token_ids=token_ids[:count], characters=characters)
                assert rest == (text[characters:], token_ids[count:], offsets[count:])


def test_a_stop_string_that_names_a_special_token_ends_at_it(
    client: Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    completion = client.generate("he.", max_new_tokens=40, stop="<|im_start|>")
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert completion.text == " the🙂 said漢\ufffd"


def test_the_text_of_a_node_has_its_space(client: Client) -> None:
    completion = client.generate("he.", max_new_tokens=8, policy="linear", trace=True)
    assert " said" in [text for each in completion.trace for text in each.committed_texts]


def check_places(choice: dict[str, Any], prompt: str) -> None:
    """Check that each token begins where its text does; `prompt` is the echoed prompt."""
    text, log_probs = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    places = list(zip(log_probs["tokens"], log_probs["text_offset"], strict=True))
    assert [place for _, place in places] == sorted(place for _, place in places)
    for token, place in places:
        if token.startswith("bytes:"):
            assert text[place] not in " thesaid."
        elif place and token not in ("<s>", "<|im_start|>"):
            assert text[place:].startswith(token), (token, place)


@pytest.mark.long
def test_offsets_point_into_the_text_that_is_sent(services: Services, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["he said 🙂 the", " he", "a", "he the", "é🙂"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    prompts = [*texts, *ids[::2], [1, *ids[0]], [*ids[0], 1, *ids[0]]]
    with running_gateway(services.draft_address) as gateway:

        def post(body: dict[str, Any]) -> bytes:
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(f"{gateway.url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as answer:
                return bytes(answer.read())

        for prompt, echo in product(prompts, (False, True)):
            body = {"prompt": prompt, "max_tokens": 40, "logprobs": 0, "echo": echo, "temperature": 0}
            whole = json.loads(post(body))["choices"][0]
            decoded = tokenizer.decode(prompt) if isinstance(prompt, list) else prompt
            check_places(whole, decoded if echo else "")
            assert whole["text"].endswith(TEXT * 2) or TEXT[:9] in whole["text"]
            events = post({**body, "stream": True}).decode().split("\n\n")
            chunks = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
            assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
            told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            assert [place for each in told for place in each["text_offset"]] == whole["logprobs"]["text_offset"]
            if echo:
                behind = [place for place in whole["logprobs"]["text_offset"] if place >= len(decoded)]
                assert len(behind) >= 40
