"""The fields that limit what an answer may be: OpenAI's `response_format`, and vLLM's fields of the same purpose."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dynatree.client import GenerateOptions
from dynatree.gateway.errors import at_odds
from dynatree.gateway.no_effect import Body

MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}

Schema = dict[str, Any]


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object, or JSON that follows the schema of llama-cpp-python, Fireworks and Together."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(None, alias="schema")


class NamedSchema(Body):
    """A JSON schema with its name, description and strictness, which change nothing: every schema is followed."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _of_text(body: Any) -> Any:
    """Return a format without a type and without other values as that of any text."""
    return {"type": "text"} if isinstance(body, dict) and not any(body.values()) else body


Format = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type"), BeforeValidator(_of_text)
]


class StructuredOutputs(Body):
    """VLLM's `structured_outputs`: one of its fields says what the answer may be.

    Attributes:
        json_: A JSON schema, as an object or as text.
        regex: A regular expression for the whole answer, in the syntax of Rust's regex crate.
        choice: The answers to choose from.
        grammar: A Lark grammar in llguidance's dialect.
        json_object: Whether the answer is any JSON object.
    """

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraints(self) -> dict[str, GenerateOptions]:
        """The constraints that the fields name, by field."""
        found = _all("structured_outputs.", self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            found["structured_outputs.json_object"] = GenerateOptions(json_schema=ANY_OBJECT)
        return found


class Structured(Body):
    """The fields of a request that limit what its answers may be; at most one constraint may be set.

    Attributes:
        response_format: OpenAI's form: any text, any JSON object, or JSON that follows a schema.
        structured_outputs: vLLM's form.
        guided_json: vLLM's older name of `structured_outputs.json`; the next three are of the same kind.
        guided_regex: See `structured_outputs.regex`.
        guided_choice: See `structured_outputs.choice`.
        guided_grammar: See `structured_outputs.grammar`.
    """

    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _one_constraint(self) -> Structured:
        fields = [*self._constraints()]
        if len(fields) > 1:
            raise at_odds(
                fields[1],
                f"several fields limit what the answer may be: {' and '.join(fields)}; expected one of "
                "response_format, structured_outputs, guided_json, guided_regex, guided_choice and guided_grammar, "
                "with one constraint",
            )
        return self

    @property
    def format_schema(self) -> Schema | None:
        """The schema that `response_format` asks for; None if it allows any text."""
        if isinstance(self.response_format, JsonObjectFormat):
            return self.response_format.schema_ or ANY_OBJECT
        if isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.schema_
            return ANY_OBJECT if schema is None else schema
        return None

    @property
    def constraint(self) -> GenerateOptions:
        """The client library's option for the constraint; empty if any text is allowed."""
        return next(iter(self._constraints().values()), GenerateOptions())

    @property
    def constraint_field(self) -> str | None:
        """The field that limits the answer."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> dict[str, GenerateOptions]:
        found: dict[str, GenerateOptions] = {}
        if (schema := self.format_schema) is not None:
            found["response_format"] = GenerateOptions(json_schema=schema)
        if self.structured_outputs is not None:
            found |= self.structured_outputs.constraints()
        return found | _all("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)


def _all(
    prefix: str, schema: Schema | str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, GenerateOptions]:
    found: dict[str, GenerateOptions] = {}
    if schema is not None:
        found["json"] = GenerateOptions(json_schema=schema)
    if regex is not None:
        found["regex"] = GenerateOptions(regex=regex)
    if choice is not None:
        answers = " | ".join(json.dumps(each, ensure_ascii=False) for each in choice)
        answers = answers.replace("\x7f", "\\u007f")  # which Lark's strings cannot have, other than JSON's
        found["choice"] = GenerateOptions(grammar=f"start: {answers}")
    if grammar is not None:
        found["grammar"] = GenerateOptions(grammar=grammar)
    return {prefix + name: option for name, option in found.items()}
