// The live page: a form, one completion at a time round by round, and its speed beside plain decoding's. Where the model
// has a chat template, the completions are the turns of a chat.

const PLAIN = "autoregressive";
const PACE = 700; // milliseconds that a tree is shown before the next, so that it is seen to grow

const ENDINGS = { stop: "The model ended it.", length: "It reached the limit of tokens." };

const view = new RoundView();
let model = null;
let shown = null; // the completion whose rounds are shown
let turns = []; // the completions of the chat so far
let plain = null; // the same request by plain decoding, once it is measured
let running = null; // an AbortController while the server is asked

const key = () => byId("key").value; // kept nowhere else

async function loadModel() {
  const { data } = await (await ask("/v1/models", key())).json();
  model = data[0];
  const draft = model.draft_model === "none" ? "n-grams" : model.draft_model;
  byId("model").textContent = draft ? `${model.id}, drafted by ${draft}` : model.id;
  byId("policy").replaceChildren(...model.policies.map((name) => html("option", { value: name }, name)));
  byId("max-tokens").max = model.max_model_len;
  byId("prompt-label").textContent = isChat() ? "Message" : "Prompt";
  byId("generate").textContent = isChat() ? "Send" : "Generate";
  byId("text-heading").textContent = isChat() ? "Chat" : "Committed text";
  invite();
}

const isChat = () => model?.chat_template === true;

// What the empty box asks for; the first prompt may be the example.
function invite() {
  const prompt = byId("prompt");
  prompt.required = turns.length > 0;
  prompt.placeholder = turns.length > 0 ? "Reply …" : isChat() ? EXAMPLES.chat : EXAMPLES.text;
}

// The prompt, or the message behind those of the chat.
function said(text) {
  if (!isChat()) return { prompt: text };
  return { messages: [...(turns.at(-1)?.messages ?? []), { role: "user", content: text }] };
}

const requestOfForm = () => ({
  model: model.id,
  ...said(byId("prompt").value),
  max_tokens: byId("max-tokens").valueAsNumber,
  temperature: byId("temperature").valueAsNumber,
  seed: byId("seed").valueAsNumber,
  policy: byId("policy").value,
});

// -- Running: one task at a time

// `draw` is called with the time in every frame until the task ends, and once then.
async function run(task, draw) {
  running = new AbortController();
  drawRunning();
  complain("");
  let next = requestAnimationFrame(function frame(now) {
    draw(now);
    next = requestAnimationFrame(frame);
  });
  try {
    await task(running.signal);
  } catch (error) {
    fail(error);
  }
  cancelAnimationFrame(next);
  running = null;
  draw(Infinity);
  drawRunning();
}

function drawRunning() {
  const isRunning = running !== null;
  const [hides, comes] = isRunning ? ["generate", "stop"] : ["stop", "generate"];
  const moves = [byId(hides), byId("measure")].includes(document.activeElement);
  byId(hides).hidden = true;
  byId(comes).hidden = false;
  byId("measure").disabled = isRunning || shown?.finishReason == null;
  byId("turn").disabled = byId("new-chat").disabled = isRunning;
  if (moves) byId(comes).focus();
  byId("text").setAttribute("aria-busy", isRunning);
  byId("shown").setAttribute("aria-live", isRunning ? "off" : "polite");
}

function fail(error) {
  if (error.name === "AbortError") {
    say("Stopped.");
    return;
  }
  say("");
  complain(error.message);
  if (error.status === 401) {
    byId("key-field").hidden = false;
    byId("key").focus();
  }
}

function say(words) {
  byId("status").textContent = words;
}

function complain(words) {
  byId("error").textContent = words;
}

async function receive(completion, signal) {
  for await (const event of stream(completion.request, key(), signal)) completion.take(event);
}

// -- A completion, and its rounds

let drawnEvents = 0;
let advancedAt = -Infinity; // the time of the frame that drew the newest tree

async function generate(signal) {
  if (model === null) await loadModel();
  byId("prompt").value ||= byId("prompt").placeholder;
  const asked = new Completion(requestOfForm());
  open(asked);
  say("Generating …");
  try {
    await receive(asked, signal);
  } finally {
    settle(asked);
  }
  const made = `${quantity(asked.tokens, "token")} in ${quantity(asked.rounds.length, "round")}.`;
  say(`${made} ${ENDINGS[asked.finishReason] ?? ""}`);
}

// What is shown when a completion has ended: itself, unless nothing came.
function settle(completion) {
  const came = completion.text !== "";
  if (isChat() && came) {
    turns.push(completion);
    byId("prompt").value = "";
  }
  if (came || !(isExample() || isChat())) endExample();
  else if (turns.length > 0) open(turns.at(-1));
  else showExample();
  drawTurns();
}

