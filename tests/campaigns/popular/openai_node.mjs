// openai for Node: two-turn chats, streams, completions, an abort.
import OpenAI from "openai";

const model = process.env.MODEL;
const client = new OpenAI({ apiKey: process.env.OPENAI_API_KEY, baseURL: process.env.OPENAI_BASE_URL, maxRetries: 0 });
const messages = [{ role: "user", content: "Who are you?" }];
const check = (holds, what) => {
  if (!holds) throw new Error(what);
};

check((await client.models.list()).data.some((each) => each.id === model), "models");
const first = await client.chat.completions.create({ model, messages, max_tokens: 12 });
messages.push(first.choices[0].message, { role: "user", content: "And who else?" });
const second = await client.chat.completions.create({ model, messages, max_tokens: 12 });
check(second.choices[0].message.role === "assistant", "second turn");
let text = "";
const streamed = await client.chat.completions.create({
  ...{ model, messages, stream: true, max_tokens: 12 },
  stream_options: { include_usage: true },
});
for await (const chunk of streamed) text += chunk.choices[0]?.delta?.content ?? "";
check(text.length > 0, "stream");
const helper = client.chat.completions.stream({ model, messages, max_tokens: 12 });
const final = await helper.finalMessage();
messages.push(final, { role: "user", content: "Really?" });
check((await client.chat.completions.create({ model, messages, max_tokens: 8 })).choices.length === 1, "third turn");
check((await client.completions.create({ model, prompt: "Once upon a time" })).choices[0].text, "completion");
const long = await client.completions.create({ model, prompt: "Once", max_tokens: 1000, stream: true });
for await (const _ of long) break; // aborts
