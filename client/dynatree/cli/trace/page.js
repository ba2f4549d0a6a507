// Draws the trace that the page carries. Its texts may hold anything: they reach the page as text, never as markup.

const ROOT = -1;
const MEAN_ROUNDS = 10;

// What the DynaTree paper calls the parameters.
const PAPER_NAMES = new Map([
  ["base_depth", "D_0 (base_depth)"],
  ["tau_high", "tau_h (tau_high)"],
]);

const byId = (id) => document.getElementById(id);
const html = (tag, attributes, ...children) => element("http://www.w3.org/1999/xhtml", tag, attributes, children);
const svg = (tag, attributes, ...children) => element("http://www.w3.org/2000/svg", tag, attributes, children);

// `children` are elements, or strings that become text.
function element(namespace, tag, attributes, children) {
  const made = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// -- Words and numbers

const sum = (values) => values.reduce((total, value) => total + value, 0);
const short = (number) => String(Number(number.toPrecision(3)));
const milliseconds = (seconds) => `${short(seconds * 1000)} ms`;
const share = (part, whole) => (whole > 0 ? part / whole : null);
const quantity = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// A token's text with what cannot be seen made visible.
function visible(text) {
  return text
    .replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length))
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/gu, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

// At most `length` characters, from the start or (negative) from the end.
function cut(text, length) {
  const characters = [...text];
  if (characters.length <= Math.abs(length)) return text;
  return length > 0 ? `${characters.slice(0, length - 1).join("")}…` : `…${characters.slice(length + 1).join("")}`;
}

function totals(rounds) {
  const tokens = sum(rounds.map((round) => round.committed_ids.length));
  const acceptance = share(
    sum(rounds.map((round) => round.accepted_nodes.length)),
    sum(rounds.map((round) => round.token_ids.length)),
  );
  return [
    ["rounds", rounds.length],
    ["tokens", tokens],
    ["tokens per round", (tokens / rounds.length).toFixed(2)],
    ["acceptance", acceptance === null ? "nothing drafted" : `${(100 * acceptance).toFixed(1)} %`],
  ];
}

// -- The tree: nodes, their places, their drawing

const ROW = 30;
const BOX = 22;
const PADDING = 8;
const GAP = 30;
const MARGIN = 14;
const LABEL_LENGTH = 18;

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "bold 13px ui-monospace, monospace";

// The root of a round's tree. Nodes have kind, label, title, parent, children, depth and path (probability).
function treeOf(round, textBefore) {
  const root = {
    kind: "root",
    label: `${cut(visible(textBefore.slice(-4 * LABEL_LENGTH)), -LABEL_LENGTH) || "…"} •`,
    title: "root: the last committed token",
    children: [],
    depth: 0,
    path: 1,
  };
  const accepted = new Set(round.accepted_nodes);
  const nodes = [];
  round.token_ids.forEach((token, index) => {
    const probability = round.probabilities[index];
    const parent = round.parents[index] === ROOT ? root : nodes[round.parents[index]];
    const path = parent.path * probability;
    const kind = accepted.has(index) ? "accepted" : "drafted";
    const title = `${quoted(round.texts[index])} · token ${token} · probability ${short(probability)} · path ${short(path)} · ${kind}`;
    const node = { ...child(parent, kind, round.texts[index], token), title, path };
    parent.children.push(node);
    nodes.push(node);
  });
  const count = round.accepted_nodes.length;
  if (round.committed_ids.length > count) {
    const end = count > 0 ? nodes[round.accepted_nodes[count - 1]] : root;
    const [token, text] = [round.committed_ids[count], round.committed_texts[count]];
    const title = `${quoted(text)} · token ${token} · the target's own token`;
    end.children.unshift({ ...child(end, "bonus", text, token), title, path: 0 });
  }
  return root;
}

const quoted = (text) => `“${visible(text)}”`;
const child = (parent, kind, text, token) => ({
  kind,
  parent,
  label: cut(visible(text), LABEL_LENGTH) || `⟨${token}⟩`,
  children: [],
  depth: parent.depth + 1,
});

