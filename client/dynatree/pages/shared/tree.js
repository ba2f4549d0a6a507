// The draft tree of a round: its nodes, their places, their drawing.

const ROOT = -1;

const ROW = 30;
const BOX = 22;
const PADDING = 8;
const MARGIN = 14;
const LABEL_LENGTH = 18;
const gap = () => (narrow.matches ? 16 : 30);
const rootLength = () => (narrow.matches ? 8 : LABEL_LENGTH);
const GROWTH_MILLISECONDS = 240; // of a whole tree, where it is seen to grow

// The root of a round's tree. Nodes have kind, label, title, parent, children, depth and path (probability).
function treeOf(round, textBefore) {
  const root = {
    kind: "root",
    label: `${lastWords(visible(textBefore.slice(-4 * LABEL_LENGTH)), rootLength()) || "…"} •`,
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
    node.width = Math.ceil(widthOf(node.label, NODE_FONT)) + 2 * PADDING;
    nodes.push(node);
    stack.push(...[...node.children].reverse());
  }
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const starts = [MARGIN];
  for (const width of widths) starts.push(starts.at(-1) + width + gap());
  for (const node of nodes) {
    node.x = node.kind === "root" ? starts[1] - gap() - node.width : starts[node.depth];
    node.columnEnd = starts[node.depth + 1] - gap();
  }
  return { nodes, width: starts.at(-1) - gap() + MARGIN, height: 2 * MARGIN + ROW * rows };
}

function edge(node) {
  const { parent } = node;
  const middle = (parent.columnEnd + node.x) / 2;
  const curve = `C${middle} ${parent.y} ${middle} ${node.y} ${node.x} ${node.y}`;
  const drawn = svg("path", {
    class: `edge ${node.kind}`,
    d: `M${parent.x + parent.width} ${parent.y}H${parent.columnEnd}${curve}`,
  });
  drawn.style.setProperty("--depth", node.depth);
  return drawn;
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
  const drawn = svg(
    "g",
    { class: `node ${kind}`, role: "img", tabindex: kind === "root" ? 0 : -1, "aria-label": title },
    svg("title", {}, title),
    svg("rect", { class: "halo", ...frame(4) }),
    ...(kind === "root" ? [] : [svg("rect", { class: "box", ...frame(0) })]),
    svg("text", { x: x + PADDING, y: y + 4.5 }, node.label),
  );
  drawn.style.setProperty("--depth", node.depth);
  drawn.style.setProperty("--path", node.path);
  return drawn;
}

const depthOf = (nodes) => Math.max(0, ...nodes.filter(({ kind }) => kind !== "bonus").map(({ depth }) => depth));

class TreeView {
  #tree = byId("tree");
  #panel = byId("tree-panel");
  #nodes = [];

  constructor() {
    this.#tree.addEventListener("pointerover", (event) => this.#describe(event.target));
    this.#tree.addEventListener("focusin", (event) => this.#describe(event.target));
    this.#tree.addEventListener("keydown", (event) => this.#walk(event));
  }

  get hasFocus() {
    return this.#tree.contains(document.activeElement);
  }

  clear() {
    this.#nodes = [];
    this.#tree.replaceChildren();
    byId("facts").textContent = byId("detail").textContent = "";
  }

  // What is drawn stays until the first tree of the next completion.
  wait() {
    byId("facts").textContent = "waiting for the first round";
    byId("detail").textContent = "";
  }

  // `grows`: the tree is seen to grow, level by level, and then to be accepted.
  draw(round, textBefore, grows) {
    const { nodes, width, height } = layOut(treeOf(round, textBefore));
    const depth = depthOf(nodes);
    // Thick edges lie over thin ones.
    const edges = nodes.slice(1).sort((a, b) => (a.kind !== "drafted") - (b.kind !== "drafted"));
    for (const node of nodes) node.drawn = box(node);
    this.#nodes = nodes;
    this.#tree.replaceChildren(...edges.map(edge), ...nodes.map((node) => node.drawn));
    this.#tree.setAttribute("height", height);
    this.#tree.classList.toggle("growing", grows);
    this.#tree.style.setProperty("--depths", depth);
    this.#tree.style.setProperty("--level", `${GROWTH_MILLISECONDS / Math.max(depth, 1)}ms`);
    this.#tree.setAttribute(
      "aria-label",
      `Draft tree of round ${round.round}: ${quantity(round.token_ids.length, "node")}, ` +
        `${round.accepted_nodes.length} accepted. Arrow keys move between nodes.`,
    );
    byId("facts").textContent = [
      `${quantity(round.token_ids.length, "node")}, depth ${depth}`,
      `${round.accepted_nodes.length} accepted`,
      `${round.committed_ids.length} committed`,
      `${quantity(round.base_length, "token")} before`,
      `draft ${milliseconds(round.draft_seconds)}`,
      `verify ${milliseconds(round.verify_seconds)}`,
    ].join(" · ");
    byId("detail").textContent = "Point at a node, or reach the tree with Tab and walk it with the arrow keys.";
    this.#scrollToAcceptedEnd(width);
  }

  // A large tree scrolls: its accepted path ends in view, and no column is cut at the left.
  #scrollToAcceptedEnd(width) {
    const end = this.#nodes.findLast(({ kind }) => kind === "bonus" || kind === "accepted") ?? this.#nodes[0];
    const { clientWidth, clientHeight } = this.#panel;
    const least = end.x + end.width + MARGIN - clientWidth;
    const columns = this.#nodes.map(({ x }) => x - MARGIN).filter((x) => x >= least);
    const left = least > 0 ? Math.min(end.x - MARGIN, ...columns) : 0;
    this.#tree.setAttribute("width", Math.max(width, left + clientWidth));
    this.#panel.scrollTo(left, end.y - clientHeight / 2);
  }

  #describe(target) {
    const node = this.#nodes.find(({ drawn }) => drawn.contains(target));
    if (node) byId("detail").textContent = node.title;
  }

  // Left and right are parent and first child; up and down are the neighbours of the same depth.
  #walk(event) {
    const node = this.#nodes.find(({ drawn }) => drawn === document.activeElement);
    if (!node) return;
    const column = this.#nodes.filter(({ depth }) => depth === node.depth);
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
}
