// OpenAI's own client for Node against a gateway: completions whole and as streams, options, errors; one JSON line.
//   npm ci && node openai.mjs http://127.0.0.1:8000/v1 "Once upon a time"

import OpenAI from "openai";

const [baseURL, prompt] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const [{ id: model }] = (await client.models.list()).data;
const greedy = { model, prompt, max_tokens: 24, temperature: 0, return_token_ids: true };

async function whole(options) {
  const { choices, usage } = await client.completions.create({ ...greedy, ...options });
  return {
    texts: choices.map((choice) => choice.text),
    tokenIds: choices.map((choice) => choice.token_ids),
    reasons: choices.map((choice) => choice.finish_reason),
    logProbs: choices.map((choice) => choice.logprobs?.token_logprobs ?? null),
    tokens: usage.completion_tokens,
  };
}

async function streamed(options) {
  const result = { text: "", tokenIds: [], reason: null, usage: null };
  const stream = await client.completions.create({
    ...greedy,
    ...options,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const { choices, usage } of stream) {
    for (const choice of choices) {
      result.text += choice.text;
      result.tokenIds.push(...(choice.token_ids ?? []));
      result.reason ??= choice.finish_reason;
    }
    result.usage ??= usage?.completion_tokens ?? null;
  }
  return result;
}

async function refused(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

const result = {
  greedy: await whole({}),
  streamed: await streamed({}),
  seeded: await whole({ temperature: 0.8, seed: 7, n: 2 }),
  stopped: await whole({ stop: ["the"] }),
  logged: await whole({ logprobs: 2, max_tokens: 4 }),
  wrong: await refused(() => client.completions.create({ ...greedy, top_p: 7 })),
  missing: await refused(() => client.completions.create({ ...greedy, model: "gpt-9" })),
  chat: await refused(() => client.chat.completions.create({ model, messages: [{ role: "user", content: "Hi" }] })),
};
console.log(JSON.stringify(result));
