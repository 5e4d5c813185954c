"""Means with bootstrap intervals, as rows of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvcompile.tools import record

_RESAMPLES, _LOW, _HIGH = 2000, 2.5, 97.5


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean, B. Efron 1979; samples are drawn with a fixed seed."""
    return _ends(_resampled(values, np.random.default_rng(0)))


def row(case: str, system: str, metric: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """A record's row of one value per sample, with the mean and its interval, `mean_low` to `mean_high`."""
    return _row(case, system, metric, unit, values, sum(values) / len(values), interval(values))


def macro_row(case: str, system: str, metric: str, unit: str, groups: Sequence[Sequence[float]]) -> dict[str, Any]:
    """As `row`, of the mean of the groups' means: each counts the same. The bootstrap draws within each group."""
    generator = np.random.default_rng(0)
    ends = _ends(np.mean([_resampled(group, generator) for group in groups], axis=0))
    mean = sum(sum(group) / len(group) for group in groups) / len(groups)
    return _row(case, system, metric, unit, [value for group in groups for value in group], mean, ends)


def compared(
    values: Mapping[tuple[str, str], Sequence[float]], metric: str, unit: str, against: str
) -> list[dict[str, Any]]:
    """Rows of `metric` for every (case, system), and of "difference": the mean of the paired differences.

    Values of one case are in one order of samples for all systems. against: the system that others are compared with.
    """
    rows = []
    for (case, system), found in values.items():
        rows.append(row(case, system, metric, unit, found))
        if system != against:
            rows.append(row(case, system, "difference", unit, paired(found, values[case, against])))
    return rows


def paired(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Sample by sample, how much more than `base`."""
    return [ours - theirs for ours, theirs in zip(values, base, strict=True)]


def _resampled(values: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """Means of samples drawn with replacement, [_RESAMPLES]."""
    data = np.asarray(values, dtype=np.float64)
    return data[generator.integers(len(data), size=(_RESAMPLES, len(data)))].mean(1)


def _ends(means: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(means, (_LOW, _HIGH))
    return float(low), float(high)


def _row(
    case: str,
    system: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    mean: float,
    ends: tuple[float, float],
) -> dict[str, Any]:
    low, high = ends
    ends_of_mean = {"mean": mean, "mean_low": low, "mean_high": high}
    rounded = {name: round(end, 4) for name, end in ends_of_mean.items()}
    return {**record.row(case, system, metric, unit, values), **rounded}
