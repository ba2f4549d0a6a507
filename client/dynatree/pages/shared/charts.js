// Charts over rounds: a value may be null, which leaves a gap.

const WINDOW = 10; // rounds of a running mean
const CHART = { height: 116, left: 38, top: 8, bottom: 96 };

// What is plotted for every policy: a title with its unit, and series with a value for each round.
function plotsOf(rounds) {
  const tokens = rounds.map((round) => round.committed_ids.length);
  const seconds = rounds.map((round) => round.draft_seconds + round.verify_seconds);
  const nodes = rounds.map((round) => round.token_ids.length);
  const accepted = rounds.map((round) => 100 * round.accepted_nodes.length);
  const ones = rounds.map(() => 1);
  return [
    { title: "Tokens per round", series: [eachRound(tokens, ones), mean(tokens, ones)] },
    { title: "Speed (tokens/s)", series: [mean(tokens, seconds)] },
    { title: "Tree size (nodes)", series: [eachRound(nodes, ones), mean(nodes, ones)] },
    { title: "Acceptance (%)", series: [eachRound(accepted, nodes), mean(accepted, nodes)] },
  ];
}

const eachRound = (parts, wholes) => ({
  name: "─ round: ",
  style: "faint",
  values: parts.map((part, position) => share(part, wholes[position])),
});

// The ratio of the sums over the last rounds.
const mean = (parts, wholes) => ({
  name: `━ last ${WINDOW}: `,
  values: parts.map((_, position) => {
    const start = Math.max(0, position + 1 - WINDOW);
    return share(sum(parts.slice(start, position + 1)), sum(wholes.slice(start, position + 1)));
  }),
});

// What the policies call their parameters, in words, and what each is. What is not here is shown by its own name.
const PARAMETERS = new Map([
  ["base_depth", ["Base depth D₀ (levels)", "Likely nodes above this depth are all expanded."]],
  ["tau_high", ["Confidence threshold τₕ", "Nodes that the draft is surer of get one child."]],
  ["plain_ms", ["Plain step (ms)", "A verification without a tree."]],
  ["draft_forward_ms", ["Draft forward (ms)", "One forward pass of the draft model."]],
  ["draft_contention_ms", ["Contention (ms)", "What drafting adds to the verification after it."]],
  ["rate", ["Rate to beat (tokens/s)", "The session’s own rate, or plain decoding’s if that is higher."]],
  ["row_price", ["Price of a node (tokens)", "What a node takes from other sessions; 0 without any."]],
  ["best_child_mass", ["Best child’s share", "Of a node’s probability, what its likeliest child is expected to keep."]],
  ["child_mass", ["All children’s share", "Of a node’s probability, what its children are expected to keep."]],
  ["levels", ["Levels drafted", "Forward passes of the draft model for this tree."]],
  ["paused", ["Rounds paused", "Rounds since the draft model was last asked."]],
  ["rate_others", ["Second n-gram right", "How often the second continuation’s first token proves right."]],
]);

function wordsOf(name) {
  const [, match] = /^rate_(\d+)$/.exec(name) ?? [];
  if (!match) return PARAMETERS.get(name) ?? [name, ""];
  return [`N-grams right, match ≥ ${match}`, "How often a token proves right behind so many repeated ones."];
}

// Those with words first, in the order of the words.
function inOrder(name, other) {
  const known = [...PARAMETERS.keys()].reverse();
  return known.indexOf(other) - known.indexOf(name) || name.localeCompare(other, "en", { numeric: true });
}

// The policy's parameters, which differ from policy to policy.
function plotsOfParameters(rounds) {
  const names = new Set(rounds.flatMap((round) => Object.keys(round.parameters)));
  return [...names].sort(inOrder).map((name) => {
    const [title, meaning] = wordsOf(name);
    const valueOf = ({ parameters }) => (Object.hasOwn(parameters, name) ? parameters[name] : null);
    return { title, meaning, isParameter: true, series: [{ name: "", values: rounds.map(valueOf) }] };
  });
}

// From 0 to the greatest value; for a parameter from the least, and a constant lies in the middle of a range around it.
function range({ series, isParameter }) {
  const present = series.flatMap(({ values }) => values).filter((value) => value !== null);
  const high = Math.max(...present);
  if (!isParameter) return [0, high > 0 ? high : 1];
  const low = Math.min(...present);
  const room = high > low ? 0 : Math.abs(low) / 10 || 1;
  return [low - room, high + room];
}

// Every point begins with a stroke of no length, which the round line ends make a dot where its neighbours are missing.
function line(values, x, y) {
  return values
    .map((value, position) => {
      if (value === null) return "";
      const start = position > 0 && values[position - 1] !== null ? "L" : "M";
      return `${start}${x(position).toFixed(1)} ${y(value).toFixed(1)}h0`;
    })
    .join("");
}

