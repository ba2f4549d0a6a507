"""Confidence intervals over prompts, by the percentile bootstrap (Efron and Tibshirani, 1993, chapter 13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 95  # %
RESAMPLES = 2000
SEED = 0  # fixed, so that equal figures have equal intervals

Values = NDArray[np.float64]


def interval(statistic: Callable[..., Values], *samples: Sequence[float]) -> tuple[float, float] | None:
    """Confidence interval of a statistic of one sample with a value per prompt, or of samples paired by prompt.

    Args:
        statistic: Function of one array `(resamples, prompts)` per sample that returns an array `(resamples,)`.
        samples: Values by prompt; all samples have the same prompts in the same order.

    Returns:
        The lower and the upper end; None for fewer than two prompts, which do not determine an interval.
    """
    prompts = len(samples[0])
    if prompts < 2:
        return None
    chosen = _chosen(prompts)
    found = statistic(*(np.asarray(sample, dtype=float)[chosen] for sample in samples))
    outside = (100 - CONFIDENCE) / 2
    low, high = np.percentile(found, [outside, 100 - outside])
    return float(low), float(high)


def median(values: Values) -> Values:
    """A statistic: the median over prompts."""
    return np.median(values, axis=-1)


def ratio_of_means(values: Values, base: Values) -> Values:
    """A statistic: the mean over prompts / the mean of another method on the same prompts."""
    return values.mean(axis=-1) / base.mean(axis=-1)  # type: ignore[no-any-return]


@cache
def _chosen(prompts: int) -> NDArray[np.int64]:
    """Indices of the prompts in each resample, `(resamples, prompts)`."""
    return np.random.default_rng(SEED).integers(prompts, size=(RESAMPLES, prompts))
