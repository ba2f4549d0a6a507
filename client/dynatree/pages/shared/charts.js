// Charts over rounds: a value may be null, which leaves a gap.

const MEAN_ROUNDS = 10;
const CHART = { width: 300, height: 116, left: 38, right: 292, top: 8, bottom: 96 };

// What the DynaTree paper calls the parameters.
const PAPER_NAMES = new Map([
  ["base_depth", "D_0 (base_depth)"],
  ["tau_high", "tau_h (tau_high)"],
]);

// What is plotted: a title, whether the axis begins at 0, and series with a value for each round.
function plotsOf(rounds) {
  const acceptance = rounds.map((round) => share(round.accepted_nodes.length, round.token_ids.length));
  const parameters = new Set(rounds.flatMap((round) => Object.keys(round.parameters)));
  return [
    {
      title: "Acceptance (accepted / drafted)",
      fromZero: true,
      series: [
        { name: "─ round ", style: "faint", values: acceptance },
        { name: `━ mean of ${MEAN_ROUNDS}: `, values: runningMean(acceptance) },
      ],
    },
    { title: "Nodes per round", fromZero: true, series: [{ values: rounds.map((round) => round.token_ids.length) }] },
    {
      title: "Committed tokens per round",
      fromZero: true,
      series: [{ values: rounds.map((round) => round.committed_ids.length) }],
    },
    ...[...parameters].map((name) => ({
      title: PAPER_NAMES.get(name) ?? name,
      fromZero: false,
      series: [
        { values: rounds.map(({ parameters }) => (Object.hasOwn(parameters, name) ? parameters[name] : null)) },
      ],
    })),
  ];
}

// Over the last rounds that drafted anything, as the history controller counts them.
function runningMean(values) {
  const window = [];
  return values.map((value) => {
    if (value !== null) window.push(value);
    if (window.length > MEAN_ROUNDS) window.shift();
    return share(sum(window), window.length);
  });
}

// The least value, or 0, and the greatest; a constant lies in the middle of a range around it.
function range(values, fromZero) {
  const present = values.filter((value) => value !== null);
  const high = Math.max(...present);
  if (fromZero) return [0, high > 0 ? high : 1];
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
  #caption = html("div", {});
  #picture = svg("svg", { class: "chart", viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img" });
  #rule = svg("line", { y1: CHART.top, y2: CHART.bottom });
  #dots = [];

  constructor(title, choose) {
    this.title = title;
    this.figure = html("figure", {}, html("figcaption", {}, html("b", {}, title), this.#caption), this.#picture);
    this.#picture.addEventListener("click", (event) => choose(this.#positionAt(event.clientX)));
  }

  draw(plot, rounds) {
    this.#plot = plot;
    this.#rounds = rounds;
    this.#dots = plot.series.map(() => svg("circle", { r: 3.2 }));
    const { height, left, right, top, bottom } = CHART;
    const [low, high] = this.#range();
    const label = (at, down, anchor, text) => svg("text", { x: at, y: down, "text-anchor": anchor }, text);
    const path = ({ style, values }) =>
      svg("path", { class: `line ${style ?? ""}`, d: line(values, this.#x, this.#yBetween(low, high)) });
    this.#picture.replaceChildren(
      svg("path", { class: "axis", d: `M${left} ${top}H${right}M${left} ${bottom}H${right}` }),
      label(left - 5, top + 4, "end", short(high)),
      label(left - 5, bottom + 3, "end", short(low)),
      label(left, height - 6, "start", `round ${rounds[0].round}`),
      label(right, height - 6, "end", rounds.length > 1 ? rounds.at(-1).round : ""),
      ...plot.series.map(path),
      svg("g", { class: "marker" }, this.#rule, ...this.#dots),
    );
  }

  mark(position) {
    const { title, series } = this.#plot;
    const y = this.#yBetween(...this.#range());
    this.#rule.setAttribute("x1", this.#x(position));
    this.#rule.setAttribute("x2", this.#x(position));
    series.forEach(({ values }, index) => {
      const value = values[position];
      this.#dots[index].toggleAttribute("hidden", value === null);
      if (value === null) return;
      this.#dots[index].setAttribute("cx", this.#x(position));
      this.#dots[index].setAttribute("cy", y(value));
    });
    const words = ({ name = "", values }) => name + (values[position] === null ? "–" : short(values[position]));
    this.#caption.textContent = series.map(words).join(" ");
    this.#picture.setAttribute(
      "aria-label",
      `${title}; at round ${this.#rounds[position].round}: ${this.#caption.textContent}`,
    );
  }

  #range() {
    return range(
      this.#plot.series.flatMap(({ values }) => values),
      this.#plot.fromZero,
    );
  }

  #x = (position) => {
    const last = this.#rounds.length - 1;
    return CHART.left + (last > 0 ? position / last : 0.5) * (CHART.right - CHART.left);
  };

  #yBetween(low, high) {
    return (value) => CHART.bottom - ((value - low) / (high - low)) * (CHART.bottom - CHART.top);
  }

  #positionAt(clientX) {
    const bounds = this.#picture.getBoundingClientRect();
    const at = ((clientX - bounds.left) / bounds.width) * CHART.width;
    return Math.round(((at - CHART.left) / (CHART.right - CHART.left)) * (this.#rounds.length - 1));
  }
}

class Charts {
  #panel = byId("charts");
  #choose;
  #charts = [];

  constructor(choose) {
    this.#choose = choose;
  }

  clear() {
    this.#charts = [];
    this.#panel.replaceChildren();
  }

  // Figures stay while their titles do, so that drawing again as rounds come moves nothing.
  draw(rounds) {
    const plots = plotsOf(rounds);
    if (plots.some(({ title }, index) => this.#charts[index]?.title !== title)) {
      this.#charts = plots.map(({ title }) => new Chart(title, this.#choose));
      this.#panel.replaceChildren(...this.#charts.map(({ figure }) => figure));
    }
    this.#charts.forEach((chart, index) => chart.draw(plots[index], rounds));
  }

  mark(position) {
    for (const chart of this.#charts) chart.mark(position);
  }
}
