"""The experiments behind each table and figure of the papers, as data: no setting is left to a server's default.

Versions 000 to 003 are DynaTree's, "dyspec" is DySpec. A preset shows one table or figure and needs some experiments,
each of which becomes one record of `dynatree bench compare`. Presets share experiments.

The DynaTree papers give no unit of L_max. Their public scripts cut prompts at L_max characters, and so do the presets:
800 tokens and T = 1,500 new ones would not fit into Pythia's context of 2,048. A token is taken for 4 characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynatree.bench.methods import Method

if TYPE_CHECKING:
    from dynatree.cli.arguments import Setting
    from dynatree.client import SamplingScheme

DYNATREE_VERSIONS = ("000", "001", "002", "003")
DYSPEC = "dyspec"
VERSIONS = (*DYNATREE_VERSIONS, DYSPEC)

NEEDS = {
    "DynaTree": "Pythia-2.8B with Pythia-70M on an A100, in 16 bits",
    "DySpec": "Llama-2 7B, 13B and 70B with JackFram's 68M or Llama-2 7B on an A100 of 40 GB",
}
DATA_SETS = {
    "wikitext-2": "WikiText-2",
    "pg-19": "PG-19",
    "c4": "C4",
    "openwebtext": "OpenWebText",
    "cnn-dailymail": "CNN DailyMail",
}
COUNT = 10  # N, DynaTree's number of prompts
DYSPEC_COUNT = 1000  # pieces of each data set (appendix B)
WARMUP = 2  # W
CHARACTERS_PER_TOKEN = 4
LENGTHS = (100, 200, 300, 500, 750, 1000, 1500)  # T, from the public logs: the papers plot it without numbers
PROMPT_LENGTHS = (200, 400, 800, 1200, 1600)  # L_max in characters; our choice: the papers plot it without numbers


@dataclass(frozen=True)
class Row:
    """A method, and the row of the paper's table to which it corresponds."""

    method: Method
    paper: str

    @property
    def is_listed(self) -> bool:
        """Whether the method follows Algorithm 1's tree, not the tree that the text of section 3.3 describes."""
        return ("root", "single") in self.method.settings