// Gives every node x, y and width, and returns them from the root down, with the size of all. A column is a depth; a
// first child stays in its parent's row and every other child opens a new one, so that no two edges cross.
function layOut(root) {
  const nodes = [];
  const stack = [root];
  let rows = 0;
  while (stack.length > 0) {
    const node = stack.pop();
    node.row = node.parent?.children[0] === node ? node.parent.row : rows++;
    node.y = MARGIN + ROW * (node.row + 0.5);
    node.width = Math.ceil(ruler.measureText(node.label).width) + 2 * PADDING;
    nodes.push(node);
    stack.push(...[...node.children].reverse());
  }
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const starts = [MARGIN];
  for (const width of widths) starts.push(starts.at(-1) + width + GAP);
  for (const node of nodes) {
    node.x = node.kind === "root" ? starts[1] - GAP - node.width : starts[node.depth];
    node.columnEnd = starts[node.depth + 1] - GAP;
  }
  return { nodes, width: starts.at(-1) - GAP + MARGIN, height: 2 * MARGIN + ROW * rows };
}

function edge(node) {
  const { parent } = node;
  const middle = (parent.columnEnd + node.x) / 2;
  const curve = `C${middle} ${parent.y} ${middle} ${node.y} ${node.x} ${node.y}`;
  return svg("path", {
    class: `edge ${node.kind}`,
    d: `M${parent.x + parent.width} ${parent.y}H${parent.columnEnd}${curve}`,
  });
}

function box(node) {
  const { x, y, width, kind, title } = node;
  const frame = (margin) => ({
    x: x - margin,
    y: y - BOX / 2 - margin,
    width: width + 2 * margin,
    height: BOX + 2 * margin,
    rx: 5 + margin,
  });
  return svg(
    "g",
    { class: `node ${kind}`, role: "img", tabindex: kind === "root" ? 0 : -1, "aria-label": title },
    svg("title", {}, title),
    svg("rect", { class: "halo", ...frame(4) }),
    ...(kind === "root" ? [] : [svg("rect", { class: "box", ...frame(0), style: `--path: ${node.path}` })]),
    svg("text", { x: x + PADDING, y: y + 4.5 }, node.label),
  );
}

function drawTree(round, textBefore) {
  const tree = byId("tree");
  const { nodes, width, height } = layOut(treeOf(round, textBefore));
  // Thick edges lie over thin ones.
  const edges = nodes.slice(1).sort((a, b) => (a.kind !== "drafted") - (b.kind !== "drafted"));
  for (const node of nodes) node.drawn = box(node);
  tree.replaceChildren(...edges.map(edge), ...nodes.map((node) => node.drawn));
  tree.setAttribute("width", width);
  tree.setAttribute("height", height);
  tree.setAttribute(
    "aria-label",
    `Draft tree of round ${round.round}: ${quantity(round.token_ids.length, "node")}, ` +
      `${round.accepted_nodes.length} accepted. Arrow keys move between nodes.`,
  );
  const depth = Math.max(0, ...nodes.filter((node) => node.kind !== "bonus").map((node) => node.depth));
  byId("facts").textContent = [
    `${quantity(round.token_ids.length, "node")}, depth ${depth}`,
    `${round.accepted_nodes.length} accepted`,
    `${round.committed_ids.length} committed`,
    `${quantity(round.base_length, "token")} before`,
    `draft ${milliseconds(round.draft_seconds)}`,
    `verify ${milliseconds(round.verify_seconds)}`,
  ].join(" · ");
  byId("detail").textContent = "Point at a node, or reach the tree with Tab and walk it with the arrow keys.";
  shownNodes = nodes;

  // A large tree scrolls: its accepted path ends in view.
  const panel = byId("tree-panel");
  const end = nodes.findLast((node) => node.kind === "bonus" || node.kind === "accepted") ?? nodes[0];
  panel.scrollTo(end.x + end.width + MARGIN - panel.clientWidth, end.y - panel.clientHeight / 2);
}

