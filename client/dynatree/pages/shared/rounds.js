// One completion, round by round: a slider, and the text, the tree and the charts at the round where it stands.
//
// A completion has `rounds` (as a trace has them, and each with the `pieces` of text that its tokens are), `textBefore`
// the first round, which ends with its `first` token, and a `tail` of text that no round holds. All may grow while it is
// shown.

class RoundView {
  #completion;
  #position = 0;
  #following = false; // at the newest round, and on to the next when it comes
  #charted = 0; // rounds that the charts show
  #text = new CommittedText();
  #tree = new TreeView();
  #charts = new Charts((position) => this.goTo(position));

  constructor() {
    byId("slider").addEventListener("input", ({ target }) => {
      // Its end stands for the newest round, though rounds may have come since it was drawn.
      this.goTo(target.value === target.max ? this.#last : target.valueAsNumber);
    });
    byId("previous").addEventListener("click", () => this.goTo(this.#position - 1));
    byId("next").addEventListener("click", () => this.goTo(this.#position + 1));
    document.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step && event.target === document.body) this.goTo(this.#position + step);
    });
  }

  // Shows a completion from its first round. `opening` are the elements of its text that stand before. One that has no
  // round yet leaves the tree and the charts as they are, dimmed, until it has.
  open(completion, ...opening) {
    this.#completion = completion;
    this.#charted = 0;
    this.#text.open(...opening);
    const waits = completion.rounds.length === 0;
    byId("rounds").classList.toggle("waiting", waits);
    if (waits) this.#tree.wait();
    this.goTo(0);
  }

  // The completion ended; where it has no round, nothing is left of another's.
  close() {
    if (this.#completion.rounds.length > 0) return;
    byId("rounds").classList.remove("waiting");
    this.#tree.clear();
    this.#charts.clear();
  }

  // The reader's choice.
  goTo(wanted) {
    this.#position = Math.max(0, Math.min(wanted, this.#last));
    this.#following = this.#position >= this.#last;
    this.#drawText();
    this.#text.scrollToEnd();
    this.#drawCharts();
    this.#drawTree(false);
  }

  // Rounds or text came: the text and the slider's range grow.
  extend() {
    const isAtEnd = this.#text.isAtEnd;
    this.#drawText();
    if (isAtEnd) this.#text.scrollToEnd();
  }

  // Whether rounds came that `advance` has not shown.
  get isBehind() {
    return this.#charted < this.#completion.rounds.length;
  }

  // The charts grow, and a reader at the newest round goes on to the one that is the newest now, unless the tree has the
  // focus: then it is being read.
  advance() {
    const goesOn = this.#following && !this.#tree.hasFocus;
    if (goesOn) this.#position = this.#last;
    this.extend();
    this.#drawCharts();
    if (goesOn) this.#drawTree(true);
  }

  get #last() {
    return this.#completion.rounds.length - 1;
  }

  #drawText() {
    const { first, rounds, tail } = this.#completion;
    const end = this.#following ? this.#last : this.#position;
    this.#text.show(first, rounds, this.#position, end, this.#following ? tail : "");
    this.#drawPlace();
  }

  #drawPlace() {
    const count = this.#completion.rounds.length;
    const round = this.#completion.rounds[this.#position];
    const place = round ? `round ${round.round} (${this.#position + 1} of ${count})` : "no round yet";
    const slider = byId("slider");
    slider.max = Math.max(0, this.#last);
    slider.value = this.#position;
    slider.disabled = count === 0;
    slider.setAttribute("aria-valuetext", place);
    byId("shown").textContent = place;
    byId("previous").disabled = this.#position === 0;
    byId("next").disabled = this.#position >= this.#last;
  }

  #drawCharts() {
    if (this.isBehind) {
      this.#charts.draw(this.#completion.rounds);
      this.#charted = this.#completion.rounds.length;
    }
    if (this.#charted > 0) this.#charts.mark(this.#position);
  }

  #drawTree(grows) {
    const round = this.#completion.rounds[this.#position];
    if (!round) return;
    byId("rounds").classList.remove("waiting");
    const before = this.#completion.rounds.slice(0, this.#position).flatMap(({ pieces }) => pieces);
    this.#tree.draw(round, this.#completion.textBefore + before.join(""), grows);
  }
}
