// Draws the trace that the page carries.

const trace = JSON.parse(byId("trace").textContent);
for (const round of trace.rounds) round.pieces = round.committed_texts;
const completions = Map.groupBy(trace.rounds, (round) => round.index);
const view = new RoundView();

// A trace holds no text before its first round: the prompt's and that of the first token, which the prefill chose.
const before = ({ round, base_length }) =>
  round === 0 ? `prompt and first token: ${base_length} tokens` : quantity(base_length, "earlier token");

function chooseCompletion(index) {
  const rounds = completions.get(index);
  const summary = totals(rounds).map(([name, value]) => `${name} ${value}`);
  byId("completion-totals").textContent = `Completion ${index}: ${summary.join(" · ")}`;
  const earlier = html("span", { class: "earlier" }, `⟨${before(rounds[0])}⟩`);
  view.open({ rounds, textBefore: "", first: "", tail: "" }, earlier);
}

function start() {
  document.title = `${trace.name} – DynaTree trace`;
  byId("name").textContent = trace.name;
  byId("totals").append(...definitions(totals(trace.rounds)));
  byId("completion").append(...[...completions.keys()].map((index) => html("option", { value: index }, String(index))));
  byId("completion-choice").hidden = byId("completion-totals").hidden = completions.size === 1;
  byId("completion").addEventListener("change", (event) => chooseCompletion(Number(event.target.value)));
  chooseCompletion(completions.keys().next().value);
}

start();
