"""Completions under a grammar through both services: valid, and the tokens of masked plain decoding."""

import json
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from shutil import copytree
from threading import Barrier, current_thread

import grpc
import jsonschema_rs
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from dynatree.client import Client, InvalidRequestError
from dynatree.client._request import build_request
from dynatree.common.grammar import Grammar, GrammarKind
from dynatree.draft.policies import policy_names, residual_policies
from dynatree.draft.policies.throughput import Throughput
from dynatree.engine.grammar import compiler
from dynatree.engine.grammar.compiler import _source
from dynatree.engine.grammar.state import GrammarState
from dynatree.v1 import draft_pb2_grpc, tree_pb2
from tests.support.model_zoo import save_noisy_copy, save_random_model
from tests.support.services import running_services

pytestmark = pytest.mark.early
PLAIN = "autoregressive"


def an_object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TOWN = an_object(name={"enum": ["Oslo", "Rome", "Łódź"]}, size={"type": "integer", "minimum": 3, "maximum": 250})
DEEP = an_object(a=an_object(b=an_object(c=an_object(d=an_object(e={"type": "boolean"})))))
LIST = {"type": "array", "items": {"enum": [1, "two", None, True]}, "minItems": 2, "maxItems": 4}
TREE = {
    "$defs": {
        "node": an_object(
            on={"type": "boolean"}, to={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
        )
    },
    "$ref": "#/$defs/node",
}
CHOICE = {"anyOf": [TOWN, {"type": "string", "pattern": "^[a-f]{2,6}$"}, {"type": "null"}]}
KEYS = an_object(**{"größe": {"type": "number", "multipleOf": 1, "minimum": -9, "maximum": 9}, "雨": {"const": "☂ ok"}})
SCHEMAS = (TOWN, DEEP, LIST, TREE, CHOICE, KEYS)

REGEX, LARK = r"(yes|no|[A-Z]{3}-[0-9]{2,4})", 'start: "if " NAME " then " ("go" | "stop")\nNAME: /[a-z]{1,8}/'
GRAMMARS = ({"json_schema": schema} for schema in SCHEMAS)
GRAMMARS = (*GRAMMARS, {"regex": REGEX}, {"grammar": LARK})
SAMPLINGS = ({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "seed": 6})
PENALISED = {
    "temperature": 0.7,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {7: 1000.0},
    "seed": 7,
}
TOKENS = 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammars")
    target = save_random_model(folder / "target", "gpt_neox", 1)
    draft = save_noisy_copy(folder / "draft", target, 2, noise=0.03)
    with (
        running_services(folder, target, draft, dtype="float32", sessions=8) as services,
        Client(services.draft_address) as client,
    ):
        yield client, target, services


def cases(count):
    """Prompts with a grammar and sampling options."""
    chooser = random.Random(3)
    samplings = cycle((*SAMPLINGS, PENALISED))
    for grammar in [*GRAMMARS][:count]:
        yield {"prompt": chooser.choices(range(2, 2048), k=chooser.randint(1, 20)), **grammar, **next(samplings)}


def is_valid(completion, case):
    """Whether a text that ended is one that the grammar accepts."""
    assert completion.finish_reason == "stop"
    if "json_schema" in case:
        jsonschema_rs.validate(case["json_schema"], json.loads(completion.text))
    return True


def some(names, short):
    """Parameters for all of these policies; `make test` runs the `short` ones."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names if name != PLAIN]


@pytest.fixture(scope="module")
def plain_completions(pair):
    """The completions of plain decoding for the cases with which every policy is compared."""
    return [pair[0].generate(**case, max_new_tokens=TOKENS, policy=PLAIN) for case in cases(8)]


@pytest.mark.parametrize("policy", some(policy_names(), ("throughput", "dynatree", "ngram", "sequoia")))
def test_trees_change_no_token_under_a_grammar(pair, plain_completions, policy):
    client, _, _ = pair
    accepted = 0
    for case, plain in zip(cases(8), plain_completions, strict=True):
        tree = client.generate(**case, max_new_tokens=TOKENS, policy=policy)
        assert tree.token_ids == plain.token_ids, case
        assert tree.text == plain.text
        assert tree.finish_reason == "length" or is_valid(tree, case)
        accepted += tree.stats.draft_n_accepted
    assert accepted > 0


@pytest.mark.parametrize("policy", some(residual_policies(), ("dyspec",)))
def test_residual_sampling_under_a_grammar_gives_valid_texts(pair, policy):
    client, _, _ = pair
    ended = 0
    for seed, grammar in enumerate(GRAMMARS):
        case = {"prompt": [seed + 5] * 4, **grammar, "temperature": 1.0, "seed": seed, "scheme": "residual"}
        completion = client.generate(**case, max_new_tokens=TOKENS, policy=policy)
        ended += completion.finish_reason == "stop" and is_valid(completion, case)
    assert ended > len(GRAMMARS) / 2


def told(client, **case):
    """The tokens that a stream tells, and the error that ends it, if any."""
    tokens, error = [], ""
    try:
        for chunk in client.stream(**case, max_new_tokens=TOKENS):
            tokens += chunk.token_ids
    except InvalidRequestError as failure:
        error = failure.details.split(" (request")[0]
    return tokens, error


def test_states_that_fail_change_neither_tokens_nor_errors(pair, monkeypatch):
    """A limit that a drafted node reaches matters only if the completion reaches it, and there as without trees."""
    client, _, _ = pair
    after, reason = GrammarState.after, "the grammar cannot be followed further: a limit"

    def failing(state, token):
        following = after(state, token)
        if following is not None and token % 23 == 4:
            following._bits, following._reason = b"", reason
        return following

    monkeypatch.setattr(GrammarState, "after", failing)
    errors = []
    wide = [{"prompt": [9 + each], "regex": "[a-z ]{3,20}", "temperature": 1.0, "seed": each} for each in range(4)]
    for case in (*cases(4), *wide):
        plain = told(client, **case, policy=PLAIN)
        errors.append(plain[1])
        for policy in ("throughput", "dynatree"):
            assert told(client, **case, policy=policy) == plain, (policy, case)
        residual = {**case, "temperature": 1.0, "seed": 3, "scheme": "residual", "policy": "dyspec"}
        assert told(client, **residual)[1] in ("", reason)
    assert {*errors} == {"", reason}


class Masks(LogitsProcessor):
    """Masks by llguidance's own reading of a tokenizer, apart from everything of this project."""

    def __init__(self, grammar, tokenizer, start):
        self._matcher, self._read = LLMatcher(from_tokenizer(tokenizer), grammar), start

    def __call__(self, token_ids, scores):
        for token in token_ids[0, self._read :].tolist():
            assert self._matcher.consume_token(token)
        self._read = token_ids.shape[1]
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=scores.shape[1], bitorder="little").astype(bool)
        return scores.masked_fill(torch.from_numpy(~allowed), -torch.inf)


