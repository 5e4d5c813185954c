"""Draw a benchmark record as an SVG that needs nothing else: bars per case and system, one panel per group of cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = ("#0b7285", "#adb5bd", "#f08c00", "#7048e8", "#2b8a3e", "#c2255c")
_BAR, _GAP, _LEFT, _RIGHT, _TOP, _PANEL, _PANEL_GAP = 22, 26, 70, 20, 70, 210, 64


def write(path: Path, title: str, rows: Sequence[dict[str, Any]], systems: Sequence[str], floor: str) -> None:
    """Write the drawing whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(draw(title, rows, systems, floor), encoding="utf-8")
    part.replace(path)


def draw(title: str, rows: Sequence[dict[str, Any]], systems: Sequence[str], floor: str) -> str:
    """An SVG of the rows of metric `time`: medians as bars with their spread, system `floor` as a line across.

    A case is "PANEL NAME", such as "M=32 gate_up"; each panel has a scale of its own.
    """
    times = {(row["case"], row["system"]): row for row in rows if row["metric"] == "time"}
    shown = [system for system in systems if any(system == there for _, there in times)]
    panels: dict[str, list[str]] = {}
    for case in dict.fromkeys(case for case, _ in times):
        panels.setdefault(case.partition(" ")[0], []).append(case)
    group = _BAR * len(shown) + _GAP
    most = max((len(cases) for cases in panels.values()), default=0)
    width = _LEFT + max(most * group, 420) + _RIGHT
    height = _TOP + len(panels) * (_PANEL + _PANEL_GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#212529" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>',
        *_legend(shown, floor),
    ]
    for index, (panel, cases) in enumerate(panels.items()):
        parts += _panel(panel, cases, times, shown, floor, _TOP + index * (_PANEL + _PANEL_GAP), group)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(shown: Sequence[str], floor: str) -> list[str]:
    parts, x = [], _LEFT
    for index, system in enumerate(shown):
        parts.append(f'<rect x="{x}" y="38" width="11" height="11" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{x + 16}" y="48">{escape(system)}</text>')
        x += 30 + 7 * len(system)
    parts.append(f'<line x1="{x}" x2="{x + 14}" y1="44" y2="44" stroke="#e03131" stroke-width="2"/>')
    return [*parts, f'<text x="{x + 19}" y="48">{escape(floor)}</text>']


def _panel(
    panel: str,
    cases: Sequence[str],
    times: dict[tuple[str, str], dict[str, Any]],
    shown: Sequence[str],
    floor: str,
    top: int,
    group: int,
) -> list[str]:
    unit = next(row["unit"] for (case, _), row in times.items() if case in cases)
    most = max(row["max"] for (case, _), row in times.items() if case in cases)
    step = _step(most)
    ticks = math.ceil(most / step)
    bottom, right = top + _PANEL, _LEFT + len(cases) * group

    def y(value: float) -> float:
        return round(bottom - (_PANEL - 24) * value / (ticks * step), 1)

    parts = [f'<text x="{_LEFT}" y="{top + 12}" font-weight="600">{escape(f"{panel}, {unit}")}</text>']
    for tick in range(ticks + 1):
        at = y(tick * step)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}" stroke="#dee2e6"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{tick * step:g}</text>')
    for index, case in enumerate(cases):
        x0 = _LEFT + index * group + _GAP / 2
        for place, system in enumerate(shown):
            row = times.get((case, system))
            if row is None:
                continue
            x, at = x0 + place * _BAR, y(row["median"])
            middle = x + _BAR / 2 - 1
            parts.append(_bar(x, at, bottom, _colour(place), f"{case}, {system}: {row['median']:.2f} {unit}"))
            ends = f'y1="{y(row["min"])}" y2="{y(row["max"])}"'
            parts.append(f'<line x1="{middle}" x2="{middle}" {ends} stroke="#212529"/>')
            label = f'<text x="{middle}" y="{y(row["max"]) - 4}" text-anchor="middle" font-size="9">'
            parts.append(f"{label}{_short(row['median'])}</text>")
        if (case, floor) in times:
            at = y(times[case, floor]["median"])
            ends = f'x1="{x0 - 4}" x2="{x0 + len(shown) * _BAR + 2}"'
            parts.append(f'<line {ends} y1="{at}" y2="{at}" stroke="#e03131" stroke-width="2"/>')
        name = case.partition(" ")[2]
        centre = x0 + len(shown) * _BAR / 2
        parts.append(f'<text x="{centre}" y="{bottom + 18}" text-anchor="middle">{escape(name)}</text>')
    return parts


def _bar(x: float, top: float, bottom: float, colour: str, title: str) -> str:
    size = f'width="{_BAR - 2}" height="{round(bottom - top, 1)}"'
    return f'<rect x="{x}" y="{top}" {size} fill="{colour}"><title>{escape(title)}</title></rect>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _step(most: float) -> float:
    """A round distance between ticks: 1, 2 or 5 times a power of ten, four to nine of them up to `most`."""
    power = 10 ** math.floor(math.log10(most / 4)) if most > 0 else 1
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 9)
