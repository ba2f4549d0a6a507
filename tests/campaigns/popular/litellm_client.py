"""litellm: two-turn chats, streams assembled by its own builder, and text completions."""

import asyncio
import os

import litellm

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