@dataclass(frozen=True)
class Experiment:
    """Methods on prompts of one data set, beside plain decoding; it gives one record.

    Attributes:
        name: Name of the record's file.
        data_set: One of `DATA_SETS`.
        rows: Methods other than plain decoding; a method `sequoia` without rates gets rates measured beforehand.
        new_tokens: T, the tokens of each completion.
        prompt_tokens: Length of the prompts.
        temperature: Sampling temperature; 0 is greedy.
        scheme: Sampling scheme of draft and target at temperatures above 0.
        count: N, the number of prompts.
        warmup: W, the number of warm-up prompts.
        max_tree_nodes: Tree size that the services must admit.
        trees: Whether the record keeps every round's tree.
    """

    name: str
    data_set: str
    rows: tuple[Row, ...]
    new_tokens: int
    prompt_tokens: int
    temperature: float = 0.0
    scheme: SamplingScheme = "residual"
    count: int = COUNT
    warmup: int = WARMUP
    max_tree_nodes: int = 256
    trees: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens generated."""
        return (len(self.rows) + 1) * (self.count + self.warmup) * self.new_tokens


@dataclass(frozen=True)
class Preset:
    """A table or a figure of a version.

    Attributes:
        version: One of `VERSIONS`.
        item: Kind and number, such as "table 1" or "figure 6".
        name: The view that shows it, one of `views.VIEWS`.
        title: Title in tables and plots.
        experiments: Experiments that it needs.
        notes: Remarks on points where the version contradicts itself or leaves something open.
    """

    version: str
    item: str
    name: str
    title: str
    experiments: tuple[Experiment, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_figure(self) -> bool:
        """Whether the preset is a figure, not a table."""
        return self.item.startswith("figure")


_TEXT: Mapping[str, Setting] = {"root": "committed", "prune": "remove"}  # the text of section 3.3
_LISTING: Mapping[str, Setting] = {"root": "single", "prune": "expand"}  # Algorithm 1, of every version
_RELEASED: Mapping[str, Setting] = {**_LISTING, "history": "released"}  # the authors' public code
READINGS = {"": _TEXT, ", as listed": _LISTING, ", as released": _RELEASED}  # by the suffix of labels


# where a paper does not say how the draft samples, it samples at the target's temperature (setting 0)
_DRAWING: Mapping[str, Setting] = {"draft_temperature": 0, "candidates": 32}


def _method(label: str, policy: str, settings: Mapping[str, Setting]) -> Method:
    return Method(label, policy, tuple({**_DRAWING, **settings}.items()))


def linear(k: int) -> Method:
    """Linear speculation of K tokens."""
    return _method(f"linear (K = {k})", "linear", {"depth": k})


def fixed(depth: int, breadth: int, tau: float, reading: str = "") -> Method:
    """The static tree, N_max = 256 (appendix A)."""
    settings: dict[str, Setting] = {"depth": depth, "breadth": breadth, "tau": tau, "max_nodes": 256, "calibrated": 0}
    label = f"fixed (D = {depth}, B = {breadth}, tau = {tau}){reading}"
    return _method(label, "fixed", {**settings, **READINGS[reading]})


# (tau_h, tau_l), (B_min, B_max), D_0 and D_max are from appendix A. B_mid, rho_stop, rho_deep, tau, N_max, W and a* are
# from the authors' public scripts. The steps are our choice: no version gives them.
_DYNATREE: Mapping[str, float] = {
    "tau_high": 0.9,
    "tau_low": 0.4,
    "breadth_min": 1,
    "breadth_mid": 2,
    "breadth_max": 3,
    "base_depth": 5,
    "max_depth": 8,
    "rho_stop": 0.1,
    "rho_deep": 0.5,
    "tau": 0.05,
    "max_nodes": 256,
    "window": 10,
    "target_acceptance": 0.7,
    "depth_step": 0.5,
    "tau_step": 0.05,
    "dynamic_breadth": 1,
    "dynamic_depth": 1,
    "history": 1,
    "acceptance_over_nodes": 0,
    "calibrated": 0,
}


def dynatree(label: str, changed: Mapping[str, float], reading: str = "") -> Method:
    """DynaTree, with some settings changed."""
    return _method(label + reading, "dynatree", {**_DYNATREE, **READINGS[reading], **changed})


def _dynatree_rows(k: int, tree: tuple[int, int, float], max_depth: int) -> tuple[Row, ...]:
    return (
        Row(linear(k), "Linear"),
        *(Row(fixed(*tree, reading), "Fixed") for reading in ("", ", as listed")),
        *(Row(dynatree("DynaTree", {"max_depth": max_depth}, reading), "DynaTree") for reading in READINGS),
    )


def _wikitext(name: str, rows: Iterable[Row], new_tokens: int = 1500, characters: int = 800) -> Experiment:
    return Experiment(name, "wikitext-2", tuple(rows), new_tokens, characters // CHARACTERS_PER_TOKEN)


def _pg19(name: str, rows: Iterable[Row]) -> Experiment:
    return Experiment(name, "pg-19", tuple(rows), 1500, 1000 // CHARACTERS_PER_TOKEN)


# The baselines of Tables 1 to 3: version 002 has others. Only version 003 has D_max = 9 on PG-19.
_TUNED, _SMALL = (8, 3, 0.1), (5, 2, 0.05)
_MAIN = {
    "000": (
        _wikitext("wikitext-2", _dynatree_rows(8, _TUNED, 8)),
        _pg19("pg-19", _dynatree_rows(5, _TUNED, 8)),
    ),
    "002": (
        _wikitext("wikitext-2-small", _dynatree_rows(5, _SMALL, 8)),
        _pg19("pg-19-small", _dynatree_rows(5, _SMALL, 8)),
    ),
    "003": (
        _wikitext("wikitext-2", _dynatree_rows(8, _TUNED, 8)),
        _pg19("pg-19-deep", _dynatree_rows(5, _TUNED, 9)),
    ),
}
_MAIN["001"] = _MAIN["000"]


def _ablation_rows(reading: str) -> Iterator[Row]:
    """Rows of Table 4; the fixed tree is policy `dynatree` with every component off, so rows differ in these only."""
    off = {"dynamic_breadth": 0, "dynamic_depth": 0, "history": 0}
    yield Row(dynatree("fixed (D = 5, B = 2, tau = 0.05)", off, reading), "Fixed")
    yield Row(dynatree("+ dynamic tree breadth and depth", {"history": 0}, reading), "+ Breadth & Depth")
    yield Row(dynatree("+ history adaptation (DynaTree)", {}, reading), "+ History")


_ABLATION = _wikitext(
    "ablation",
    [
        *_ablation_rows(""),
        *_ablation_rows(", as listed"),
        Row(dynatree("+ history adaptation (DynaTree)", {}, ", as released"), "+ History"),
    ],
)


def _scaling(version: str) -> tuple[Experiment, ...]:
    main = _MAIN[version][0]
    rows = [row for row in main.rows if not row.is_listed]
    rest = [_wikitext(f"{main.name}-{length}", rows, length) for length in LENGTHS if length != main.new_tokens]
    return (*rest, main)


def _prompt_lengths(version: str) -> tuple[Experiment, ...]:
    """Experiments by prompt length; Table 1's experiment supplies the prompts of 800 characters."""
    main = _MAIN[version][0]
    rows = [row for row in main.rows if not row.is_listed]
    others = (_wikitext(f"{main.name}-prompts-{each}", rows, characters=each) for each in PROMPT_LENGTHS)
    return (*others, main)


