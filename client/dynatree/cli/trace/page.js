// Draws the trace that the page carries.

const trace = JSON.parse(byId("trace").textContent);
for (const round of trace.rounds) round.pieces = round.committed_texts;
const completions = Map.groupBy(trace.rounds, (round) => round.index);
const view = new RoundView();

function chooseCompletion(index) {
  const rounds = completions.get(index);
  const summary = totals(rounds).map(([name, value]) => `${name} ${value}`);
  byId("completion-totals").textContent = `Completion ${index}: ${summary.join(" · ")}`;
  // One height for all rounds, that of the tallest tree, so that nothing below it jumps.
  byId("tree-panel").style.height = `min(${Math.max(...rounds.map(heightOf)) + 16}px, 62vh)`;
  const earlier = html("span", { class: "earlier" }, `⟨${quantity(rounds[0].base_length, "earlier token")}⟩`);
  view.open({ rounds, textBefore: "", tail: "" }, earlier);
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