function open(completion) {
  shown = completion;
  plain = null;
  drawnEvents = 0;
  advancedAt = -Infinity;
  view.open(shown, ...beforeOf(shown.request));
  drawTurns();
  byId("plain-rate").hidden = shown.request.policy === PLAIN;
  byId("shown-rate").querySelector("dt").textContent = shown.request.policy;
  byId("comparison").textContent = "";
  drawFigures();
  drawRates();
}

// What stands before a completion: the prompt, or what the chat has said.
function beforeOf({ prompt, messages }) {
  if (!messages) return [html("span", { class: "earlier" }, prompt)];
  return messages.map(({ role, content }) => html("div", { class: role }, content));
}

// -- The turns of a chat

// Those that ended, and the one under way.
function drawTurns() {
  const all = isChat() && shown && !turns.includes(shown) ? [...turns, shown] : turns;
  byId("turn").replaceChildren(...all.map((_, index) => html("option", { value: index }, String(index + 1))));
  byId("turn").value = all.indexOf(shown);
  byId("chat-controls").hidden = all.length === 0;
  invite();
}

function showTurn({ target }) {
  open(turns[target.value]);
  drawRunning();
}

function startChat() {
  turns = [];
  say("");
  complain("");
  showExample();
  drawTurns();
  byId("prompt").focus();
}

// -- Drawing it

// Text and figures come with every frame. Trees and charts come at a pace at which they can be seen.
function drawShown(now) {
  if (shown === null || (shown.events === drawnEvents && !view.isBehind)) return;
  if (shown.events !== drawnEvents) {
    document.body.classList.toggle("example", isExample() && shown.rounds.length === 0 && shown.finishReason === null);
    view.extend();
    drawFigures();
    drawRates();
    drawnEvents = shown.events;
  }
  if (view.isBehind && now - advancedAt >= PACE) {
    view.advance();
    advancedAt = now;
  }
}

function drawFigures() {
  const { rounds, tokens, secondsToFirst } = shown;
  const ofRounds = rounds.length > 0 ? totals(rounds).filter(([name]) => name !== "tokens") : [];
  const first = secondsToFirst === null ? [] : [["first token after", milliseconds(secondsToFirst)]];
  byId("figures").replaceChildren(...definitions([["tokens", tokens], ...ofRounds, ...first]));
}

// -- Plain decoding beside it

async function measure(signal) {
  plain = new Completion({ ...shown.request, policy: PLAIN });
  byId("comparison").textContent = "Plain decoding …";
  try {
    await receive(plain, signal);
    byId("comparison").textContent = comparison();
  } catch (error) {
    byId("comparison").textContent = "";
    plain = null;
    throw error;
  }
}

function comparison() {
  const ratio = `${(shown.rate / plain.rate).toFixed(2)} × the speed of plain decoding`;
  if (plain.text === shown.text) return `${ratio}, and the same text.`;
  return `${ratio}. The texts part after ${quantity(commonLength(plain.text, shown.text), "character")}.`;
}

function commonLength(text, other) {
  let length = 0;
  while (length < text.length && text[length] === other[length]) length += 1;
  return length;
}

function drawRates() {
  const greatest = Math.max(shown.rate ?? 0, plain?.rate ?? 0);
  drawRate(byId("shown-rate"), shown, greatest);
  drawRate(byId("plain-rate"), plain, greatest);
  byId("measure").hidden = plain !== null;
  byId("plain-rate").querySelector(".rate").hidden = plain === null;
}

function drawRate(row, completion, greatest) {
  const rate = completion?.rate ?? null;
  row.querySelector(".rate").textContent = rate === null ? "" : `${rate.toFixed(1)} tokens/s`;
  row.querySelector(".bar").style.width = rate === null ? "0" : `${(100 * rate) / greatest}%`;
}

// -- The page

const isExample = () => document.body.classList.contains("example");

function endExample() {
  document.body.classList.remove("example");
  view.close();
}

function showExample() {
  shown = null;
  document.body.classList.add("example");
  view.open(EXAMPLE, html("span", { class: "earlier" }, EXAMPLE.textBefore));
}

function submit(event) {
  event.preventDefault();
  if (running === null) run(generate, drawShown);
}

function start() {
  byId("form").addEventListener("submit", submit);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("measure").addEventListener("click", () => run(measure, drawRates));
  byId("key").addEventListener("change", () => loadModel().then(() => complain(""), fail));
  byId("turn").addEventListener("change", showTurn);
  byId("new-chat").addEventListener("click", startChat);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    byId("form").requestSubmit();
  });
  showExample();
  invite();
  loadModel().catch(fail);
}

start();
