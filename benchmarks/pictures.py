"""The pictures of docs/, out of benchmarks/results/ and of one traced round of the shipped pair.

python benchmarks/pictures.py
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import figures
import matplotlib
import operation_figures
from matplotlib.figure import Figure
from pandas import concat

from dynatree.bench import plots
from dynatree.bench.figures import Cell, cells
from dynatree.bench.methods import PLAIN
from dynatree.bench.report import cost_curve
from dynatree.cli.serve import pair_settings
from dynatree.cli.service_pair import service_pair
from dynatree.client import RoundTrace

OUT = figures.HERE.parent / "docs" / "pictures"
SHOWN = ("transformers", "linear:", "fixed:", "throughput", "dynatree", figures.LLAMA_CPP)
PROMPT = "It was a bright cold morning, and the captain"
NODES = range(9, 15)  # of the tree that is drawn


def main() -> None:
    """Write every picture."""
    OUT.mkdir(exist_ok=True)
    plots.save(tree(*traced_round()), OUT / "tree.svg")
    plots.save(offloaded(), OUT / "offloaded.svg")
    if figures.results():
        plots.save(throughput(), OUT / "throughput.svg")
        plots.save(cost_curve(figures.report("costs"), "nodes", "A round of the 2.8B shape"), OUT / "costs.svg")


def offloaded() -> Figure:
    """A round's time by the rows of its forward, where layers are offloaded."""
    report = operation_figures.operated("streamed-12b")
    rounds = {1: [run["round, s"] for run in report["runs"] if run["policy"] == "plain"]}
    for run in report["rows"]:
        rounds.setdefault(1 + round(run["nodes a round"]), []).append(run["round, s"])
    line = [(rows, Cell(median(each), min(each), max(each), len(each))) for rows, each in sorted(rounds.items())]
    disk = max(report["disk before, bytes/s"], report["disk after, bytes/s"])
    reading = {"bytes / fio's speed": report["streamed bytes"] / disk}
    return plots.lines("11.8B shape in 8 GiB: a round by its rows", "rows", "s", {"round": line}, reading)


def traced_round() -> tuple[str, RoundTrace]:
    """The round, of a tree that branches, of which the longest path was accepted; and the end of the text before it."""
    with service_pair(*pair_settings("embedded", "embedded")) as pair:
        settings = {"depth": 4.0, "breadth": 3.0, "tau": 0.04}
        completion = pair.client.generate(
            PROMPT, max_new_tokens=120, ignore_eos=True, policy="fixed", policy_settings=settings, trace=True
        )
    whole = [
        each for each in completion.trace if len(each.token_ids) in NODES and all(map(str.isprintable, each.texts))
    ]
    best = max(whole, key=lambda each: (0 < len(each.accepted_nodes) < len(each.token_ids), len(each.accepted_nodes)))
    before = PROMPT + "".join(text for each in completion.trace[: best.round] for text in each.committed_texts)
    return before, best


def tree(before: str, traced: RoundTrace) -> Figure:
    """Draw a round's tree: the end of the text before it, accepted and rejected nodes, and the target's next token."""
    places = _places(traced.parents)
    accepted = set(traced.accepted_nodes)
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(plots.WIDTH, 0.5 + 0.42 * (1 + max(y for _, y in places.values()))))
        axes = figure.add_subplot()
        axes.set_axis_off()
        for node, parent in enumerate(traced.parents):
            (x0, y0), (x1, y1) = places[parent], places[node]
            colour, width = (plots.GREEN, 2.0) if node in accepted else (plots.MUTED, 0.7)
            axes.plot([x0, x1], [y0, y1], color=colour, linewidth=width, zorder=1)
        last = traced.accepted_nodes[-1] if accepted else -1
        x, y = places[last]
        if len(traced.committed_texts) > len(accepted):
            axes.plot([x, x + 1], [y, y - 0.75], color=plots.BLUE, linewidth=2.0, linestyle="--", zorder=1)
            _label(axes, x + 1, y - 0.75, f"{_shown(traced.committed_texts[-1])}\nthe target's own", plots.BLUE)
        _label(axes, *places[-1], f"…{_shown(before[-12:])}\ncommitted", plots.INK)
        for node, text in enumerate(traced.texts):
            colour = plots.GREEN if node in accepted else plots.MUTED
            _label(axes, *places[node], f"{_shown(text)}\n{traced.probabilities[node]:.2f}", colour)
        axes.set_xlim(-0.5, max(x for x, _ in places.values()) + 1.5)
        axes.invert_yaxis()
    return figure


def _shown(text: str) -> str:
    """A token's text, whose spaces and line breaks can be seen."""
    return text.replace(" ", "␣").replace("\n", "↵")


def _label(axes: matplotlib.axes.Axes, x: float, y: float, text: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": colour}
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=colour, bbox=box, zorder=2)


def _places(parents: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Where nodes are drawn, the root being -1: x is the depth, y a row for each leaf, parents amid their children."""
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(parents))}
    for node, parent in enumerate(parents):
        children[parent].append(node)
    places: dict[int, tuple[float, float]] = {}
    rows = 0

    def place(node: int, depth: int) -> float:
        nonlocal rows
        if children[node]:
            below = [place(child, depth + 1) for child in children[node]]
            y = (below[0] + below[-1]) / 2
        else:
            y, rows = float(rows), rows + 1
        places[node] = (float(depth), y)
        return y

    place(-1, 0)
    return places


def throughput() -> Figure:
    """Ratios to plain decoding by method, over the prompts of all texts; llama.cpp's over those that it was given."""
    best = figures.best_drafting()
    found = pooled([f"llama-cpp-{name}" for name in figures.llama_cpp_texts()]) | pooled([*figures.texts()])
    shown = {
        f"{figures.kind_of(label).replace('*', '').replace('`', '')} ({cell.prompts} prompts)": cell
        for label, cell in sorted(found.items(), key=lambda each: each[1].median)
        if label == best or (label.startswith(SHOWN) and not label.startswith(f"{figures.LLAMA_CPP}, "))
    }
    title = "One user, greedy, 2.8B shape: median over prompts, and range"
    figure = plots.bars(title, "tokens/s, times plain decoding's", {"": shown}, "plain decoding")
    [axes] = figure.axes
    for place, cell in enumerate(shown.values()):
        axes.text(0.06, place, f"{cell.median:.1f}", color="white", fontweight="bold", va="center")
    return figure


def pooled(names: Sequence[str]) -> dict[str, Cell]:
    """The ratios to plain decoding over the prompts of several files."""
    runs = concat([figures.runs(name).assign(text=name) for name in names])
    runs["prompt"] = runs["text"] + runs["prompt"].astype(str)  # each text has a prompt 0
    return cells(runs, "rate", over=PLAIN.label)


if __name__ == "__main__":
    main()
