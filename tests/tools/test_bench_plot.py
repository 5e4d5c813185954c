"""The drawing of a record: one bar per measurement, to scale, in a file that needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from kvcompile.tools import bench_plot, record

SVG = "{http://www.w3.org/2000/svg}"
SYSTEMS = ("ours", "theirs & <co>", "absent")


def _rows() -> list[dict]:
    times = {
        ("M=1 a", "ours"): [2.0, 1.5, 4.0],
        ("M=1 a", "theirs & <co>"): [8.0],
        ("M=1 a", "floor"): [1.0],
        ("M=1 b", "ours"): [4.0],
        ("M=4096 a", "ours"): [1234.0],
    }
    rows = [record.row(*key, "time", "us", values) for key, values in times.items()]
    return [record.row("copy", "copy", "bandwidth", "GB/s", [4200.0]), *rows]


def _drawn() -> ElementTree.Element:
    return ElementTree.fromstring(bench_plot.draw("A & B", _rows(), SYSTEMS, "floor"))


def _bars(svg: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Bars by their tool tip."""
    return {title.text: bar for bar in svg.iter(f"{SVG}rect") if (title := bar.find(f"{SVG}title")) is not None}


def test_every_time_is_one_bar_and_nothing_else_is() -> None:
    assert set(_bars(_drawn())) == {
        "M=1 a, ours: 2.00 us",
        "M=1 a, theirs & <co>: 8.00 us",
        "M=1 b, ours: 4.00 us",
        "M=4096 a, ours: 1234.00 us",
    }


def test_bars_of_a_panel_are_to_one_scale_and_stand_on_one_line() -> None:
    bars = _bars(_drawn())
    heights = {name: float(bar.get("height")) for name, bar in bars.items()}
    assert abs(heights["M=1 a, theirs & <co>: 8.00 us"] / heights["M=1 a, ours: 2.00 us"] - 4) < 0.05
    assert (
        heights["M=1 a, ours: 2.00 us"] * 2 - 0.3
        < heights["M=1 b, ours: 4.00 us"]
        < heights["M=1 a, ours: 2.00 us"] * 2 + 0.3
    )
    panel = [bar for name, bar in bars.items() if name.startswith("M=1 ")]
    assert len({round(float(bar.get("y")) + float(bar.get("height"))) for bar in panel}) == 1


def test_everything_lies_within_the_drawing() -> None:
    svg = _drawn()
    width, height = float(svg.get("width")), float(svg.get("height"))
    for element in svg.iter():
        for name in ("x", "x1", "x2"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2"):
            assert 0 <= float(element.get(name, 0)) <= height


def test_it_refers_to_nothing_outside_itself() -> None:
    text = bench_plot.draw("A", _rows(), SYSTEMS, "floor")
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|url\(|<image|<script|@import|<style", text)


def test_systems_that_were_not_measured_are_not_in_the_legend() -> None:
    texts = [element.text for element in _drawn().iter(f"{SVG}text")]
    assert "ours" in texts and "theirs & <co>" in texts and "floor" in texts and "absent" not in texts


def test_a_record_without_times_is_an_empty_drawing() -> None:
    ElementTree.fromstring(bench_plot.draw("A", [], SYSTEMS, "floor"))


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    bench_plot.write(tmp_path / "x.svg", "A", _rows(), SYSTEMS, "floor")
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    ElementTree.parse(tmp_path / "x.svg")
