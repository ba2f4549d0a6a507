"""A model that calls a function, through OpenAI's client: `python examples/tools.py [URL]`.

The model asks for the weather, the program looks it up, and the model answers from the result. It needs a model with a
chat template; `tool_choice="required"` makes the first answer a call, whatever the model would have said.
"""

import json
import sys

from openai import OpenAI

URL = sys.argv[1] if sys.argv[1:] else "http://localhost:8000/v1"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town, today.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def weather(town: str) -> dict[str, object]:
    """Stand in for a service that knows the weather."""
    return {"town": town, "celsius": {"Oslo": 4, "Rome": 21}[town]}


with OpenAI(base_url=URL, api_key="not-needed") as client:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Do I need a coat in Oslo?"}]
    asked = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=100
    )
    message = asked.choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=60
    )
    print(answer.choices[0].message.content)