def test_greedy_tokens_are_those_of_generate_with_masks(pair):
    client, target, _ = pair
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    for place, schema in enumerate(SCHEMAS):
        prompt = [place + 7, 11, 13]
        masks = Masks(_source(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))), tokenizer, len(prompt))
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, logits_processor=LogitsProcessorList([masks])
        )
        completion = client.generate(prompt, max_new_tokens=40, json_schema=schema)
        assert list(completion.token_ids) == found[0, len(prompt) :].tolist()


def test_no_completion_waits_for_the_vocabulary(pair, tmp_path, monkeypatch):
    """Both services read it at their start, on other threads."""
    _, target, _ = pair
    threads, both = [], Barrier(3)
    read = compiler._tokens_of

    def reading(*arguments):
        threads.append(current_thread().name)
        both.wait(60)
        return read(*arguments)

    monkeypatch.setattr(compiler, "_tokens_of", reading)
    with running_services(tmp_path, target, target, dtype="float32") as services:
        both.wait(60)
        with Client(services.draft_address) as client:
            assert client.generate([5], regex="ab").text == "ab"
    assert threads == ["grammar tokens"] * 2


def test_without_a_draft_model_forced_tokens_are_drafted(pair, tmp_path):
    client, target, _ = pair
    with (
        running_services(tmp_path, target, None, dtype="float32") as services,
        Client(services.draft_address) as alone,
    ):
        for case in cases(6):
            plain = client.generate(**case, max_new_tokens=TOKENS, policy=PLAIN)
            for policy in ("throughput", "ngram"):
                completion = alone.generate(**case, max_new_tokens=TOKENS, policy=policy)
                assert completion.token_ids == plain.token_ids
        completion = alone.generate([5], json_schema=DEEP, max_new_tokens=TOKENS)
        assert completion.stats.draft_n_accepted >= 10  # the keys and brackets around one boolean


def test_trees_change_no_token_where_the_device_decides(pair, tmp_path):
    """There all rows of a tree are masked at once, before one choice after all of them."""
    _, target, _ = pair
    draft = save_noisy_copy(tmp_path / "draft", target, 2, noise=0.03)
    with (
        running_services(tmp_path, target, draft, dtype="float32", fixed_rows=(32,)) as services,
        Client(services.draft_address) as client,
    ):
        assert services.target.decider is not None
        accepted = 0
        for case in cases(8):
            plain = client.generate(**case, max_new_tokens=TOKENS, policy=PLAIN)
            tree = client.generate(**case, max_new_tokens=TOKENS, policy="dynatree")
            assert tree.token_ids == plain.token_ids, case
            assert tree.finish_reason == "length" or is_valid(tree, case)
            accepted += tree.stats.draft_n_accepted
        assert accepted > 0