let shownNodes = [];

function describeNode(event) {
  const node = shownNodes.find(({ drawn }) => drawn.contains(event.target));
  if (node) byId("detail").textContent = node.title;
}

// Left and right are parent and first child; up and down are the neighbours of the same depth.
function walkTree(event) {
  const node = shownNodes.find(({ drawn }) => drawn === document.activeElement);
  if (!node) return;
  const column = shownNodes.filter(({ depth }) => depth === node.depth);
  const place = column.indexOf(node);
  const targets = {
    ArrowLeft: node.parent,
    ArrowRight: node.children[0],
    ArrowUp: column[place - 1],
    ArrowDown: column[place + 1],
  };
  if (!Object.hasOwn(targets, event.key)) return;
  event.preventDefault();
  const target = targets[event.key];
  if (!target) return;
  node.drawn.setAttribute("tabindex", -1);
  target.drawn.setAttribute("tabindex", 0);
  target.drawn.focus();
}

// -- The text

function drawText(round, textBefore) {
  const marks = round.committed_texts.map((text, index) => {
    const bonus = index >= round.accepted_nodes.length;
    return html("mark", { class: bonus ? "bonus" : "accepted" }, text.replaceAll("\n", "↵\n"));
  });
  const earlier = html("span", { class: "earlier" }, `⟨${quantity(completion[0].base_length, "earlier token")}⟩`);
  const text = byId("text");
  text.replaceChildren(earlier, textBefore, ...marks);
  text.scrollTop = text.scrollHeight;
}

// -- The charts: a value may be null, which leaves a gap

const CHART = { width: 300, height: 116, left: 38, right: 292, top: 8, bottom: 96 };

function chartsOf(rounds) {
  const nodes = rounds.map((round) => round.token_ids.length);
  const tokens = rounds.map((round) => round.committed_ids.length);
  const acceptance = rounds.map((round) => share(round.accepted_nodes.length, round.token_ids.length));
  const parameters = new Set(rounds.flatMap((round) => Object.keys(round.parameters)));
  return [
    chart(rounds, "Acceptance (accepted / drafted)", { fromZero: true }, [
      { name: "─ round ", style: "faint", values: acceptance },
      { name: `━ mean of ${MEAN_ROUNDS}: `, values: runningMean(acceptance) },
    ]),
    chart(rounds, "Nodes per round", { fromZero: true }, [{ values: nodes }]),
    chart(rounds, "Committed tokens per round", { fromZero: true }, [{ values: tokens }]),
    ...[...parameters].map((name) => {
      const values = rounds.map(({ parameters }) => (Object.hasOwn(parameters, name) ? parameters[name] : null));
      return chart(rounds, PAPER_NAMES.get(name) ?? name, { fromZero: false }, [{ values }]);
    }),
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

// A figure, and `mark(position)`, which moves its marker.
function chart(rounds, title, { fromZero }, series) {
  const all = series.flatMap(({ values }) => values);
  const [low, high] = range(all, fromZero);
  const { width, height, left, right, top, bottom } = CHART;
  const x = (position) => left + (rounds.length > 1 ? position / (rounds.length - 1) : 0.5) * (right - left);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  const label = (at, down, anchor, text) => svg("text", { x: at, y: down, "text-anchor": anchor }, text);
  const rule = svg("line", { y1: top, y2: bottom });
  const dots = series.map(() => svg("circle", { r: 3.2 }));
  const marker = svg("g", { class: "marker" }, rule, ...dots);
  const picture = svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" },
    svg("path", { class: "axis", d: `M${left} ${top}H${right}M${left} ${bottom}H${right}` }),
    label(left - 5, top + 4, "end", short(high)),
    label(left - 5, bottom + 3, "end", short(low)),
    label(left, height - 6, "start", `round ${rounds[0].round}`),
    label(right, height - 6, "end", rounds.length > 1 ? rounds.at(-1).round : ""),
    ...series.map(({ style, values }) => svg("path", { class: `line ${style ?? ""}`, d: line(values, x, y) })),
    marker,
  );
  picture.addEventListener("click", (event) => {
    const bounds = picture.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) / bounds.width) * width;
    goTo(Math.round(((at - left) / (right - left)) * (rounds.length - 1)));
  });
  const caption = html("div", {});
  return {
    figure: html("figure", {}, html("figcaption", {}, html("b", {}, title), caption), picture),
    mark(position) {
      rule.setAttribute("x1", x(position));
      rule.setAttribute("x2", x(position));
      series.forEach(({ values }, index) => {
        const value = values[position];
        dots[index].toggleAttribute("hidden", value === null);
        if (value === null) return;
        dots[index].setAttribute("cx", x(position));
        dots[index].setAttribute("cy", y(value));
      });
      const words = ({ name = "", values }) => name + (values[position] === null ? "–" : short(values[position]));
      caption.textContent = series.map(words).join(" ");
      picture.setAttribute("aria-label", `${title}; at round ${rounds[position].round}: ${caption.textContent}`);
    },
  };
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

