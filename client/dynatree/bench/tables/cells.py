"""Figures as the text of cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from dynatree.bench.figures import SIXTEEN_BIT, Spread, spread, statistic, unequal
from dynatree.bench.record import Run
from dynatree.bench.tables.table import NONE, Marked


def sampling(temperature: float, runs: Sequence[Run]) -> str:
    """The words for a temperature and the scheme of its runs."""
    scheme = next((run["scheme"] for run in runs if run["scheme"]), None)
    return f"temperature {temperature:g}" + (f", scheme {scheme}" if scheme else ", greedy")


def mean(runs: Sequence[Run], name: str, digits: int, factor: float = 1.0) -> str:
    """The mean of a statistic over the runs that have statistics, times `factor`."""
    values = statistic(runs, name)
    return f"{factor * fmean(values):.{digits}f}" if values else NONE


def speed(value: Spread | None) -> str:
    """A median of tokens a second."""
    if value is None:
        return NONE
    return f"{value.median:.1f}" if value.median < 100 else f"{value.median:.0f}"


def ratio(value: Spread | None) -> str:
    """A median ratio."""
    return f"{value.median:.2f}" if value else NONE


def milliseconds(value: Spread | None) -> str:
    """A median of seconds, in milliseconds."""
    return f"{1e3 * value.median:.4g}" if value else NONE


def quartiles(value: Spread | None, text: Callable[[Spread | None], str]) -> str:
    """The quartiles, each as `text` writes a median."""
    return f"{text(spread([value.low]))}-{text(spread([value.high]))}" if value else NONE


def megabytes(size: float | None) -> str:
    """Bytes in MB, 10^6."""
    return f"{size / 1e6:.0f}" if size else NONE


def equal(runs: Sequence[Run], dtype: str) -> str:
    """Whether all outputs are those of plain decoding, of a target of this dtype."""
    checked = [run for run in runs if run["equal"] is not None]
    if not checked:
        return NONE
    wrong = len(unequal(checked))
    if wrong and dtype in SIXTEEN_BIT:
        return f"{wrong} of {len(checked)} part"
    return Marked(f"NO ({wrong} of {len(checked)} differ)") if wrong else "yes"


def floor_line(step: float, weight_bytes: float, bandwidth: float) -> str:
    """A plain step, in seconds, against reading the weights at so many bytes a second."""
    floor = weight_bytes / bandwidth
    return (
        f"plain step {1e3 * step:.2f} ms; floor {1e3 * floor:.2f} ms "
        f"({megabytes(weight_bytes)} MB / {bandwidth / 1e9:.1f} GB/s) = {100 * floor / step:.0f} %"
    )
