// The text that rounds committed. A round's `pieces` are the texts of its tokens; accepted draft tokens come first.

class CommittedText {
  #panel = byId("text");
  #passages = []; // the rounds that are shown, as elements
  #marked = null; // the position of the round that is marked
  #first = html("span", { class: "bonus" });
  #tail = html("span", {});

  // Begins anew behind `opening`.
  open(...opening) {
    this.#passages = [];
    this.#marked = null;
    this.#tail.textContent = "";
    this.#panel.replaceChildren(...opening, this.#first, this.#tail);
  }

  // Shows rounds up to `end` and marks the one at `position`. `first` and `tail` stand before and behind all, as text that
  // belongs to no round.
  show(first, rounds, position, end, tail) {
    // A text that is set lays out all that follows it.
    if (this.#first.textContent !== first) this.#first.textContent = first;
    while (this.#passages.length > end + 1) this.#passages.pop().remove();
    const added = rounds.slice(this.#passages.length, end + 1).map((round) => html("span", {}, ...runs(round)));
    this.#tail.before(...added);
    this.#passages.push(...added);
    if (this.#tail.textContent !== tail) this.#tail.textContent = tail;
    if (this.#marked === position || !this.#passages[position]) return;
    this.#passages[this.#marked]?.replaceChildren(...runs(rounds[this.#marked]));
    this.#passages[position].replaceChildren(...marks(rounds[position]));
    this.#marked = position;
  }

  get isAtEnd() {
    return this.#panel.scrollHeight - this.#panel.scrollTop - this.#panel.clientHeight < 4;
  }

  scrollToEnd() {
    this.#panel.scrollTop = this.#panel.scrollHeight;
  }
}

const kindOf = (round, place) => (place < round.accepted_nodes.length ? "accepted" : "bonus");

// The round's tokens one by one.
const marks = (round) =>
  round.pieces.map((piece, place) => html("mark", { class: kindOf(round, place) }, piece.replaceAll("\n", "↵\n")));

// The accepted tokens as one, and the target's own.
function runs(round) {
  const count = round.accepted_nodes.length;
  return [round.pieces.slice(0, count), round.pieces.slice(count)]
    .map((pieces) => pieces.join(""))
    .map((text, run) => html("span", { class: run === 0 ? "accepted" : "bonus" }, text))
    .filter((drawn) => drawn.textContent !== "");
}
