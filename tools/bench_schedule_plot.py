"""Draw replays as an SVG that needs nothing else: for each case, preemptions, waits, and blocks in use over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"vllm-fcfs": "#adb5bd", "vllm-least-computed": "#f08c00", "kvcompile": "#0b7285"}
_OTHER = "#7048e8"
_LEFT, _TOP, _ROW, _PLOT = 24, 76, 190, 130
_BARS = (("preemptions", "preempted requests", "{:.0f}"), ("ttft_mean", "mean TTFT, s", "{:.2f}"))
_BARS_WIDTH, _LINES_LEFT, _LINES_WIDTH = 190, 430, 420
_POINTS = 400

Series = Mapping[tuple[str, str], Sequence[tuple[float, int]]]


def write(path: Path, rows: Sequence[dict[str, Any]], series: Series, systems: Sequence[str]) -> None:
    """Write the drawing whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(draw(rows, series, systems), encoding="utf-8")
    part.replace(path)


def draw(rows: Sequence[dict[str, Any]], series: Series, systems: Sequence[str]) -> str:
    """An SVG; `series` holds (seconds, blocks in use) of one run for each case and system."""
    cases = list(dict.fromkeys(case for case, _ in series))
    medians = {(row["case"], row["system"], row["metric"]): row["median"] for row in rows}
    width, height = _LINES_LEFT + _LINES_WIDTH + 70, _TOP + len(cases) * _ROW
    title = "Replayed traces, simulated worker"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#212529" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="16" font-weight="600">{title}</text>',
    ]
    x = _LEFT
    for system in systems:
        parts.append(f'<rect x="{x}" y="38" width="11" height="11" fill="{_colour(system)}"/>')
        parts.append(f'<text x="{x + 16}" y="48">{escape(system)}</text>')
        x += 36 + 7 * len(system)
    for index, case in enumerate(cases):
        top = _TOP + index * _ROW
        parts.append(f'<text x="{_LEFT}" y="{top}" font-weight="600">{escape(case)}</text>')
        for place, (metric, heading, form) in enumerate(_BARS):
            values = {system: medians[case, system, metric] for system in systems}
            parts += _bars(_LEFT + place * (_BARS_WIDTH + 10), top + 18, heading, values, form)
        parts += _lines(top + 18, {system: series[case, system] for system in systems})
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bars(left: int, top: int, heading: str, values: Mapping[str, float], form: str) -> list[str]:
    most, bottom = max(*values.values(), 1e-9), top + _PLOT
    parts = [f'<text x="{left}" y="{top + 4}">{escape(heading)}</text>']
    parts.append(f'<line x1="{left}" x2="{left + _BARS_WIDTH - 30}" y1="{bottom}" y2="{bottom}" stroke="#adb5bd"/>')
    for place, (system, value) in enumerate(values.items()):
        size, x = round((_PLOT - 34) * value / most, 1), left + 4 + place * 52
        text = form.format(value)
        parts.append(
            f'<rect x="{x}" y="{bottom - size}" width="40" height="{size}" fill="{_colour(system)}">'
            f"<title>{escape(system)}: {text}</title></rect>"
        )
        parts.append(f'<text x="{x + 20}" y="{bottom - size - 4}" text-anchor="middle" font-size="10">{text}</text>')
    return parts


def _lines(top: int, series: Mapping[str, Sequence[tuple[float, int]]]) -> list[str]:
    bottom = top + _PLOT
    end = max((points[-1][0] for points in series.values() if points), default=1.0) or 1.0
    most = max((used for points in series.values() for _, used in points), default=1) or 1
    parts = [
        f'<text x="{_LINES_LEFT}" y="{top + 4}">blocks in use (top: {most}) over {end:.0f} s</text>',
        f'<rect x="{_LINES_LEFT}" y="{top + 14}" width="{_LINES_WIDTH}" height="{_PLOT - 14}" fill="none" '
        'stroke="#dee2e6"/>',
    ]
    for system, points in series.items():
        every = max(1, len(points) // _POINTS)
        path = " ".join(
            f"{_LINES_LEFT + _LINES_WIDTH * time_s / end:.1f},{bottom - (_PLOT - 18) * used / most:.1f}"
            for time_s, used in points[::every]
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{_colour(system)}" stroke-width="1.3" opacity="0.85">'
            f"<title>{escape(system)}</title></polyline>"
        )
    return parts


def _colour(system: str) -> str:
    return _COLOURS.get(system, _OTHER)
