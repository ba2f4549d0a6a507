"""Tests how the client's options appear in the request, and which values are refused."""

import json
from typing import Any, get_args

import grpc
import pytest

from dynatree.client import Client, InvalidRequestError, SamplingScheme
from dynatree.v1 import tree_pb2
from tests.support.fake_draft_service import FakeDraftService, client_fixture, last, service_fixture  # noqa: F401

# Requests


def test_defaults_leave_optional_fields_out(client: Client, service: FakeDraftService) -> None:
    client.generate("Once")
    (request,) = service.requests
    assert request.text == "Once"
    assert not any(request.HasField(name) for name in ("max_new_tokens", "policy"))
    sampling = request.sampling
    assert not any(sampling.HasField(name) for name in ("top_p", "seed", "repetition_penalty"))
    assert (sampling.min_p, sampling.scheme, len(sampling.logit_bias)) == (0.0, 0, 0)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.0, 0.0)
    assert (request.n, request.log_probs, request.trace, len(request.stop_token_ids)) == (1, False, False, 0)
    assert (request.top_log_probs, request.prompt_log_probs, request.HasField("store")) == (0, False, False)


def test_every_option_reaches_the_server(client: Client, service: FakeDraftService) -> None:
    client.generate(
        [5, 0, 2**32 - 1],
        max_new_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-0.75,
        presence_penalty=2,
        logit_bias={0: -2, 2**32 - 1: 0.5},
        seed=2**64 - 1,
        scheme="residual",
        stop=["a", "b"],
        stop_token_ids=[9, 2**32 - 1],
        ignore_eos=True,
        log_probs=True,
        top_log_probs=5,
        prompt_log_probs=True,
        trace=True,
        policy="linear",
        policy_settings={"depth": 8, "widths": (1, 1, 3), "rates": [], "root": "single"},
        store=False,
    )
    (request,) = service.requests
    assert list(request.token_ids.ids) == [5, 0, 2**32 - 1]
    assert request.max_new_tokens == 7
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.75, 2**64 - 1)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.75, 2.0)
    assert dict(sampling.logit_bias) == {0: -2.0, 2**32 - 1: 0.5}
    assert sampling.scheme == tree_pb2.SAMPLING_SCHEME_RESIDUAL
    assert (list(request.stop), request.ignore_eos) == (["a", "b"], True)
    assert list(request.stop_token_ids) == [9, 2**32 - 1]
    assert (request.log_probs, request.trace) == (True, True)
    assert (request.top_log_probs, request.prompt_log_probs) == (5, True)
    assert (request.policy.name, dict(request.policy.settings)) == ("linear", {"depth": 8.0})
    lists = {name: list(numbers.values) for name, numbers in request.policy.list_settings.items()}
    assert lists == {"widths": [1.0, 1.0, 3.0], "rates": []}
    assert dict(request.policy.word_settings) == {"root": "single"}
    assert (request.HasField("store"), request.store) == (True, False)


def test_what_the_server_defines_is_sent_as_it_is(client: Client, service: FakeDraftService) -> None:
    client.generate(
        [],
        max_new_tokens=0,
        temperature=-1.0,
        top_p=7.0,
        min_p=-2.0,
        repetition_penalty=0,
        logit_bias={1: 1e6, 2: float("inf")},
        seed=0,
        n=0,
        stop="END",
        policy_settings={"depth": 2},
    )
    (request,) = service.requests
    assert request.WhichOneof("prompt") == "token_ids"
    assert request.HasField("max_new_tokens")
    assert request.sampling.HasField("seed")
    assert (request.sampling.temperature, request.sampling.top_p) == (-1.0, 7.0)
    assert request.sampling.HasField("repetition_penalty")
    assert (request.sampling.min_p, request.sampling.repetition_penalty) == (-2.0, 0.0)
    assert dict(request.sampling.logit_bias) == {1: 1e6, 2: float("inf")}
    assert request.HasField("n")
    assert request.n == 0
    assert list(request.stop) == ["END"]
    assert request.policy.name == ""


def test_the_number_of_completions_reaches_the_server(client: Client, service: FakeDraftService) -> None:
    service.script = [last(index=index) for index in range(3)]
    client.generate("Once", n=3)
    assert service.requests[0].n == 3


