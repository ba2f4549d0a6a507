"""Tests that log-probabilities of prompts and of likeliest tokens equal transformers', through both services."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynatree.client import Client, Completion, InvalidRequestError
from dynatree.common import log_probs as common_log_probs
from dynatree.common.decoding import Decoding
from dynatree.common.errors import InvalidArgumentError
from dynatree.common.messages import OpenSession
from dynatree.common.model_info import ModelInfo
from dynatree.common.wire import model_info_to_pb
from dynatree.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from dynatree.verify.log_probs import log_probs_of
from dynatree.verify.scheduler import PROMPT_ROWS
from dynatree.verify.session import SessionRequest
from tests.support.model_zoo import VOCAB_SIZE, save_noisy_copy, save_random_model
from tests.support.processes import wait_until
from tests.support.services import Services, running_services

LONG = 2 * PROMPT_ROWS + 90  # three pieces of a prompt
CONTEXT = LONG + 100
TOP = 3
Top = Sequence[Sequence[tuple[int, float]]]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB_SIZE), k=length)


@dataclass(eq=False)
class Pair:
    services: Services
    client: Client
    model: Any  # the target, run by transformers alone
    tokenizer: Any

    def generate(self, prompt: str | list[int], **options: Any) -> Completion:
        completion = self.client.generate(prompt, **({"max_new_tokens": 12, "ignore_eos": True} | options))
        wait_until(lambda: self.services.sessions == 0)  # its tokens are in the prefix cache
        return completion

    def rows(self, token_ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities of the token after each token, `[tokens, vocabulary]`, from one forward pass."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([list(token_ids)])).logits[0]
        return logits.log_softmax(-1)

    def check(self, completion: Completion, prompt: Sequence[int], top: int = TOP) -> None:
        """Check that the log-probabilities of a completion, and of its prompt from the second token on, are right."""
        rows = self.rows([*prompt, *completion.token_ids])
        assert completion.prompt_ids == tuple(prompt)
        check(rows[: len(prompt) - 1], completion.prompt_ids[1:], completion.prompt_log_probs)
        check(rows[len(prompt) - 1 : -1], completion.token_ids, completion.log_probs)
        if top:
            check_top(rows[: len(prompt) - 1], completion.prompt_top_log_probs, top)
            check_top(rows[len(prompt) - 1 : -1], completion.top_log_probs, top)
        else:
            assert completion.prompt_top_log_probs == completion.top_log_probs == ()


def check(rows: Tensor, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
    """Check the log-probability of each token against the row before it."""
    expected = rows.gather(-1, torch.tensor(token_ids, dtype=torch.long)[:, None])[:, 0]
    assert len(log_probs) == len(token_ids)
    assert ((torch.tensor(log_probs, dtype=torch.double) - expected).abs() <= 1e-4).all()


def check_top(rows: Tensor, likeliest: Top, top: int) -> None:
    """Check the `top` likeliest tokens of each row, likeliest first, up to the order of nearly equal ones."""
    assert [len(each) for each in likeliest] == [top] * len(rows)
    for each in likeliest:
        values = [log_prob for _, log_prob in each]
        assert values == sorted(values, reverse=True)
        assert len({token for token, _ in each}) == top
    found = torch.tensor(likeliest, dtype=torch.double).view(len(rows), top, 2)
    values = found[..., 1]
    assert ((values - rows.topk(top).values).abs() <= 1e-4).all()
    assert ((rows.gather(-1, found[..., 0].long()) - values).abs() <= 1e-4).all()


@pytest.fixture(scope="module", name="pair", params=["llama", "gpt2", "gpt_neox, fixed rows"])
def pair_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family, *static = request.param.split(", ")
    context = {"n_positions" if family == "gpt2" else "max_position_embeddings": CONTEXT}
    folder = tmp_path_factory.mktemp("l")
    target = save_random_model(folder / "target", family, seed=1, **context)
    draft = save_noisy_copy(folder / "draft", target, seed=2)
    with (
        running_services(folder, target, draft, fixed_rows=(32,) if static else None) as services,
        Client(services.draft_address) as client,
    ):
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        yield Pair(services, client, model, AutoTokenizer.from_pretrained(target))


ASKING = {"prompt_log_probs": True, "top_log_probs": TOP}


# Log-probabilities of prompts


@pytest.mark.parametrize("length", [1, 2, 17, PROMPT_ROWS, PROMPT_ROWS + 1, LONG])
def test_the_prompts_are_the_targets_own_for_every_token_from_the_second_on(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    completion = pair.generate(prompt, **ASKING)
    pair.check(completion, prompt)
    assert completion.token_ids == pair.generate(prompt).token_ids


def test_a_prompt_of_text_comes_with_its_tokens(pair: Pair) -> None:
    text = "It was a bright cold morning, and the captain"
    completion = pair.generate(text, **ASKING)
    pair.check(completion, pair.tokenizer(text)["input_ids"])
    assert pair.generate(text).prompt_ids == completion.prompt_ids


def test_without_likeliest_tokens_and_without_the_tokens_own(pair: Pair) -> None:
    prompt = prompt_of(40)
    completion = pair.generate(prompt, prompt_log_probs=True)
    assert (completion.log_probs, completion.top_log_probs, completion.prompt_top_log_probs) == ((), (), ())
    check(pair.rows(prompt)[:-1], prompt[1:], completion.prompt_log_probs)
    pair.check(pair.generate(prompt, prompt_log_probs=True, log_probs=True), prompt, top=0)


def test_a_cached_prompt_is_read_whole(pair: Pair) -> None:
    """Cached tokens have no logits, so the whole prompt is read; the session's own tokens are cached as usual."""
    prompt = prompt_of(PROMPT_ROWS + 60, seed=5)
    expected = pair.generate(prompt)
    assert pair.generate(prompt).stats.cached_tokens == len(prompt) - 1
    completion = pair.generate(prompt, **ASKING)
    assert (completion.token_ids, completion.stats.cached_tokens) == (expected.token_ids, 0)
    pair.check(completion, prompt)
    other = prompt_of(100, seed=6)
    pair.check(pair.generate(other, **ASKING), other)
    assert pair.generate(other).stats.cached_tokens == len(other) - 1