// -- Going from round to round

const trace = JSON.parse(byId("trace").textContent);
const completions = Map.groupBy(trace.rounds, (round) => round.index);
let completion = [];
let charts = [];
let position = 0;

function chooseCompletion(index) {
  completion = completions.get(index);
  charts = chartsOf(completion);
  byId("charts").replaceChildren(...charts.map(({ figure }) => figure));
  byId("slider").max = completion.length - 1;
  const summary = totals(completion).map(([name, value]) => `${name} ${value}`);
  byId("completion-totals").textContent = `Completion ${index}: ${summary.join(" · ")}`;
  // One height for all rounds, that of the tallest tree, so that nothing below it jumps.
  const leaves = (round) =>
    1 + round.token_ids.length - new Set(round.parents.filter((parent) => parent !== ROOT)).size;
  const height = 2 * MARGIN + ROW * Math.max(...completion.map(leaves));
  byId("tree-panel").style.height = `min(${height + 16}px, 62vh)`;
  goTo(0);
}

function goTo(wanted) {
  position = Math.min(Math.max(wanted, 0), completion.length - 1);
  const round = completion[position];
  const place = `round ${round.round} (${position + 1} of ${completion.length})`;
  byId("slider").value = position;
  byId("slider").setAttribute("aria-valuetext", place);
  byId("shown").textContent = place;
  byId("previous").disabled = position === 0;
  byId("next").disabled = position === completion.length - 1;
  const before = completion.slice(0, position).flatMap((earlier) => earlier.committed_texts);
  drawText(round, before.join(""));
  drawTree(round, before.join(""));
  for (const each of charts) each.mark(position);
}

function start() {
  document.title = `${trace.name} – DynaTree trace`;
  byId("name").textContent = trace.name;
  byId("totals").append(
    ...totals(trace.rounds).map(([name, value]) =>
      html("div", {}, html("dt", {}, name), html("dd", {}, String(value))),
    ),
  );
  byId("completion").append(...[...completions.keys()].map((index) => html("option", { value: index }, String(index))));
  byId("completion-choice").hidden = byId("completion-totals").hidden = completions.size === 1;
  byId("completion").addEventListener("change", (event) => chooseCompletion(Number(event.target.value)));
  byId("slider").addEventListener("input", (event) => goTo(event.target.valueAsNumber));
  byId("previous").addEventListener("click", () => goTo(position - 1));
  byId("next").addEventListener("click", () => goTo(position + 1));
  byId("tree").addEventListener("pointerover", describeNode);
  byId("tree").addEventListener("focusin", describeNode);
  byId("tree").addEventListener("keydown", walkTree);
  document.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.target === document.body) goTo(position + step);
  });
  chooseCompletion(completions.keys().next().value);
}

start();
