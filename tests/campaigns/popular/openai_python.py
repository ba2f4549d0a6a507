"""openai for Python: chats in each form of the answer, streams, completions, parsed answers, calls of functions."""

import asyncio
import json
import os
from typing import Annotated, Literal

from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
MORE = {"role": "user", "content": "And who else?"}
client = OpenAI(max_retries=0)

assert MODEL in [each.id for each in client.models.list()]
assert client.models.retrieve(MODEL).id == MODEL
first = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12)
message = first.choices[0].message
for form in (message, message.model_dump(), message.to_dict(), message.model_dump(exclude_none=True)):
    assert client.chat.completions.create(model=MODEL, messages=[*CHAT, form, MORE], max_completion_tokens=12).choices
client.chat.completions.create(
    model=MODEL,
    messages=[*CHAT, {"role": "assistant", "content": "Me"}, {"role": "user", "content": "Who?", "name": "anna"}],
    max_tokens=8,
    tools=[],
    tool_choice="none",
    parallel_tool_calls=True,
    store=False,
    metadata={"run": "1"},
    service_tier="auto",
    modalities=["text"],
    response_format={"type": "text"},
    frequency_penalty=0,
    presence_penalty=0,
    stop=[],
    user="Zoë",
    logprobs=False,
    top_logprobs=0,
    n=1,
    seed=7,
)
text, usage = "", None
for chunk in client.chat.completions.create(
    model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}, max_tokens=12
):
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = chunk.usage or usage
assert text
assert usage is not None
with client.chat.completions.stream(model=MODEL, messages=CHAT, max_tokens=12) as stream:
    stream.until_done()
    answer = stream.current_completion_snapshot.choices[0].message
assert client.chat.completions.create(model=MODEL, messages=[*CHAT, answer, MORE], max_tokens=8).choices
assert client.completions.create(model=MODEL, prompt="Once upon a time").usage.completion_tokens == 16
assert "".join(chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="Once", stream=True))


async def several() -> None:
    async with AsyncOpenAI() as aclient:
        asked = [aclient.completions.create(model=MODEL, prompt=f"{n}, {n + 1}, ", max_tokens=8) for n in range(8)]
        assert all(answer.choices for answer in await asyncio.gather(*asked))


asyncio.run(several())


class Town(BaseModel):
    name: Literal["Oslo", "Rome"]
    harbours: Annotated[list[Literal["old", "new"]], Field(max_length=2)]


class Weather(BaseModel):
    """Look up the weather of towns."""

    towns: Annotated[list[Town], Field(min_length=1, max_length=2)]
    day: Literal["today", "tomorrow"]


# parsed answers
parsed = client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Town, max_tokens=200)
town = parsed.choices[0].message
assert isinstance(town.parsed, Town), town
for form in (town, town.model_dump(warnings=False)):
    assert client.chat.completions.create(model=MODEL, messages=[*CHAT, form, MORE], max_tokens=4).choices
with client.chat.completions.stream(model=MODEL, messages=CHAT, response_format=Town, max_tokens=200) as stream:
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Town)

# calls, and their results
FUNCTIONS = {"tools": [pydantic_function_tool(Weather)], "max_tokens": 400}
ONE = {**FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False}
history = [*CHAT]
for _ in range(2):
    choice = client.chat.completions.parse(model=MODEL, messages=history, **ONE).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"sun": true}'}]
assert client.chat.completions.create(model=MODEL, messages=history, **FUNCTIONS | {"max_tokens": 8}).choices
with client.chat.completions.stream(model=MODEL, messages=CHAT, **ONE) as stream:
    done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    final = stream.get_final_completion().choices[0]
assert [json.loads(event.arguments) for event in done] == [json.loads(final.message.tool_calls[0].function.arguments)]
assert final.finish_reason == "tool_calls"
result = {"role": "tool", "tool_call_id": final.message.tool_calls[0].id, "content": "sun"}
assert client.chat.completions.create(model=MODEL, messages=[*CHAT, final.message, result], max_tokens=4).choices
named = {"type": "function", "function": {"name": "Weather"}}
several = client.chat.completions.create(model=MODEL, messages=CHAT, **FUNCTIONS, tool_choice=named, n=2).choices
assert [len(each.message.tool_calls) for each in several] == [1, 1]
