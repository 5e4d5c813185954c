"""Means with bootstrap intervals, as rows of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcompile.tools import record

_RESAMPLES, _LOW, _HIGH = 2000, 2.5, 97.5


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean, B. Efron 1979; samples are drawn with a fixed seed."""
    data = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(data), size=(_RESAMPLES, len(data)))
    low, high = np.percentile(data[drawn].mean(1), (_LOW, _HIGH))
    return float(low), float(high)


def row(case: str, system: str, metric: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """A record's row of one value per sample, with the mean and its interval, `mean_low` to `mean_high`."""
    low, high = interval(values)
    ends = {"mean": sum(values) / len(values), "mean_low": low, "mean_high": high}
    return {**record.row(case, system, metric, unit, values), **{name: round(end, 4) for name, end in ends.items()}}
