"""Draw a record of `kvcompile bench serve` as an SVG that needs nothing else: a panel a case, a bar a system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

METRIC = "output_throughput"

_OURS, _STOCK = "#0b7285", "#adb5bd"
_LEFT, _TOP, _ROW, _BAR, _PLOT, _RIGHT, _GAP = 150, 52, 20, 15, 460, 130, 44


def draw(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians as bars with their spread, each panel to a scale of its own, and how many times the first system's.

    rows: of a record; those of `METRIC` are drawn.
    """
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["metric"] == METRIC:
            panels.setdefault(row["case"], []).append(row)
    width = _LEFT + _PLOT + _RIGHT
    height = _TOP + sum(_GAP + _ROW * len(systems) for systems in panels.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#212529" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    top = _TOP
    for case, systems in panels.items():
        parts += _panel(case, systems, top)
        top += _GAP + _ROW * len(systems)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(case: str, systems: Sequence[Mapping[str, Any]], top: int) -> list[str]:
    most = max(row["max"] for row in systems)
    parts = [f'<text x="16" y="{top + 12}" font-weight="600">{escape(case)}, {escape(systems[0]["unit"])}</text>']
    for place, row in enumerate(systems):
        y = top + 22 + place * _ROW
        low, median, high = (round(_PLOT * row[key] / most, 1) for key in ("min", "median", "max"))
        name, middle = escape(row["system"]), y + _BAR / 2
        colour = _STOCK if row["system"].startswith("vllm") else _OURS
        value = f"{row['median']:,.0f}, {row['median'] / systems[0]['median']:.2f}x"
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{median}" height="{_BAR}" fill="{colour}">'
            f"<title>{escape(case)}, {name}: {value}</title></rect>",
            f'<line x1="{_LEFT + low}" x2="{_LEFT + high}" y1="{middle}" y2="{middle}" stroke="#212529"/>',
            f'<text x="{_LEFT + high + 6}" y="{y + 12}">{value}</text>',
        ]
    return parts