DEPTHS, BREADTHS, TAUS = (3, 4, 5, 6, 7, 8), (2, 3, 4), (0.01, 0.02, 0.03, 0.05, 0.1)  # of the public search
# Variations around the best point of the grid, as the papers plot them.
_SWEEP = _wikitext(
    "sweep",
    [
        Row(fixed(depth, breadth, tau), "")
        for depth, breadth, tau in dict.fromkeys(
            [
                *((depth, 3, 0.1) for depth in DEPTHS),
                *((8, breadth, 0.1) for breadth in BREADTHS),
                *((8, 3, tau) for tau in TAUS),
            ]
        )
    ],
)
THRESHOLDS = ((0.7, 0.2), (0.8, 0.3), (0.9, 0.4))
BRANCHES = ((1, 2), (1, 3), (1, 4), (2, 4))  # the last is in the public logs only
DEPTH_RANGES = ((4, 8), (5, 8), (5, 9), (6, 10))  # our choice: the papers plot theirs without numbers


def _sensitivity_rows() -> list[Row]:
    chosen: list[Mapping[str, float]] = [
        *({"tau_high": high, "tau_low": low} for high, low in THRESHOLDS),
        *({"breadth_min": low, "breadth_max": high} for low, high in BRANCHES),
        *({"base_depth": low, "max_depth": high} for low, high in DEPTH_RANGES),
    ]
    rows: dict[str, Row] = {}
    for changed in chosen:
        full = {**_DYNATREE, **changed}
        label = sensitivity_label(full)
        rows[label] = Row(dynatree(label, changed), label)
    return list(rows.values())


def sensitivity_label(settings: Mapping[str, float]) -> str:
    """A label of thresholds, branches and depths, as `(0.9, 0.4), (1, 3), (5, 8)`."""
    pairs = (("tau_high", "tau_low"), ("breadth_min", "breadth_max"), ("base_depth", "max_depth"))
    return ", ".join(f"({settings[one]:g}, {settings[other]:g})" for one, other in pairs)


