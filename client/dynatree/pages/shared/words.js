// Words and numbers

const sum = (values) => values.reduce((total, value) => total + value, 0);
const short = (number) => String(Number(number.toPrecision(3)));
const milliseconds = (seconds) => `${short(seconds * 1000)} ms`;
const share = (part, whole) => (whole > 0 ? part / whole : null);
const quantity = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const quoted = (text) => `“${visible(text)}”`;

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

// The whole words among so many last characters; where there is no whole one, what there is.
function lastWords(text, length) {
  const end = cut(text, -length);
  return end === text ? text : end.replace(/^…\S* (?=\S)/, "…");
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
