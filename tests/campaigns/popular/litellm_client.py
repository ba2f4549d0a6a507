"""litellm: chats, streams assembled by its own builder, text completions, JSON that follows a schema, tools."""

import asyncio
import json
import os
from typing import Literal

import litellm
from pydantic import BaseModel

litellm.telemetry = False
MODEL = f"openai/{os.environ['MODEL']}"
WHERE = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "num_retries": 0}
messages = [{"role": "user", "content": "Who are you?"}]
first = litellm.completion(model=MODEL, messages=messages, max_tokens=12, **WHERE)
messages += [first.choices[0].message, {"role": "user", "content": "And who else?"}]
assert litellm.completion(model=MODEL, messages=messages, max_tokens=12, **WHERE).usage.completion_tokens
messages[1] = first.choices[0].message.model_dump()
chunks = list(
    litellm.completion(
        model=MODEL,
        messages=messages,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        **WHERE,
    )
)
whole = litellm.stream_chunk_builder(chunks, messages=messages)
messages += [whole.choices[0].message, {"role": "user", "content": "Really?"}]
assert litellm.completion(model=MODEL, messages=messages, max_tokens=8, **WHERE).choices
text = f"text-completion-openai/{os.environ['MODEL']}"
assert litellm.text_completion(model=text, prompt="Once upon a time", max_tokens=8, **WHERE).choices[0].text


async def several() -> None:
    asked = [litellm.acompletion(model=MODEL, messages=messages[:1], max_tokens=4, **WHERE) for _ in range(4)]
    assert len(await asyncio.gather(*asked)) == 4


asyncio.run(several())


class Town(BaseModel):
    name: Literal["Oslo", "Rome"]
    harbour: bool


described = litellm.completion(model=MODEL, messages=messages[:1], response_format=Town, max_tokens=200, **WHERE)
assert Town.model_validate_json(described.choices[0].message.content)
parameters = Town.model_json_schema() | {"additionalProperties": False}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "visit", "description": "", "parameters": parameters}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
}
history = messages[:1]
for stream in (False, True, False):
    answer = litellm.completion(model=MODEL, messages=history, stream=stream, **TOOLS, **WHERE)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=history)
    message = answer.choices[0].message
    [call] = message.tool_calls
    assert Town.model_validate(json.loads(call.function.arguments))
    assert answer.choices[0].finish_reason == "tool_calls", answer
    history += [message, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
free = {**TOOLS, "tool_choice": "auto", "max_tokens": 8}
assert litellm.completion(model=MODEL, messages=history, **free, **WHERE).choices