def test_of_several_completions_the_first_has_them(pair: Pair) -> None:
    prompt = prompt_of(50, seed=7)
    options = {"n": 2, "temperature": 0.8, "seed": 3}
    completion = pair.generate(prompt, **options, **ASKING)
    pair.check(completion, prompt)
    (other,) = completion.alternatives
    assert (other.prompt_ids, other.prompt_log_probs, other.prompt_top_log_probs) == (tuple(prompt), (), ())
    assert other.stats.cached_tokens == len(prompt) - 1
    rows = pair.rows([*prompt, *other.token_ids])[len(prompt) - 1 : -1]
    check(rows, other.token_ids, other.log_probs)
    check_top(rows, other.top_log_probs, TOP)
    plain = pair.generate(prompt, **options)
    assert [each.token_ids for each in (plain, *plain.alternatives)] == [completion.token_ids, other.token_ids]


@pytest.mark.long
def test_beside_other_sessions_each_gets_what_it_gets_alone(pair: Pair) -> None:
    """Prompts of all lengths run in pieces beside trees and other prompts, with and without log-probabilities."""
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for number, length in enumerate((30, LONG, 5, 300, 700, 16, 520, 90, 260, 2)):
        options = {"temperature": 0.9, "seed": number} if number % 3 else {}
        requests.append((prompt_of(length, seed=number), options | (ASKING if number % 2 else {})))
    alone = [pair.generate(prompt, **options).token_ids for prompt, options in requests]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda each: pair.generate(each[0], **each[1]), requests))
    assert [completion.token_ids for completion in together] == alone
    for (prompt, options), completion in zip(requests, together, strict=True):
        if "prompt_log_probs" in options:
            pair.check(completion, prompt)
        else:
            assert completion.prompt_log_probs == ()


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5, "logit_bias": {9: 1.5}},
        {"temperature": 0.8, "seed": 1, "top_k": 30, "top_p": 0.8},
        {"temperature": 0.8, "seed": 1, "scheme": "residual"},
    ],
    ids=["penalty", "truncated", "residual"],
)
def test_options_change_no_log_probs_and_these_no_token(pair: Pair, options: dict[str, Any]) -> None:
    prompt = prompt_of(PROMPT_ROWS + 8, seed=8)
    completion = pair.generate(prompt, **options, **ASKING)
    pair.check(completion, prompt)
    assert completion.token_ids == pair.generate(prompt, **options).token_ids


