"""langchain-openai: two-turn chats, streams, batches, stop strings, and the older completions."""

import os

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

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
