"""openai for Python: two-turn chats in each form of the answer, streams, completions, retries and defaults."""

import asyncio
import os

from openai import AsyncOpenAI, OpenAI

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