# The likeliest tokens


@pytest.mark.parametrize("top", [1, 20])
def test_as_many_as_were_asked_for(pair: Pair, top: int) -> None:
    prompt = prompt_of(12, seed=9)
    completion = pair.generate(prompt, top_log_probs=top)  # which implies log_probs
    rows = pair.rows([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    check(rows, completion.token_ids, completion.log_probs)
    check_top(rows, completion.top_log_probs, top)
    assert completion.prompt_log_probs == ()
    assert [likeliest[0][0] for likeliest in completion.top_log_probs] == list(completion.token_ids)  # greedy


def test_a_stop_string_inside_a_round_cuts_them_with_the_tokens(pair: Pair) -> None:
    prompt = prompt_of(12, seed=10)
    options = {"policy": "linear", "policy_settings": {"depth": 6}, "max_new_tokens": 30, **ASKING}
    whole = pair.generate(prompt, **options)
    middle = len(whole.text) // 2
    completion = pair.generate(prompt, stop=whole.text[middle : middle + 3], **options)
    assert len(completion.token_ids) < len(whole.token_ids)
    pair.check(completion, prompt)


def test_chunks_carry_their_tokens_own(pair: Pair) -> None:
    prompt = prompt_of(12, seed=11)
    with pair.client.stream(prompt, max_new_tokens=12, **ASKING) as stream:  # type: ignore[arg-type]
        first = next(stream)
        assert len(stream.prompt_log_probs) == len(stream.prompt_top_log_probs) == len(prompt) - 1
        chunks = [first, *stream]
    assert all(len(chunk.top_log_probs) == len(chunk.token_ids) for chunk in chunks)
    assert tuple(each for chunk in chunks for each in chunk.top_log_probs) == stream.completion.top_log_probs
    pair.check(stream.completion, prompt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equally_likely_tokens_come_by_their_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(70, 300, dtype=dtype)
    logits[:, 200] = logits[:, 100] = 2.0
    logits[:, 299] = 1.0
    values, likeliest = log_probs_of(logits, range(70), 6)
    assert [[token for token, _ in each] for each in likeliest] == [[100, 200, 299, 0, 1, 2]] * 70
    assert values[0] == likeliest[0][3][1] == pytest.approx(logits[0].double().log_softmax(-1)[0].item())


@pytest.mark.parametrize("count", [1, 4, 40])
def test_a_row_with_nan_has_no_log_probs_and_changes_no_other(count: int) -> None:
    """A service must report it, so it raises nothing here."""
    logits = torch.randn(70, 40, generator=torch.Generator().manual_seed(0))
    right = log_probs_of(logits, [3] * 70, 4)
    for row in (5, 69):
        logits[row, :count] = math.nan
        values, likeliest = log_probs_of(logits, [3] * 70, 4)
        assert math.isnan(values[row])
        assert all(math.isnan(value) for _, value in likeliest[row])
        assert values[:5] + values[6:69] == right[0][:5] + right[0][6:69]
        assert likeliest[:5] + likeliest[6:69] == right[1][:5] + right[1][6:69]


def test_the_likeliest_tokens_are_never_more_than_there_are() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    _, likeliest = log_probs_of(logits, [0, 1, 2], 20)
    assert [[token for token, _ in each] for each in likeliest] == logits.argsort(-1, descending=True).tolist()
    assert log_probs_of(logits[:0], [], 20) == ((), ())


# Limits


def opening(pair: Pair, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """Return the error with which the verify service refuses a session."""
    draft = model_info_to_pb(pair.services.draft.info)
    message = verify_pb2.OpenSession(**({"prompt_ids": [5, 6, 7], "max_new_tokens": 4, "draft": draft} | fields))
    with grpc.insecure_channel(pair.services.verify_address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Verify(iter([verify_pb2.VerifyRequest(open=message)]), timeout=10.0))
    return caught.value.code(), caught.value.details()


def test_more_than_20_are_refused_by_both_services(pair: Pair) -> None:
    message = r"top_log_probs is 21, expected a number in [0, 20]"
    with pytest.raises(InvalidRequestError) as caught:
        pair.generate([5, 6], top_log_probs=21)
    assert (caught.value.code, message in str(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = opening(pair, top_log_probs=21)
    assert (code, message in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_more_of_a_prompt_than_a_message_carries_are_refused_by_both_services(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_log_probs, "MAX_PROMPT_LOG_PROBS", 12)
    message = "prompt_log_probs of 4 prompt tokens with top_log_probs 3 are 16 log-probabilities, at most 12"
    with pytest.raises(InvalidRequestError) as caught:
        pair.generate([5, 6, 7, 8], **ASKING)
    assert (caught.value.code, message in str(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, details = opening(pair, prompt_ids=[5, 6, 7, 8], **ASKING)
    assert (code, message in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert pair.generate([5, 6, 7], **ASKING).prompt_log_probs
    assert pair.generate([5, 6, 7, 8], top_log_probs=3).log_probs


def test_the_most_that_a_prompt_may_have_fit_a_message() -> None:
    """The longest token ids, and a prompt of them, fit into a message in both directions."""
    most = common_log_probs.MAX_PROMPT_LOG_PROBS
    model = ModelInfo("m", "M", 1, 2**32, most, "float32", "cpu", "fingerprint", "0", "device", 1)
    for top in (0, 1, 20):
        places = most // (1 + top)
        request = OpenSession((5,) * places, Decoding(top_log_probs=top, prompt_log_probs=True), model)
        if places < most:
            SessionRequest.checked(request, model, frozenset())
            more = replace(request, prompt_ids=(5,) * (places + 1))
            with pytest.raises(InvalidArgumentError, match="prompt_log_probs of"):
                SessionRequest.checked(more, model, frozenset())
        started = draft_pb2.Started(prompt_ids=[2**32 - 1] * places, prompt_log_probs=[-1.0] * places)
        started.prompt_top_log_probs.token_ids.extend([2**32 - 1] * places * top)
        started.prompt_top_log_probs.log_probs.extend([-1.0] * places * top)
        assert started.ByteSize() < 3 * 2**20


# Resuming elsewhere


def test_what_came_is_not_asked_for_again(pair: Pair) -> None:
    """A completion with tokens has the log-probabilities already; a completion without a token has none yet."""
    with grpc.insecure_channel(pair.services.draft_address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]

        def resumed(token_ids: list[int]) -> draft_pb2.GenerateResponse:
            request = draft_pb2.GenerateRequest(
                token_ids=draft_pb2.TokenIds(ids=[5, 6, 7]), max_new_tokens=4, ignore_eos=True, **ASKING
            )
            request.resume.CopyFrom(draft_pb2.Resume(token_ids=token_ids))
            response: draft_pb2.GenerateResponse = next(iter(stub.Generate(request, timeout=10.0)))
            return response

        first = resumed([])
        assert len(first.started.prompt_log_probs) == 2
        assert len(first.started.prompt_top_log_probs.token_ids) == 2 * TOP
        again = resumed(list(first.token_ids))
        assert not again.started.prompt_log_probs
        assert len(again.top_log_probs.token_ids) == TOP * len(again.token_ids) > 0


def test_a_session_that_goes_on_has_no_prompt_log_probs(pair: Pair) -> None:
    code, details = opening(pair, generated=1, prompt_log_probs=True)
    assert (code, "a resumed session has no prompt_log_probs" in details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        True,
    )