@pytest.mark.parametrize("scheme", get_args(SamplingScheme))
def test_schemes_have_the_names_of_the_protocol(
    client: Client, service: FakeDraftService, scheme: SamplingScheme
) -> None:
    client.generate("Once", scheme=scheme)
    number = service.requests[0].sampling.scheme
    assert tree_pb2.SamplingScheme.Name(number) == f"SAMPLING_SCHEME_{scheme.upper()}"


def test_every_scheme_of_the_protocol_can_be_asked_for() -> None:
    assert len(get_args(SamplingScheme)) == len(tree_pb2.SamplingScheme.keys()) - 1  # all but UNSPECIFIED


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([True], {}, "prompt: a token id"),
        ([-1], {}, "prompt: a token id"),
        ([2**32], {}, "prompt: a token id"),
        ("\udcff", {}, "prompt"),
        ("Once", {"max_new_tokens": -1}, "max_new_tokens"),
        ("Once", {"max_new_tokens": 2**32}, "max_new_tokens"),
        ("Once", {"top_k": -1}, "top_k"),
        ("Once", {"seed": -1}, "seed"),
        ("Once", {"seed": 2**64}, "seed"),
        ("Once", {"temperature": 1e-60}, "temperature"),
        ("Once", {"top_p": 10**400}, "top_p"),
        ("Once", {"min_p": 1e-60}, "min_p 1e-60 is too small"),
        ("Once", {"repetition_penalty": 1e-60}, "repetition_penalty 1e-60 is too small"),
        ("Once", {"frequency_penalty": -1e-60}, "frequency_penalty -1e-60 is too small"),
        ("Once", {"presence_penalty": 1e-60}, "presence_penalty 1e-60 is too small"),
        ("Once", {"logit_bias": {-1: 1.0}}, "logit_bias: a token id"),
        ("Once", {"logit_bias": {2**32: 1.0}}, "logit_bias: a token id"),
        ("Once", {"logit_bias": {1: 10**400}}, "logit_bias"),
        ("Once", {"stop_token_ids": [-1]}, "stop_token_ids: a token id"),
        ("Once", {"stop_token_ids": [2**32]}, "stop_token_ids: a token id"),
        ("Once", {"n": -1}, "n must be between"),
        ("Once", {"n": True}, "n must be an integer"),
        ("Once", {"scheme": "Gumbel"}, "scheme must be one of gumbel, independent, residual, not 'Gumbel'"),
        ("Once", {"scheme": ""}, "scheme must be one of"),
    ],
)
def test_values_that_cannot_be_sent(client: Client, prompt: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"invalid request: {said}") as caught:
        client.generate(prompt, **options)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_constraints_and_functions_reach_the_server(client: Client, service: FakeDraftService) -> None:
    schema, tool, call = {"const": "Łódź"}, {"type": "function", "function": {"name": "f"}}, {"function": {"name": "f"}}
    answered = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    result = {"role": "tool", "content": "3", "tool_call_id": "a1", "name": "f"}
    client.generate([answered, result], tools=[tool], json_schema=schema)
    client.generate("Once", json_schema='{"const": 1}')
    client.generate("Once", regex="a+")
    client.generate("Once", grammar='start: "a"')

    chat = service.requests[0].chat
    assert json.loads(chat.tools) == [tool]
    assert json.loads(chat.messages[0].tool_calls) == [call, call]
    assert (chat.messages[1].tool_call_id, chat.messages[1].name, chat.messages[1].tool_calls) == ("a1", "f", "")
    assert [(each.grammar.kind, each.grammar.text) for each in service.requests] == [
        (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, '{"const": "Łódź"}'),
        (tree_pb2.GRAMMAR_KIND_JSON_SCHEMA, '{"const": 1}'),
        (tree_pb2.GRAMMAR_KIND_REGEX, "a+"),
        (tree_pb2.GRAMMAR_KIND_LARK, 'start: "a"'),
    ]