def test_a_forced_run_takes_no_draft_forward(pair, monkeypatch):
    client, _, services = pair
    forwards, forward = [], services.draft.forward
    monkeypatch.setattr(services.draft, "forward", lambda segments: forwards.append(segments) or forward(segments))
    monkeypatch.setattr(Throughput, "reads_prompt", lambda *_: True)  # which depends on the times of other tests
    for policy in ("linear", "fixed", "dynatree", "throughput"):
        forwards.clear()
        completion = client.generate([5], json_schema={"const": "x" * 40}, max_new_tokens=TOKENS, policy=policy)
        assert completion.text == json.dumps("x" * 40)
        assert completion.stats.draft_n_accepted > 0
        assert len(forwards) == 1, policy  # the prefill, which the target's first token does not wait for


def test_a_resumed_completion_continues_its_grammar(pair):
    client, _, services = pair
    for case in ({"json_schema": TOWN}, {"json_schema": LIST, "temperature": 0.9, "seed": 4}):
        whole = client.generate([9, 8], **case, max_new_tokens=TOKENS)
        assert whole.finish_reason == "stop"
        request = build_request([9, 8], **case, max_new_tokens=TOKENS)
        with grpc.insecure_channel(services.draft_address) as channel:
            generate = draft_pb2_grpc.DraftServiceStub(channel).Generate
            for known in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
                request.resume.token_ids[:] = whole.token_ids[:known]
                rest = [token for answer in generate(request) for token in answer.token_ids]
                assert rest == list(whole.token_ids[known:])
            request.resume.token_ids[:] = [*whole.token_ids[:2], whole.token_ids[0]]
            with pytest.raises(grpc.RpcError) as refused:
                list(generate(request))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_completion_is_resumed_behind_an_end_token_that_only_the_target_has(pair, tmp_path):
    """As with Gemma and Phi-3, whose chats end with another token than their tokenizers name."""
    _, target, _ = pair
    folder = copytree(target, tmp_path / "target")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [0, 2000]}))
    request = build_request([5], regex="ab", max_new_tokens=TOKENS)
    with (
        running_services(tmp_path, folder, folder, dtype="float32") as services,
        grpc.insecure_channel(services.draft_address) as channel,
    ):
        generate = draft_pb2_grpc.DraftServiceStub(channel).Generate
        whole = [token for answer in generate(request) for token in answer.token_ids]
        assert whole[-1] in (0, 2000)
        for end in (0, 2000):
            request.resume.token_ids[:] = [*whole[:-1], end]
            answers = list(generate(request))
            assert not [token for answer in answers for token in answer.token_ids]
            assert answers[-1].completion.finish_reason == tree_pb2.FINISH_REASON_STOP
        request.resume.token_ids[:] = [*whole[:-1], 1999]
        with pytest.raises(grpc.RpcError) as refused:
            list(generate(request))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_completions_and_sessions_side_by_side_keep_their_grammars(pair):
    client, _, _ = pair
    asked = [{**case, "n": 2} for case in cases(8)]
    alone = [client.generate(**each, max_new_tokens=TOKENS, policy=PLAIN) for each in asked]
    with ThreadPoolExecutor(8) as pool:
        beside = list(pool.map(lambda each: client.generate(**each, max_new_tokens=TOKENS), asked))
    for one, other in zip(alone, beside, strict=True):
        assert [each.token_ids for each in (one, *one.alternatives)] == [
            each.token_ids for each in (other, *other.alternatives)
        ]


def test_sixteen_clients_have_sixteen_grammars_at_once(pair):
    client, _, services = pair
    letters = "abcdefghijklmnop"
    asked = [{"prompt": [place + 5], "regex": f"{letter}[{letter}-z]{{9,20}}"} for place, letter in enumerate(letters)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda each: client.generate(**each, temperature=1.0, max_new_tokens=TOKENS), asked))
    for each, letter in zip(found, letters, strict=True):
        assert each.finish_reason == "stop"
        assert re.fullmatch(f"{letter}[{letter}-z]{{9,20}}", each.text)
    assert services.sessions == 0


def test_log_probs_are_those_of_the_masked_distribution(pair):
    client, _, _ = pair
    completion = client.generate([5, 6], regex="(a|b)c{3}", max_new_tokens=TOKENS, top_log_probs=5)
    first = dict(completion.top_log_probs[0])
    assert math.isclose(sum(math.exp(value) for value in first.values()), 1.0, abs_tol=1e-4)
    assert min(first.values()) == -9999.0 or len(first) == 5
    assert all(value <= 0.0 for value in completion.log_probs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": "{"}, "JSON"),
        ({"json_schema": "3"}, "not an object"),
        ({"grammar": "start: nobody"}, "nobody"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": {"description": "x" * 2**17, "type": "null"}}, "bytes"),
        ({"regex": "a", "grammar": 'start: "a"'}, "at most one"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_refused(pair, options, words):
    client, _, services = pair
    with pytest.raises(InvalidRequestError, match=words):
        client.generate([5], **options, max_new_tokens=4)
    assert services.sessions == 0
