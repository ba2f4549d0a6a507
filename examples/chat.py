"""A chat in the terminal, through OpenAI's client: `python examples/chat.py [URL]`.

It needs a model with a chat template:

    dynatree serve --target-model HuggingFaceTB/SmolLM2-1.7B-Instruct --draft-model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import sys
from contextlib import suppress

from openai import OpenAI

URL = sys.argv[1] if sys.argv[1:] else "http://localhost:8000/v1"

with OpenAI(base_url=URL, api_key="not-needed") as client, suppress(EOFError, KeyboardInterrupt):
    model = client.models.list().data[0].id
    messages = [{"role": "system", "content": "Answer in one or two sentences."}]
    print(f"You are talking to {model}; an empty line ends the chat.")
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=200, temperature=0, stream=True
        )
        answer = ""
        for chunk in stream:
            part = chunk.choices[0].delta.content or ""
            print(part, end="", flush=True)
            answer += part
        print()
        messages.append({"role": "assistant", "content": answer})