CHAT: Any = [{"role": "user", "content": "Hi"}]
HALF: Any = [{"role": "assistant", "content": "", "tool_calls": [{"name": "\ud800"}]}]


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("Once", {"regex": "a", "grammar": "b"}, "regex and grammar are set"),
        ("Once", {"json_schema": {}, "regex": ""}, "json_schema and regex are set"),
        ("Once", {"tools": [{}]}, "tools are for chats"),
        ("Once", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs are for chats"),
        (CHAT, {"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs is not valid Unicode"),
        ("Once", {"regex": "\ud800"}, "regex is not valid Unicode"),
        ("Once", {"json_schema": {"const": "\ud800"}}, "json_schema is not valid Unicode"),
        (CHAT, {"tools": [{"name": "\ud800"}]}, "tools is not valid Unicode"),
        (HALF, {}, r"prompt\[0\]: tool_calls is not valid Unicode"),
    ],
)
def test_constraints_and_functions_that_cannot_be_sent(
    client: Client, prompt: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"invalid request: {said}"):
        client.generate(prompt, **options)


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("Once", {"json_schema": 5}, "json_schema must be a mapping or a str, not int"),
        ("Once", {"json_schema": {"const": {5}}}, "json_schema cannot be written as JSON"),
        ("Once", {"regex": b"a"}, "regex must be a str"),
        ("Once", {"grammar": ["a"]}, "grammar must be a str"),
        (CHAT, {"tools": {"name": "f"}}, "tools must be a sequence of mappings, not dict"),
        (CHAT, {"tools": "f"}, "tools must be a sequence of mappings, not str"),
        (CHAT, {"tools": [{}, "f"]}, r"tools\[1\] must be a mapping, not str"),
        ([{**CHAT[0], "tool_calls": None}], {}, r"prompt\[0\]: tool_calls must be a sequence"),
        ([{**CHAT[0], "tool_call_id": 5}], {}, r"prompt\[0\]: tool_call_id must be a str"),
        ([{**CHAT[0], "id": "a"}], {}, "must be a mapping with role and content, and optionally name, tool_calls"),
    ],
)
def test_constraints_and_functions_of_wrong_types(
    client: Client, prompt: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        client.generate(prompt, **options)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (b"Once", {}),
        (None, {}),
        ([1.0], {}),
        (["1"], {}),
        ("Once", {"temperature": "hot"}),
        ("Once", {"temperature": True}),
        ("Once", {"top_k": 1.5}),
        ("Once", {"ignore_eos": "no"}),
        ("Once", {"log_probs": 1}),
        ("Once", {"top_log_probs": 1.0}),
        ("Once", {"prompt_log_probs": 1}),
        ("Once", {"trace": "file"}),
        ("Once", {"min_p": None}),
        ("Once", {"repetition_penalty": "much"}),
        ("Once", {"frequency_penalty": None}),
        ("Once", {"presence_penalty": "much"}),
        ("Once", {"logit_bias": [(1, 2.0)]}),
        ("Once", {"logit_bias": {"1": 2.0}}),
        ("Once", {"logit_bias": {1: "2"}}),
        ("Once", {"scheme": tree_pb2.SAMPLING_SCHEME_GUMBEL}),
        ("Once", {"n": 2.0}),
        ("Once", {"stop_token_ids": 7}),
        ("Once", {"stop_token_ids": "7"}),
        ("Once", {"stop_token_ids": b"7"}),
        ("Once", {"stop": [b"END"]}),
        ("Once", {"policy": 3}),
        ("Once", {"stop": 5}),
        ("Once", {"stop": b"END"}),
        ("Once", {"policy_settings": 5}),
        ("Once", {"policy_settings": "depth"}),
        ("Once", {"policy_settings": {5: 1.0}}),
        ("Once", {"policy_settings": {"depth": None}}),
        ("Once", {"policy_settings": {"depth": True}}),
        ("Once", {"policy_settings": {"widths": {1, 2}}}),
        ("Once", {"policy_settings": {"widths": [1, "1"]}}),
        ("Once", {"policy_settings": {"widths": b"11"}}),
    ],
)
def test_wrong_types(client: Client, prompt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options), 'prompt')}.* must be"):
        client.generate(prompt, **options)


def test_an_option_that_does_not_exist(client: Client) -> None:
    with pytest.raises(
        TypeError, match="there is no option 'temprature'; the options are max_new_tokens, temperature,"
    ):
        client.generate("Once", temprature=1.0)  # type: ignore[call-arg]


def test_a_request_too_large_for_any_server_is_refused_here(service: FakeDraftService) -> None:
    with Client(service.address) as client, pytest.raises(InvalidRequestError, match="a server takes at most"):
        client.generate("x" * 5_000_000)
    assert not service.requests
