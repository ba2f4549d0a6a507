"""The OpenAPI description of the routes: request bodies, responses and errors.

FastAPI would generate the paths. It reads bodies itself, without the deadlines and the account of memory of
`bodies.py`; so routes would go on reading their bodies here, and these would be described by hand there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from dynatree.common.version import version
from dynatree.gateway.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

FinishReason = Literal["stop", "length", "cancelled"]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDescription(_Object):
    """The error, and the field that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(_Object):
    """The body of every error."""

    error: ErrorDescription


class Health(_Object):
    """The gateway and the services behind it accept requests."""

    status: Literal["ok"]


class Model(_Object):
    """The served model; `root` is the target's own name, and the first of the policies is the default."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    draft_model: str
    policies: list[str]
    chat_template: bool


class ModelList(_Object):
    """The served model, once for each of its names."""

    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(_Object):
    """Details of the prompt's tokens; present where callers show API keys."""

    cached_tokens: int


class SpeculativeDecoding(_Object):
    """The statistics of speculative decoding over all choices."""

    mean_acceptance_length: float
    acceptance_rate: float
    rounds: int
    draft_n: int
    draft_n_accepted: int
    time_to_first_token_seconds: float
    total_seconds: float
    queue_seconds: float
    resumes: int
    seed: int


class Usage(_Object):
    """Token counts, and the statistics of speculative decoding."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    speculative_decoding: SpeculativeDecoding


class TextLogProbs(_Object):
    """Log-probabilities under the target's own softmax, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: TextLogProbs | None
    finish_reason: FinishReason | None


class TextCompletion(_Object):
    """The answer to /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class LikelyToken(_Object):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[LikelyToken]


class ChatLogProbs(_Object):
    """Log-probabilities under the target's own softmax, one entry for each token."""

    content: list[ChosenToken]
    refusal: None


class MadeFunctionCall(_Object):
    """The name and the arguments of a call."""

    name: str
    arguments: str


class MadeCall(_Object):
    """A call of a function that the answer makes."""

    id: str
    type: Literal["function"]
    function: MadeFunctionCall


class AssistantMessage(_Object):
    """The assistant's message; one with calls may lack content."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MadeCall] = []


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None
    finish_reason: FinishReason | Literal["tool_calls"]


class ChatCompletion(_Object):
    """The answer to /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Tokens(_Object):
    """The tokens of a prompt; `token_strs` are their spellings."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Object):
    """The text of a list of token ids."""

    prompt: str


class Version(_Object):
    """The gateway's version."""

    version: str


_REASONS = {
    400: "The request is invalid; the error names the field.",
    401: "The API key is neither the gateway's nor a token of the draft service.",
    403: "A proxy between the gateway and the draft service does not permit this.",
    404: "The gateway does not serve this model.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    421: "The gateway listens on loopback, and the request names another host.",
    429: "The service is busy, or the key's owner has reached a quota; Retry-After gives the time of the next attempt.",
    500: "A service failed.",
    503: "The draft service, or every verify service behind it, cannot be reached.",
    504: "The request took longer than the gateway's --timeout.",
}
_ASKED = (401, 403, 421, 500, 503, 504)
_WORK = (400, 404, 408, 413, 415, 429, *_ASKED)
# One server-sent event; its data is a chunk in the form of OpenAI's API, or [DONE].
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_REF = "#/components/schemas/{model}"
_DESCRIBED: tuple[type[BaseModel], ...] = (
    *(ErrorObject, Health, Model, ModelList, TextCompletion, ChatCompletion, Tokens, Text, Version),
    *(CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest),
)


def description() -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the routes."""
    _, schemas = models_json_schema([(model, "validation") for model in _DESCRIBED], ref_template=_REF)
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "DynaTree", "version": version()},
        "paths": {
            "/v1/completions": {
                "post": _operation(
                    "Complete one or several prompts.", TextCompletion, _WORK, CompletionRequest, streams=True
                )
            },
            "/v1/chat/completions": {
                "post": _operation("Answer a chat.", ChatCompletion, _WORK, ChatRequest, streams=True)
            },
            "/v1/models": {"get": _operation("List the served model and its policies.", ModelList, _ASKED)},
            "/v1/models/{model}": {
                "get": {**_operation("Describe the model with this name.", Model, (404, *_ASKED)), "parameters": [name]}
            },
            "/tokenize": {"post": _operation("Tokenize a prompt.", Tokens, _WORK, TokenizeRequest)},
            "/detokenize": {"post": _operation("Decode tokens to text.", Text, _WORK, DetokenizeRequest)},
            "/version": {"get": _operation("Return the gateway's version.", Version, ())},
            "/health": {"get": _operation("Check whether requests are served.", Health, (503,))},
            "/metrics": {
                "get": {
                    "summary": "Return metrics for Prometheus.",
                    "responses": {"200": {"description": "As asked.", "content": _content("text/plain")}},
                }
            },
        },
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    summary: str,
    model: type[BaseModel],
    errors: Sequence[int],
    body: type[BaseModel] | None = None,
    *,
    streams: bool = False,
) -> dict[str, Any]:
    """Describe one route; a route that streams may also answer with server-sent events."""
    content = _content("application/json", model)
    if streams:
        content |= {"text/event-stream": {"schema": _EVENT}}
    responses = {"200": {"description": "As asked.", "content": content}}
    for status in sorted(errors):
        failure = _content("application/json", ErrorObject)
        responses[str(status)] = {"description": _REASONS[status], "content": failure}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if 401 in errors:
        operation["security"] = [{"key": []}, {}]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content("application/json", body)}
    return operation


def _content(kind: str, model: type[BaseModel] | None = None) -> dict[str, Any]:
    schema = {"type": "string"} if model is None else {"$ref": _REF.format(model=model.__name__)}
    return {kind: {"schema": schema}}
