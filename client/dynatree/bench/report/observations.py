"""The runs of many records in groups that may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynatree.bench.figures import Sample, by, samples, spread
from dynatree.bench.record import Report
from dynatree.bench.tables.cells import sampling


@dataclass(frozen=True)
class Record:
    """A measurement and the name of its file."""

    file: str
    report: Report

    @property
    def data_set(self) -> str:
        """The short name of its prompts."""
        prompts = self.report["prompts"]
        return str(prompts.get("data_set") or prompts["file"].rpartition(".")[0] or prompts["file"])

    @property
    def prompt_tokens(self) -> int:
        """The median length of its prompts."""
        return int(median(self.report["prompts"]["tokens"] or [0]))


@dataclass(frozen=True)
class Setting:
    """What runs must share to be compared."""

    models: str
    sampling: str
    max_new_tokens: int

    def __str__(self) -> str:
        return f"{self.models}; {self.sampling}; {self.max_new_tokens} new tokens"


@dataclass(frozen=True)
class Observation:
    """A sample, and what it was measured under."""

    sample: Sample
    setting: Setting
    data_set: str
    prompt_tokens: int


def observations(records: Iterable[Record], *commands: str) -> list[Observation]:
    """The runs of the records of these commands."""
    return [
        Observation(sample, setting_of(record.report, sample), record.data_set, record.prompt_tokens)
        for record in records
        if record.report["command"] in commands
        for sample in samples(record.report)
    ]


def setting_of(report: Report, sample: Sample) -> Setting:
    """The setting of one run."""
    return Setting(
        models=models_of(report),
        sampling=sampling(sample.run["temperature"], [sample.run]),
        max_new_tokens=report["options"]["max_new_tokens"],
    )


def models_of(report: Report) -> str:
    """The two models, their dtypes and devices, and the processor and threads where known, in words."""
    target, draft = report["models"]["target"], report["models"]["draft"]
    where = _where(target) if _where(target) == _where(draft) else f"{_where(target)} and {_where(draft)}"
    machine = report.get("machine", {})
    details = [where, machine.get("cpu"), machine.get("threads") and f"threads: {machine['threads']}"]
    return f"{target['name']} with {draft['name']}, {', '.join(filter(None, details))}"


def _where(model: dict[str, Any]) -> str:
    return f"{model['dtype']} on {model['device']}"


def by_setting(observed: Iterable[Observation]) -> dict[Setting, list[Observation]]:
    """In groups that may be compared."""
    return by(observed, lambda each: each.setting)


def by_data_set(group: Sequence[Observation]) -> dict[str, list[Observation]]:
    """By data set, whose name says the length of the prompts where the group has several."""
    lengths = {(each.data_set, each.prompt_tokens) for each in group}
    several = {name for name, _ in lengths if sum(other == name for other, _ in lengths) > 1}
    return by(
        sorted(group, key=lambda each: (each.data_set, each.prompt_tokens)),
        lambda each: f"{each.data_set}, {each.prompt_tokens} tokens" if each.data_set in several else each.data_set,
    )


def by_method(group: Iterable[Observation]) -> dict[str, list[Sample]]:
    """The samples by label, those of the highest median speedup first."""
    labelled = by((each.sample for each in group), lambda sample: sample.label)
    return dict(sorted(labelled.items(), key=lambda item: -_median_speedup(item[1])))


def _median_speedup(group: Sequence[Sample]) -> float:
    speedups = spread(sample.speedup for sample in group)
    return speedups.median if speedups else 0.0
