"""How the routes are described in `/openapi.json`: what they answer, and with which errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "cancelled"]


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDescription(_Object):
    """What was wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(_Object):
    """The body of every error."""

    error: ErrorDescription


class Health(_Object):
    """The gateway and the services behind it serve."""

    status: Literal["ok"]


class Model(_Object):
    """A model that is served; the first of its policies is the default."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    draft_model: str
    policies: list[str]


class ModelList(_Object):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(_Object):
    """Of the prompt's tokens."""

    cached_tokens: int


class SpeculativeDecoding(_Object):
    """What speculation was worth, over all choices."""

    mean_acceptance_length: float
    acceptance_rate: float
    rounds: int
    draft_n: int
    draft_n_accepted: int
    time_to_first_token_seconds: float
    total_seconds: float
    queue_seconds: float
    resumes: int


class Usage(_Object):
    """Tokens, and what speculation was worth."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
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
    """A token that might have stood in a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A token, and the likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogProbs(_Object):
    """Log-probabilities under the target's own softmax, one entry for each token."""

    content: list[ChosenToken]
    refusal: None


class AssistantMessage(_Object):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None
    finish_reason: FinishReason


class ChatCompletion(_Object):
    """The answer to /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


_REASONS = {
    400: "The request is wrong; the error names the field.",
    401: "The API key is no token of the draft service.",
    403: "The draft service does not let the key's owner do this.",
    404: "The model is not served.",
    405: "The path has other methods.",
    413: "The body is too long.",
    429: "There is no room, or the key's owner has had his share; Retry-After says when to try again.",
    500: "A service failed.",
    503: "The draft service, or every verify service behind it, is out of reach.",
    504: "The request took longer than the gateway's --timeout.",
}


def _answers(model: type[BaseModel] | None, *errors: int, **content: dict[str, Any]) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "As asked."}
    if model is not None:
        success["model"] = model
    if content:
        success["content"] = content
    failures = {status: {"description": _REASONS[status], "model": ErrorObject} for status in errors}
    return {"responses": {200: success, **failures}, "response_model": None}


_WORK = (400, 401, 403, 404, 413, 429, 500, 503, 504)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}

HEALTH = _answers(Health, 503)
METRICS = _answers(None, **{"text/plain": {"schema": {"type": "string"}}})
MODELS = _answers(ModelList, 401, 403, 500, 503, 504)
MODEL = _answers(Model, 401, 403, 404, 500, 503, 504)
COMPLETIONS = _answers(TextCompletion, *_WORK, **_STREAM)
CHAT = _answers(ChatCompletion, *_WORK, **_STREAM)
