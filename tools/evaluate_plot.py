"""Draw quality against budget as an SVG that needs nothing else: a panel per position, a line per system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from kvcompile.tools import record

_COLOURS = ("#212529", "#0b7285", "#f08c00", "#7048e8", "#2b8a3e", "#c2255c", "#adb5bd", "#1971c2", "#a61e4d")
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP, _LINE, _CHARACTER = 60, 60, 240, 260, 50, 18, 7


def write(path: Path, title: str, rows: Sequence[dict[str, Any]], metric: str, before: str = "question ") -> None:
    """Write the drawing whole or not at all."""
    record.write_text(path, draw(title, rows, metric, before))


def draw(title: str, rows: Sequence[dict[str, Any]], metric: str, before: str = "question ") -> str:
    """An SVG of the rows of `metric`, from 0 to 1: means with their intervals. A case is "PANEL, BUDGET".

    before: what stands before a panel's name.
    """
    shown = [row for row in rows if row["metric"] == metric]
    systems = list(dict.fromkeys(row["system"] for row in shown))
    cases = dict.fromkeys(row["case"] for row in shown)
    panels: dict[str, list[str]] = {}
    for case in cases:
        panel, _, budget = case.partition(", ")
        panels.setdefault(panel, []).append(budget)
    values = {(row["case"], row["system"]): row for row in shown}
    legend = _LEFT + max(1, len(panels)) * (_WIDTH + _GAP) - 20
    names = 30 + _CHARACTER * max(map(len, systems), default=0)
    width = max(legend + names, _LEFT + round(1.3 * _CHARACTER * len(title)) + 20)
    height = max(_TOP + _HEIGHT + 50, _TOP + _LINE * len(systems) + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#212529" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for index, (panel, budgets) in enumerate(panels.items()):
        parts += _panel(_LEFT + index * (_WIDTH + _GAP), before, panel, budgets, systems, values)
    for index, system in enumerate(systems):
        y = _TOP + 8 + _LINE * index
        parts.append(f'<rect x="{legend}" y="{y - 9}" width="11" height="11" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{legend + 16}" y="{y}">{escape(system)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    left: int,
    before: str,
    panel: str,
    budgets: Sequence[str],
    systems: Sequence[str],
    values: dict[tuple[str, str], dict[str, Any]],
) -> list[str]:
    bottom, step = _TOP + _HEIGHT, _WIDTH / max(1, len(budgets))

    def y(value: float) -> float:
        return round(bottom - (_HEIGHT - 20) * value, 1)

    parts = [f'<text x="{left}" y="{_TOP + 4}" font-weight="600">{escape(f"{before}{panel}")}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y(tick)}" y2="{y(tick)}" stroke="#dee2e6"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4}" text-anchor="end" font-size="10">{tick:g}</text>')
    for place, budget in enumerate(budgets):
        x = left + step * (place + 0.5)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(budget)}</text>')
    for index, system in enumerate(systems):
        points = []
        for place, budget in enumerate(budgets):
            row = values.get((f"{panel}, {budget}", system))
            if row is None:
                continue
            x = round(left + step * (place + 0.5) + 3 * (index - len(systems) / 2), 1)
            points.append(f"{x},{y(row['mean'])}")
            ends = f'y1="{y(row["mean_low"])}" y2="{y(row["mean_high"])}"'
            parts.append(f'<line x1="{x}" x2="{x}" {ends} stroke="{_colour(index)}"/>')
            tip = escape(f"{system}, {budget}: {row['mean']:.3f} ({row['mean_low']:.3f} to {row['mean_high']:.3f})")
            at = f'cx="{x}" cy="{y(row["mean"])}"'
            parts.append(f'<circle {at} r="3" fill="{_colour(index)}"><title>{tip}</title></circle>')
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{_colour(index)}" opacity="0.7"/>')
    return parts


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