_SENSITIVITY = _wikitext("sensitivity", [Row(fixed(*_SMALL), "Fixed"), *_sensitivity_rows()])

_MIXED = (
    "Tables 1 to 3 of this version have the fixed tree D = 8, B = 3, tau = 0.1, where its Table 4 has D = 5, B = 2: so "
    "DynaTree stands at 219.5 tokens/s there, and at 218.5 here.",
)
_TAU = ("No version has a tau of the fixed tree D = 5, B = 2: 0.05 is that of the authors' public scripts.",)


def _dynatree_presets(version: str) -> list[Preset]:
    main, small = _MAIN[version], version == "002"
    figures = {
        "000": (3, 4, 5, 6, 7, 8),
        "001": (3, 4, 5, 6, 7, 8),
        "002": (3, 4, 5, 7, 8, 9),
        "003": (4, 5, 6, 8, 7, 9),
    }[version]
    bars, progression, scaling, sensitivity, sweep, prompts = (f"figure {number}" for number in figures)
    notes = _TAU if small else ()
    memory = main if version == "003" else _MAIN["002"]
    presets = [
        Preset(version, "table 1", "throughput", "Main results", main, notes),
        Preset(version, "table 2", "latency", "Latency", main, notes),
        Preset(version, "table 3", "efficiency", "Verification efficiency", main, notes),
        Preset(version, "table 4", "ablation", "Ablation", (_ABLATION,), _TAU if small else _MIXED + _TAU),
        Preset(version, "table 6" if small else "table 5", "memory", "Peak memory", memory, _TAU),
        Preset(version, bars, "bars", "Throughput and speedup across data sets", main, notes),
        Preset(version, progression, "progression", "Ablation progression", (_ABLATION,)),
        Preset(version, scaling, "scaling", "Throughput by generation length", _scaling(version), notes),
        Preset(version, sensitivity, "sensitivity", "Sensitivity to hyperparameters", (_SENSITIVITY,)),
        Preset(version, sweep, "sweep", "Fixed trees by depth, breadth and threshold", (_SWEEP,)),
        Preset(version, prompts, "prompt-length", "Throughput by prompt length", _prompt_lengths(version), notes),
    ]
    if small:
        presets += [
            Preset(version, "table 5", "sensitivity-table", "Parameter sensitivity", (_SENSITIVITY,)),
            Preset(version, "figure 6", "scaling-efficiency", "Efficiency by generation length", _scaling(version)),
        ]
    return sorted(presets, key=lambda each: (each.is_figure, each.item))


_NEW = 128  # new tokens, and tokens of each prompt
_TEXTS = ("c4", "openwebtext", "cnn-dailymail")
# the paper gives no limits of depth, breadth and candidates; these are the policies' own
_LIMITS: Mapping[str, Setting] = {"max_depth": 64, "breadth": 256, "candidates": 256, "calibrated": 0}
# the draft's temperature is always 0.6 (section 5.1); the paper gives none for the baselines
_DYSPEC: Mapping[str, Setting] = {"draft_temperature": 0.6, **_LIMITS}


def _dyspec(nodes: int) -> Row:
    """DySpec by Algorithm 1."""
    return Row(_method("DySpec", "dyspec", {"max_nodes": nodes, **_DYSPEC}), "DySpec")


_BY_THRESHOLD = Row(
    _method("DySpec", "dyspec-threshold", {"threshold": 0.001, "max_nodes": 768, **_DYSPEC}), "DySpec"
)  # Algorithm 2, appendix B


