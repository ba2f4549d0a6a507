"""Fields of a request that cannot change its answer.

Clients send all fields of OpenAI's API with their defaults, and send the server's answers back as messages of the next
request. So a field without effect is ignored, at every depth, whether this server supports the field or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

# Labels, hints and permissions: the answer is the same for every value.
LABELS = frozenset(
    (
        *("metadata", "request_id", "safety_identifier", "service_tier"),
        *("cache_control", "prompt_cache_breakpoint", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "prediction", "include_obfuscation", "spaces_between_special_tokens"),
        *("parallel_tool_calls", "guided_decoding_backend"),
        *("cache_prompt", "id_slot", "timings_per_token", "return_progress"),  # llama.cpp's
        *("cache_salt", "keep_alive"),  # vLLM's and Ollama's
        *("parsed", "parsed_arguments"),  # OpenAI's client adds them to answers
    )
)
# Values without effect in a field that this server does not support, besides null and empty values.
_NOTHING: tuple[Any, ...] = (False, 0, "none", "auto")
# Exceptions: field -> its values without effect, besides null.
_OWN: dict[str, tuple[Any, ...]] = {
    "add_bos_token": (),
    "best_of": (1,),
    "detokenize": (True,),
    "do_sample": (True,),  # false asks for greedy decoding
    "enable_thinking": (),  # chat templates read it, and false is not the default of each
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "max_new_tokens": (),
    "modalities": (["text"],),
    "model": ("",),
    "n": (1,),
    "n_predict": (),
    "prompt_logprobs": (),  # 0 asks for the prompt's own tokens
    "reasoning": (),
    "reasoning_budget": (),  # 0 asks for no reasoning, as in the other fields of budgets
    "reasoning_effort": ("medium",),  # OpenAI's default; "none" asks for no reasoning
    "repeat_penalty": (1,),
    "seed": (-1,),  # random, as in vLLM and llama.cpp
    "skip_special_tokens": (True,),
    "stop": ("",),
    "think": (),
    "thinking": (),
    "thinking_budget": (),
    "thinking_budget_tokens": (),
    "thinking_token_budget": (),
    "tool_choice": ({},),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "verbosity": ("medium",),  # OpenAI's default
}


class Body(BaseModel):
    """An object of a request's body, which refuses an unknown field by its name unless the field has no effect.

    Attributes:
        no_effect: Further values without effect in this object's fields.
    """

    no_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _what_has_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        refused = False
        for name, value in body.items():
            known = name in fields
            no_effect = has_no_effect(name, value, known) or _is_one_of(value, cls.no_effect.get(name, ()))
            if (refused and not known) or no_effect:
                continue  # one refused field is enough: errors for a million fields would take seconds
            refused = refused or not known
            kept[name] = value
        return kept

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the fields' schemas, extended by the values without effect."""
        described = handler(schema)
        whole = handler.resolve_ref_schema(described)
        for name, field in whole["properties"].items():
            if name not in whole.get("required", ()):
                values = (None, *_OWN.get(name, ()), *cls.no_effect.get(name, ()))
                whole["properties"][name] = {"anyOf": [field, {"enum": [*values]}]}
        return described


def has_no_effect(name: str, value: Any, known: bool) -> bool:
    """Whether a field has no effect, so that it can be ignored.

    Args:
        name: The field's name.
        value: The field's value.
        known: Whether the object supports the field; it then checks the value itself, unless that is null.
    """
    if value is None or _is_one_of(value, _OWN.get(name, () if known else _NOTHING)):
        return True
    return not known and (name in LABELS or _is_empty(value))


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether `value` equals one of `values`, with true distinct from 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _is_empty(value: Any) -> bool:
    """Whether a value is an empty string, an empty list, or an object whose fields are all null or empty."""
    if isinstance(value, dict):
        return all(each is None or _is_empty(each) for each in value.values())
    return value in ("", [])