// One plot as a figure; a click on it chooses a round.
class Chart {
  #plot;
  #rounds;
  #range;
  #width;
  #left;
  #caption = html("div", {});
  #picture = svg("svg", { class: "chart", role: "img" });
  #rule = svg("line", { y1: CHART.top, y2: CHART.bottom });
  #dots = [];

  constructor({ title, meaning }, choose) {
    this.title = title;
    const words = [html("b", {}, title), ...(meaning ? [html("p", {}, meaning)] : []), this.#caption];
    this.figure = html("figure", {}, html("figcaption", {}, ...words), this.#picture);
    this.#picture.addEventListener("click", (event) => choose(this.#positionAt(event.clientX)));
  }

  draw(plot, rounds) {
    this.#plot = plot;
    this.#rounds = rounds;
    this.#range = range(plot);
    this.#dots = plot.series.map(() => svg("circle", { r: 3.2 }));
    const { height, top, bottom } = CHART;
    this.#width = narrow.matches ? 160 : 300; // two share the width of a telephone
    const right = this.#right;
    const [low, high] = this.#range.map(short);
    this.#left = Math.max(CHART.left, ...[low, high].map((label) => widthOf(label, LABEL_FONT) + 8));
    const label = (at, down, anchor, text) => svg("text", { x: at, y: down, "text-anchor": anchor }, text);
    const path = ({ style, values }) =>
      svg("path", { class: `line ${style ?? ""}`, d: line(values, this.#x, this.#y) });
    this.#picture.setAttribute("viewBox", `0 0 ${this.#width} ${height}`);
    this.#picture.replaceChildren(
      svg("path", { class: "axis", d: `M${this.#left} ${top}H${right}M${this.#left} ${bottom}H${right}` }),
      label(this.#left - 5, top + 4, "end", high),
      label(this.#left - 5, bottom + 3, "end", low),
      label(this.#left, height - 6, "start", `round ${rounds[0].round}`),
      label(right, height - 6, "end", rounds.length > 1 ? rounds.at(-1).round : ""),
      ...plot.series.map(path),
      svg("g", { class: "marker" }, this.#rule, ...this.#dots),
    );
  }

  mark(position) {
    const { title, series } = this.#plot;
    this.#rule.setAttribute("x1", this.#x(position));
    this.#rule.setAttribute("x2", this.#x(position));
    series.forEach(({ values }, index) => {
      const value = values[position];
      this.#dots[index].toggleAttribute("hidden", value === null);
      if (value === null) return;
      this.#dots[index].setAttribute("cx", this.#x(position));
      this.#dots[index].setAttribute("cy", this.#y(value));
    });
    const words = ({ name, values }) => name + (values[position] === null ? "–" : short(values[position]));
    this.#caption.replaceChildren(...series.map((each) => html("span", {}, words(each))));
    this.#picture.setAttribute(
      "aria-label",
      `${title}; at round ${this.#rounds[position].round}: ${series.map(words).join(", ")}`,
    );
  }

  get #right() {
    return this.#width - 8;
  }

  #x = (position) => {
    const last = this.#rounds.length - 1;
    return this.#left + (last > 0 ? position / last : 0.5) * (this.#right - this.#left);
  };

  #y = (value) => {
    const [low, high] = this.#range;
    return CHART.bottom - ((value - low) / (high - low)) * (CHART.bottom - CHART.top);
  };

  #positionAt(clientX) {
    const bounds = this.#picture.getBoundingClientRect();
    const at = ((clientX - bounds.left) / bounds.width) * this.#width;
    return Math.round(((at - this.#left) / (this.#right - this.#left)) * (this.#rounds.length - 1));
  }
}

class ChartPanel {
  #panel;
  #choose;
  #charts = [];

  constructor(panel, choose) {
    this.#panel = panel;
    this.#choose = choose;
  }

  // Figures stay while their titles do, so that drawing again as rounds come moves nothing.
  draw(plots, rounds) {
    if (plots.length !== this.#charts.length || plots.some(({ title }, index) => this.#charts[index].title !== title)) {
      this.#charts = plots.map((plot) => new Chart(plot, this.#choose));
      this.#panel.replaceChildren(...this.#charts.map(({ figure }) => figure));
    }
    this.#charts.forEach((chart, index) => chart.draw(plots[index], rounds));
  }

  mark(position) {
    for (const chart of this.#charts) chart.mark(position);
  }
}

// The charts of any policy, and its own parameters, folded.
class Charts {
  #main;
  #controller;

  constructor(choose) {
    this.#main = new ChartPanel(byId("charts"), choose);
    this.#controller = new ChartPanel(byId("controller-charts"), choose);
  }

  clear() {
    this.draw([]);
  }

  draw(rounds) {
    this.#main.draw(rounds.length > 0 ? plotsOf(rounds) : [], rounds);
    const parameters = plotsOfParameters(rounds);
    this.#controller.draw(parameters, rounds);
    byId("controller").hidden = parameters.length === 0;
    byId("controller-count").textContent = quantity(parameters.length, "value");
  }

  mark(position) {
    this.#main.mark(position);
    this.#controller.mark(position);
  }
}
