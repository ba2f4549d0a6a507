"""langchain-openai: chats, streams, batches, stop strings, structured output, tools, and the older completions."""

import os
from typing import Annotated, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
chat = ChatOpenAI(model=MODEL, max_retries=0, max_tokens=12)
history = [SystemMessage("Be brief."), HumanMessage("Who are you?")]
history += [chat.invoke(history), HumanMessage("And who else?")]
assert chat.invoke(history).usage_metadata["output_tokens"] > 0
whole = None
for chunk in chat.stream(history):
    whole = chunk if whole is None else whole + chunk
assert chat.invoke([*history, whole, HumanMessage("Really?")]).content is not None
assert len(chat.batch(["One", "Two", "Three"])) == 3
assert chat.bind(stop=["e"]).invoke("Once").content is not None
assert ChatOpenAI(model=MODEL, temperature=0, stream_usage=True, max_tokens=4, logprobs=True).invoke("Hi").content
completions = OpenAI(model=MODEL, max_tokens=12)  # it sends its defaults: best_of, n, penalties
assert completions.invoke("Once upon a time")
assert "".join(completions.stream("Once upon a time"))


class Town(BaseModel):
    """A town."""

    name: Literal["Oslo", "Rome"]
    harbours: Annotated[list[Literal["old", "new"]], Field(max_length=2)]


@tool
def weather(town: Literal["Oslo", "Rome"], days: Literal[1, 2]) -> str:
    """Look up the weather of a town."""
    return f"{town} has sun for {days} days."


roomy = ChatOpenAI(model=MODEL, max_retries=0, max_tokens=300)
for method in ("json_schema", "function_calling"):
    structured = roomy.with_structured_output(Town, method=method)
    assert isinstance(structured.invoke("Describe Oslo."), Town), method
    assert isinstance(list(structured.stream("Describe Oslo."))[-1], Town), method
    raw = roomy.with_structured_output(Town, method=method, include_raw=True, strict=True).invoke("Describe Oslo.")
    assert raw["parsing_error"] is None, raw
calling = roomy.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
history = [HumanMessage("Weather?")]
for _ in range(2):
    asked = calling.invoke(history)
    assert len(asked.tool_calls) == 1, asked
    assert asked.response_metadata["finish_reason"] == "tool_calls"
    history += [asked, *(weather.invoke(call) for call in asked.tool_calls)]
whole = None
for chunk in calling.stream(history):
    whole = chunk if whole is None else whole + chunk
assert [call["name"] for call in whole.tool_calls] == ["weather"], whole
history += [whole, *(weather.invoke(call) for call in whole.tool_calls)]
assert roomy.bind_tools([weather]).bind(max_tokens=8).invoke(history) is not None
assert len(roomy.bind_tools([weather], tool_choice="weather").invoke("Weather?").tool_calls) == 1
