"""The sections about speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dynatree.bench.figures import Sample, Spread, by, spread
from dynatree.bench.report.charts import Bars, Lines, Reference
from dynatree.bench.report.content import Block, Section
from dynatree.bench.report.observations import Observation, Record, by_data_set, by_method, by_setting, observations
from dynatree.bench.tables.cells import quartiles, ratio, speed
from dynatree.bench.tables.table import Marked, Table

LENGTHS = (100, 200, 300, 500, 750, 1000, 1500)  # new tokens
_METHODS = ("compare", "ablation")  # the commands that measure whole methods side by side
_PLAIN = Reference("plain decoding", 1.0)


def throughput(records: Sequence[Record]) -> Section:
    """Speedup and throughput by method and data set."""
    return Section(
        "Throughput and speedup",
        "Bars are medians over prompts and repetitions, whiskers quartiles. Tokens/s are new tokens by wall-clock "
        "seconds at the client, the prompt's forward included. A speedup is a run's tokens/s by those of plain "
        "decoding on the same prompt in the same repetition.",
        {str(setting): _throughput(group) for setting, group in _by_setting(records).items()},
    )


def _throughput(group: Sequence[Observation]) -> list[Block]:
    data_sets = {name: by_method(each) for name, each in by_data_set(group).items()}
    labels = list(by_method(group))

    def bars(figure: Callable[[Sample], float | None]) -> Mapping[str, list[Spread | None]]:
        return {
            name: [spread(map(figure, methods.get(label, ()))) for label in labels]
            for name, methods in data_sets.items()
        }

    return [
        Bars("Speedup over plain decoding", "speedup", labels, bars(lambda sample: sample.speedup), _PLAIN),
        Bars("Throughput", "tokens/s", labels, bars(lambda sample: sample.rate)),
        *(_throughput_table(name, methods) for name, methods in data_sets.items()),
    ]


def _throughput_table(data_set: str, methods: Mapping[str, Sequence[Sample]]) -> Table:
    rows = []
    for label, each in methods.items():
        rates, speedups = spread(sample.rate for sample in each), spread(sample.speedup for sample in each)
        over_transformers = spread(sample.over_transformers for sample in each)
        rows.append(
            [
                label,
                str(len(each)),
                speed(rates),
                quartiles(rates, speed),
                ratio(speedups),
                quartiles(speedups, ratio),
                ratio(over_transformers),
                quartiles(over_transformers, ratio),
            ]
        )
    headings = ["method", "runs", "tokens/s", "quartiles", "speedup", "quartiles", "over transformers", "quartiles"]
    return Table(data_set, headings, rows).without_empty_columns()


def matrix(records: Sequence[Record]) -> Section:
    """Data set x method."""
    return Section(
        "Speedup by data set",
        "Median speedups over plain decoding; those below 1, which slow decoding down, are marked.",
        {str(setting): [_matrix(group)] for setting, group in _by_setting(records).items()},
    )


def _matrix(group: Sequence[Observation]) -> Table:
    data_sets = {name: by_method(each) for name, each in by_data_set(group).items()}
    rows = [
        [label, *(_speedup_cell(data_sets[name].get(label, ())) for name in data_sets)] for label in by_method(group)
    ]
    return Table("Speedup over plain decoding", ["method", *data_sets], rows)


def _speedup_cell(samples: Sequence[Sample]) -> str:
    speedups = spread(sample.speedup for sample in samples)
    slower = speedups is not None and speedups.median < 1
    return Marked(ratio(speedups)) if slower else ratio(speedups)


def by_length(records: Sequence[Record]) -> Section:
    """Speedup by the number of new tokens."""
    groups: dict[str, Sequence[Block]] = {}
    for setting, group in _by_setting(records).items():
        charts = [chart for name, each in by_data_set(group).items() for chart in _length_charts(name, each)]
        if charts:
            groups[str(setting)] = charts
    return Section(
        "Speedup by length of the output",
        "The rate until T tokens had come, by that of the reference on the same prompt in the same repetition, from "
        "the times of arrival at the client. Medians and quartiles over runs.",
        groups,
    )


def _length_charts(data_set: str, group: Sequence[Observation]) -> list[Lines]:
    references: dict[str, Callable[[Sample, int], float | None]] = {
        "plain decoding": Sample.speedup_until,
        "transformers": Sample.over_transformers_until,
    }
    charts = []
    for name, figure in references.items():
        lines = {label: _length_line(samples, figure) for label, samples in by_method(group).items()}
        drawn = {label: line for label, line in lines.items() if len(line) > 1}
        if drawn:
            charts.append(Lines(f"{data_set}: over {name}", "new tokens", "speedup", drawn, [Reference(name, 1.0)]))
    return charts


def _length_line(
    samples: Sequence[Sample], figure: Callable[[Sample, int], float | None]
) -> list[tuple[float, Spread]]:
    points = ((float(length), spread(figure(sample, length) for sample in samples)) for length in LENGTHS)
    return [(length, value) for length, value in points if value is not None]


def by_prompt_length(records: Sequence[Record]) -> Section:
    """Speedup by the length of the prompt, where one data set was measured at several."""
    groups: dict[str, Sequence[Block]] = {}
    for setting, group in _by_setting(records).items():
        charts = [
            _prompt_length_chart(name, each)
            for name, each in by(group, lambda each: each.data_set).items()
            if len({each.prompt_tokens for each in each}) > 1
        ]
        if charts:
            groups[str(setting)] = charts
    return Section(
        "Speedup by length of the prompt",
        "Median speedups over plain decoding and quartiles, of measurements with prompts of different lengths.",
        groups,
    )


def _prompt_length_chart(data_set: str, group: Sequence[Observation]) -> Lines:
    lengths = dict(sorted(by(group, lambda each: each.prompt_tokens).items()))
    methods = {length: by_method(each) for length, each in lengths.items()}
    lines: dict[str, list[tuple[float, Spread]]] = {label: [] for label in by_method(group)}
    for length, samples in methods.items():
        for label, each in samples.items():
            speedups = spread(sample.speedup for sample in each)
            if speedups is not None:
                lines[label].append((length, speedups))
    return Lines(data_set, "prompt tokens", "speedup", lines, [_PLAIN])


def _by_setting(records: Sequence[Record]) -> dict[str, list[Observation]]:
    return {str(setting): group for setting, group in by_setting(observations(records, *_METHODS)).items()}
