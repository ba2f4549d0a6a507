// Elements of the page. Whatever they are given becomes text, never markup.

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

// Terms and their figures, for a description list.
const definitions = (pairs) =>
  pairs.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, String(value))));

const narrow = matchMedia("(max-width: 600px)"); // a telephone, as in the style

const LABEL_FONT = "10px system-ui, sans-serif"; // of the charts
const NODE_FONT = "bold 13px ui-monospace, monospace"; // at its widest

const ruler = document.createElement("canvas").getContext("2d");

// Pixels of a text in a font.
function widthOf(text, font) {
  ruler.font = font;
  return ruler.measureText(text).width;
}
