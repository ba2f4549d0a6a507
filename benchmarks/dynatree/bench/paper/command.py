"""`dynatree bench paper`: measure presets, or read their records; print and draw them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dynatree.bench.figures import unequal
from dynatree.bench.measurements import EMBEDDED
from dynatree.bench.methods import Method
from dynatree.bench.paper.presets import DATA_SETS, DYSPEC, NEEDS, PRESETS, VERSIONS, Experiment, Preset
from dynatree.bench.paper.views import show
from dynatree.bench.printing import print_remarks, print_tables, remarks
from dynatree.bench.ranks import add_ranks, sequoia_rates
from dynatree.bench.record import Report, check_writable, load
from dynatree.bench.table import Table

SUFFIX = ".json.gz"
LAST = "003"  # the version shown if none is named
QUICK = {"count": 2, "max_new_tokens": 64, "warmup": 0}
QUIET_RATE = 400  # tokens per second of the embedded pair on two idle cores, to estimate the time


def run(options: argparse.Namespace) -> int:
    """Measure, print and save presets; return 1 if an output that must equal plain decoding's does not.

    Raises:
        DynaTreeError: The server failed, or refuses a policy or a setting.
        SystemExit: A preset does not exist, or a file, a model or an address cannot be used.
    """
    chosen = _chosen(options)
    if options.list:
        _print_list(chosen)
        return 0
    experiments = list(dict.fromkeys(each for preset in chosen for each in preset.experiments))
    records: dict[Experiment, Report] = {}
    if experiments:
        records = _kept(options.source, experiments) if options.source else dict(_measured(options, experiments))
    for preset in chosen:
        own = {each: records[each] for each in preset.experiments if each in records}
        if own or not preset.experiments:
            show(preset, own, options.plots)
    print()
    print_remarks(_remarks(records, {DYSPEC if each.version == DYSPEC else "dynatree" for each in chosen}))
    return _status(records)


def _chosen(options: argparse.Namespace) -> list[Preset]:
    """The presets that the options name; if they name no table or figure, all presets of the versions.

    Raises:
        SystemExit: The versions have no such table or figure.
    """
    versions = options.versions or (VERSIONS if options.list else [LAST])
    offered = [preset for preset in PRESETS if preset.version in versions]
    asked = [("table", each) for each in options.tables or ()] + [("figure", each) for each in options.figures or ()]
    chosen: list[Preset] = []
    for kind, name in asked:
        of_kind = [preset for preset in offered if preset.item.startswith(kind)]
        found = [each for each in of_kind if name in (each.item.removeprefix(f"{kind} "), each.is_figure and each.name)]
        if not found:
            known = ", ".join(dict.fromkeys(each.item.removeprefix(f"{kind} ") for each in of_kind))
            raise SystemExit(f"no {kind} {name} in {', '.join(versions)}; expected one of {known}")
        chosen += found
    return list(dict.fromkeys(chosen)) if asked else offered


def _print_list(presets: Sequence[Preset]) -> None:
    rows = []
    for preset in presets:
        tokens = sum(each.tokens for each in preset.experiments)
        rows.append(
            {
                "options": f"--version {preset.version} --{preset.item}",
                "shows": preset.title + (f" (--figure {preset.name})" if preset.is_figure else ""),
                "texts": ", ".join(dict.fromkeys(each.data_set for each in preset.experiments)),
                "measurements": str(len(preset.experiments)),
                "tokens": f"{tokens:,}",
                "minutes": f"{max(1.0, tokens / QUIET_RATE / 60):.0f}",
            }
        )
    notes = [
        f"Minutes are a guess: the embedded pair on two quiet cores makes some {QUIET_RATE} tokens/s. --quick and "
        "--max-new-tokens take less. Presets share measurements.",
        *(f"The figures of {name} itself need {needs}." for name, needs in NEEDS.items()),
    ]
    print_tables([Table.of("Presets", rows, notes)])


def _kept(folder: Path, experiments: Sequence[Experiment]) -> dict[Experiment, Report]:
    """Read the records of the experiments in a folder.

    Raises:
        SystemExit: The folder has no record of these experiments, or a record cannot be read.
    """
    found = {each: folder / f"{each.name}{SUFFIX}" for each in experiments}
    records = {each: load(path) for each, path in found.items() if path.exists()}
    if not records:
        names = ", ".join(path.name for path in found.values())
        raise SystemExit(f"{folder} has none of {names}")
    return records


def _measured(options: argparse.Namespace, experiments: Sequence[Experiment]) -> Iterator[tuple[Experiment, Report]]:
    """Run the experiments whose data set has a text, save their records, and reuse records of earlier runs.

    Raises:
        SystemExit: No data set has a text, or a file, a model or an address cannot be used.
    """
    from dynatree.bench.command import measuring

    texts = _texts(options)
    wanted = [each for each in experiments if each.data_set in texts]
    for name in dict.fromkeys(each.data_set for each in experiments if each.data_set not in texts):
        print(f"left out: {DATA_SETS[name]}, which has no --prompts {name}=FILE", file=sys.stderr)
    if not wanted:
        raise SystemExit("expected --prompts: a text for all data sets, or DATA_SET=FILE for some")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    nodes = max(each.max_tree_nodes for each in wanted)
    plans = {each: _options(options, each, texts[each.data_set], nodes) for each in wanted}
    for plan in plans.values():
        if plan.out is not None:
            check_writable(plan.out)
    there = {each: report for each, plan in plans.items() if (report := _there(plan)) is not None}
    yield from there.items()
    lengths = {each: plan.max_new_tokens for each, plan in plans.items()}
    lengths |= {each: report["options"]["max_new_tokens"] for each, report in there.items()}
    missing = {each: plan for each, plan in plans.items() if each not in there and not _is_twice(each, lengths)}
    if not missing:
        return
    with measuring(list(missing.values())) as measure:
        for experiment, plan in missing.items():
            if any(_lacks_rates(method) for method in plan.policies):
                plan.policies = _with_rates(plan.policies, measure(_ranks(plan)))
            yield experiment, measure(plan)


def _is_twice(experiment: Experiment, lengths: Mapping[Experiment, int]) -> bool:
    """Whether another experiment of equal length (--max-new-tokens may cut both) has all its methods on its prompts.

    If two experiments have the same methods, the first is run.
    """
    everything = list(lengths)

    def place(each: Experiment) -> tuple[object, ...]:
        return each.data_set, lengths[each], each.prompt_tokens, each.temperature, each.scheme, each.trees

    def replaces(other: Experiment) -> bool:
        mine, others = set(experiment.rows), set(other.rows)
        return mine < others or (mine == others and everything.index(other) < everything.index(experiment))

    return any(place(other) == place(experiment) and replaces(other) for other in everything)


def _there(plan: argparse.Namespace) -> Report | None:
    """The experiment's record from an earlier run, if it is complete and not smaller than this one.

    Raises:
        SystemExit: The record is of other models or another text.
    """
    if plan.out is None or not plan.out.exists():
        return None
    report, told = load(plan.out), plan.recorded["paper"]
    kept = report["options"].get("paper", {})
    if any(kept.get(name) != told[name] for name in ("models", "text")):
        raise SystemExit(f"{plan.out} is a record of other models or another text; expected another folder for --out")
    sizes = {**report["options"], "count": report["prompts"]["count"]}
    large = all(sizes[name] >= getattr(plan, name) for name in ("count", "max_new_tokens", "warmup", "repetitions"))
    same = sizes["prompt_tokens"] == plan.prompt_tokens and sizes["seed"] == plan.seed
    return report if report["complete"] and large and same else None


def _lacks_rates(method: Method) -> bool:
    return method.policy == "sequoia" and "rates" not in dict(method.settings)


def _ranks(plan: argparse.Namespace) -> argparse.Namespace:
    """The options of `dynatree bench ranks` on the same prompts, temperature and scheme."""
    return argparse.Namespace(**vars(plan) | {"measurement": "ranks", "out": None, "trees": False})


def _with_rates(methods: Sequence[Method], ranks: Report) -> list[Method]:
    """The methods, with the measured rates for those that lack rates."""
    rates = tuple(sequoia_rates(add_ranks([run["ranks"] for run in ranks["runs"]])))
    return [
        replace(method, settings=(*method.settings, ("rates", rates))) if _lacks_rates(method) else method
        for method in methods
    ]


def _texts(options: argparse.Namespace) -> dict[str, Path]:
    """The text of each data set: its own, or the text given for all.

    Raises:
        SystemExit: A named data set does not exist.
    """
    texts: dict[str, Path] = {}
    for given in options.prompts or ():
        name, _, path = given.partition("=")
        if name in DATA_SETS and path:
            texts[name] = Path(path)
        elif path and not Path(given).exists():
            raise SystemExit(f"--prompts {given}: no data set {name}; expected one of {', '.join(DATA_SETS)}")
        else:
            texts = {each: Path(given) for each in DATA_SETS} | texts
    return texts


def _options(
    options: argparse.Namespace, experiment: Experiment, text: Path, max_tree_nodes: int
) -> argparse.Namespace:
    """The experiment as the options of `dynatree bench compare`."""
    sizes = {
        "count": experiment.count,
        "max_new_tokens": experiment.new_tokens,
        "warmup": experiment.warmup,
        "prompt_tokens": experiment.prompt_tokens,
    }
    given = {name: getattr(options, name) for name in sizes if getattr(options, name) is not None}
    taken = sizes | (QUICK if options.quick else {}) | given
    taken["max_new_tokens"] = min(taken["max_new_tokens"], experiment.new_tokens)
    words = {"count": "prompts", "max_new_tokens": "new tokens", "warmup": "warm-ups", "prompt_tokens": "prompt tokens"}
    scaled = [f"{taken[name]} of {size} {words[name]}" for name, size in sizes.items() if taken[name] != size]
    recorded = {
        "experiment": experiment.name,
        "data_set": experiment.data_set,
        "scaled": scaled,
        "models": [options.target_model, options.draft_model or EMBEDDED],
        "text": text.name,
    }
    out = None if options.out is None else options.out / f"{experiment.name}{SUFFIX}"
    return argparse.Namespace(
        **{
            **vars(options),
            **taken,
            "measurement": "compare",
            "policies": [row.method for row in experiment.rows],
            "temperatures": [experiment.temperature],
            "scheme": experiment.scheme,
            "max_tree_nodes": None if options.server else max_tree_nodes,
            "prompts": text,
            "name": experiment.data_set if f"{experiment.data_set}={text}" in options.prompts else None,
            "recorded": {"paper": recorded},
            "trees": experiment.trees,
            "out": out,
        }
    )


def _remarks(records: Mapping[Experiment, Report], papers: Collection[str]) -> Iterator[str]:
    """The models and machine of each record, its remarks, and the hardware behind the papers' figures."""
    for report in records.values():
        target, draft = report["models"]["target"], report["models"]["draft"]
        yield (
            f"{report['options']['paper']['experiment']}: {target['name']} with {draft['name']}, {target['dtype']} on "
            f"{target['device']} ({report['machine']['cpu']}), {report['started'][:10]}"
        )
        for remark in remarks(report):
            yield type(remark)(f"  {remark}")
    for name, needs in NEEDS.items():
        if name.lower() in papers:
            yield (
                f"{name}'s figures are of {needs}. Rates, times and memory of another pair or machine do not compare "
                "with them, and acceptance of another pair does not either."
            )


def _status(records: Mapping[Experiment, Report]) -> int:
    exact = [each for each in records.values() if each["models"]["target"]["dtype"] == "float32"]
    return 1 if any(unequal(each["runs"]) for each in exact) else 0