def _dyspec_rows(nodes: int) -> tuple[Row, ...]:
    """DySpec and its baselines with 64 or 768 nodes.

    Sequoia's rates are measured. SpecInfer draws with replacement, as in its paper. Its tree of 64 nodes, 8 chains of
    8, is our choice: the paper gives none. Its tree of 768 nodes, 16 chains of 48, is from Sequoia's paper, from which
    DySpec takes the figures.
    """
    draws = {"max_nodes": nodes, "candidates": 256}
    sequoia = _method("Sequoia", "sequoia", {"max_depth": 32, **draws})
    chains, length = (8, 8) if nodes == 64 else (16, 48)
    widths = (chains, *(length - 1) * (1,))
    specinfer = _method("SpecInfer", "specinfer", {"widths": widths, "replacement": 1, **draws})
    return _dyspec(64) if nodes == 64 else _BY_THRESHOLD, Row(sequoia, "Sequoia"), Row(specinfer, "SpecInfer")


def _dyspec_experiments(nodes: int) -> tuple[Experiment, ...]:
    """An experiment for each text and temperature, since Sequoia's rates depend on both."""
    return tuple(
        Experiment(
            name=f"{text}-{nodes}-t{temperature:g}",
            data_set=text,
            rows=_dyspec_rows(nodes),
            new_tokens=_NEW,
            prompt_tokens=_NEW,
            temperature=temperature,
            count=DYSPEC_COUNT,
            max_tree_nodes=max(256, nodes),
        )
        for text in _TEXTS
        for temperature in (0.0, 0.6)
    )


def _trees(name: str, data_set: str, row: Row, temperature: float, nodes: int = 64) -> Experiment:
    """An experiment that keeps DySpec's trees."""
    return Experiment(
        name, data_set, (row,), _NEW, _NEW, temperature, count=DYSPEC_COUNT, max_tree_nodes=max(256, nodes), trees=True
    )


_64, _768 = _dyspec_experiments(64), _dyspec_experiments(768)
_ACCEPTANCE = tuple(_trees(f"acceptance-t{each:g}", "cnn-dailymail", _dyspec(64), each) for each in (0.0, 0.6))
_SIZES = (_trees("tree-sizes", "openwebtext", _BY_THRESHOLD, 0.6, 768),)
_MASKS = tuple(_trees(f"masks-{rows}", "c4", _dyspec(rows - 1), 0.0, rows) for rows in (768, 1024))
_DYSPEC_PRESETS = (
    Preset(DYSPEC, "table 1", "latency-per-token", "Latency per token, Llama-2 7B with 68M, 64 nodes", _64),
    Preset(DYSPEC, "table 2", "latency-per-token", "Latency per token, Llama-2 13B with 68M, 64 nodes", _64),
    Preset(DYSPEC, "table 3", "latency-per-token", "Latency per token, Llama-2 70B with 7B, 64 nodes", _64),
    Preset(
        DYSPEC,
        "table 4",
        "latency-per-token",
        "Latency per token, Llama-2 70B with 7B, 768 nodes",
        _768,
        ("The paper takes SpecInfer's figures of this table from Sequoia's paper.",),
    ),
    Preset(
        DYSPEC,
        "table 5",
        "random-masks",
        "Blocks of random trees' masks",
        (),
        ("The kernels' times need a GPU, and were not measured.",),
    ),
    Preset(
        DYSPEC,
        "figure 2",
        "acceptance",
        "Acceptance by draft probability",
        _ACCEPTANCE,
        (
            "The paper draws densities of min(1, T[x] / D[x]) and of T[x]. Here is the share of accepted nodes, since "
            "a record does not have T[x].",
        ),
    ),
    Preset(DYSPEC, "figure 4", "parts", "Time of a round by part", _64[:2]),
    Preset(DYSPEC, "figure 5", "tree-sizes", "Size of the tree and accepted tokens, step by step", _SIZES),
    Preset(
        DYSPEC,
        "figure 9",
        "masks",
        "Blocks of real trees' masks by prefix",
        _MASKS,
        ("The paper names neither the text nor the prefix of its block counts.",),
    ),
)

PRESETS: tuple[Preset, ...] = (
    *(each for version in DYNATREE_VERSIONS for each in _dynatree_presets(version)),
    *_DYSPEC_PRESETS,
)
