// A completion as it comes from the server's OpenAI API, in which rounds are `trace` beside a choice.

// The server refused, or its stream said that it failed. `status` is that of HTTP: 200 within a stream, 0 where nothing answers.
class ServerError extends Error {
  constructor(status, { message, param } = {}) {
    super(message ? `${message}${param ? ` (${param})` : ""}` : `the server answered with status ${status}`);
    this.status = status;
  }
}

// The answer to a request, whose status is that of success. Throws ServerError.
async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(unreachable);
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ServerError(response.status, body.error);
}

function unreachable(error) {
  throw error.name === "AbortError" ? error : new ServerError(0, { message: "the server cannot be reached" });
}

// The events of a completion, or of a chat's next answer, up to [DONE].
async function* stream(request, key, signal) {
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true }, trace: true }),
    signal,
  };
  const response = await ask(request.messages ? "/v1/chat/completions" : "/v1/completions", key, options);
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue; // a comment, or the empty line that ends an event
    const data = line.slice("data:".length).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(response.status, event.error);
    yield event;
  }
  throw new ServerError(response.status, { message: "the server's answer broke off" });
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

class Completion {
  rounds = [];
  first = ""; // the text of the first token, which the prompt's own forward chose and no round holds
  tail = ""; // the text behind the last round
  finishReason = null;
  events = 0;
  #usage = null;
  #began = performance.now();
  #firstArrival = null;
  #lastArrival = null;

  constructor(request) {
    this.request = request;
  }

  take({ choices: [choice], usage }) {
    this.events += 1;
    this.#usage = usage ?? this.#usage;
    if (!choice) return;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (choice.delta?.role) return; // a chat's stream says first who speaks
    const text = choice.text ?? choice.delta.content ?? "";
    if (text || choice.finish_reason === null) this.#arrive(text, choice.trace);
  }

  #arrive(text, trace) {
    this.#lastArrival = performance.now();
    if (this.#firstArrival === null) {
      this.#firstArrival = this.#lastArrival;
      this.first = text;
    } else {
      this.tail += text;
    }
    if (!trace) return;
    this.rounds.push({ ...trace, pieces: piecesOf(this.tail, trace.committed_texts) });
    this.tail = "";
  }

  get text() {
    return this.first + this.rounds.flatMap(({ pieces }) => pieces).join("") + this.tail;
  }

  // The text before the first round, as far as it is known: a chat's template is the server's.
  get textBefore() {
    return (this.request.prompt ?? "") + this.first;
  }

  // What a chat has said when this answer is whole, or is left as it is.
  get messages() {
    return [...this.request.messages, { role: "assistant", content: this.text }];
  }

  // So far by the rounds, in the end by the server.
  get tokens() {
    if (this.#usage) return this.#usage.completion_tokens;
    return (this.#firstArrival === null ? 0 : 1) + sum(this.rounds.map((round) => round.committed_ids.length));
  }

  // From the request to the last token so far; null before the first.
  get seconds() {
    return this.#lastArrival && (this.#lastArrival - this.#began) / 1000;
  }

  get secondsToFirst() {
    return this.#firstArrival && (this.#firstArrival - this.#began) / 1000;
  }

  // New tokens a second, the prompt's forward included; null before the first.
  get rate() {
    return this.seconds && this.tokens / this.seconds;
  }
}

// Cuts the text since the last round into what each token of this one contributed, by the tokens' own texts. A token
// whose text is not there, as that of half a character, contributes nothing. A space that tokenizers leave out goes to
// the token before it. What is left in front goes to the first token.
function piecesOf(text, tokens) {
  const pieces = [];
  let before = text;
  for (const token of tokens.toReversed()) {
    const start = startOf(token, before);
    pieces.unshift(before.slice(start));
    before = before.slice(0, start);
  }
  return [before + (pieces[0] ?? ""), ...pieces.slice(1)];
}

// Where a token begins that ends a text, perhaps with spaces behind it; the text's end where it does not.
function startOf(token, text) {
  const end = [text, text.trimEnd()].find((candidate) => candidate.endsWith(token));
  return end === undefined ? text.length : end.length - token.length;
}
