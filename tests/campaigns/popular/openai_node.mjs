// openai for Node: two-turn chats, streams, completions, parsed answers, calls and their results, an abort.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

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

const Town = z.object({ name: z.enum(["Oslo", "Rome"]), harbour: z.boolean() });
const asked = [{ role: "user", content: "Which town?" }];
const format = { response_format: zodResponseFormat(Town, "town"), max_tokens: 200 };
const parsed = await client.chat.completions.parse({ model, messages: asked, ...format });
check(typeof parsed.choices[0].message.parsed.harbour === "boolean", "parsed");
asked.push(parsed.choices[0].message, { role: "user", content: "And which other?" });
const streamedTown = await client.chat.completions.stream({ model, messages: asked, ...format }).finalChatCompletion();
check(streamedTown.choices[0].message.parsed.name.length === 4, "parsed stream");

const seen = [];
const visit = zodFunction({ name: "visit", parameters: Town, function: (town) => `seen ${seen.push(town.name)}` });
const tools = { tools: [visit], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };
const history = [{ role: "user", content: "Go to a town." }];
for (const way of ["parse", "stream"]) {
  const called = client.chat.completions[way]({ model, messages: history, ...tools });
  const choice = (way === "parse" ? await called : await called.finalChatCompletion()).choices[0];
  check(choice.finish_reason === "tool_calls", `${way}: finish_reason ${choice.finish_reason}`);
  const [call] = choice.message.tool_calls;
  check(typeof JSON.parse(call.function.arguments).harbour === "boolean", `${way}: arguments`);
  history.push(choice.message, { role: "tool", tool_call_id: call.id, content: "seen" });
}
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ model, messages: history, stream, ...tools }, { maxChatCompletions: 2 });
  await runner.done();
  check(runner.messages.filter((each) => each.role === "tool").length === 4, `runTools: ${JSON.stringify(runner.messages)}`);
}
check(seen.length === 4, "functions run");
const long = await client.completions.create({ model, prompt: "Once", max_tokens: 1000, stream: true });
for await (const _ of long) break; // aborts
