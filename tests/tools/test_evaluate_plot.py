"""The drawing of quality against budget: a point with its interval for every mean, within the picture, to scale."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from kvcompile.tools import evaluate_plot
from kvcompile.tools.evaluate_statistics import row

SVG = "{http://www.w3.org/2000/svg}"


def _rows() -> list[dict]:
    values = {"full": [1.0, 1.0], "a & b:x=0.25,y=0.5": [0.5, 0.0], "low": [0.0, 0.0]}
    cases = ("last, 50 %", "last, 544 tokens", "later, 50 %")
    rows = [row(case, system, "rank1", "share", numbers) for case in cases for system, numbers in values.items()]
    return [*rows, row("last, 50 %", "full", "nll", "nats/token", [3.0])]


def _drawn() -> ElementTree.Element:
    return ElementTree.fromstring(evaluate_plot.draw("Quality & budget", _rows(), "rank1"))


def test_every_mean_of_the_metric_is_one_point_and_nothing_else_is() -> None:
    tips = [point.find(f"{SVG}title").text for point in _drawn().iter(f"{SVG}circle")]
    assert len(tips) == 9 and "a & b:x=0.25,y=0.5, 50 %: 0.250 (0.000 to 0.500)" in tips


def test_points_are_to_one_scale() -> None:
    heights = {}
    for point in _drawn().iter(f"{SVG}circle"):
        heights[point.find(f"{SVG}title").text.split(",")[0].split(":")[0]] = float(point.get("cy"))
    assert abs((heights["low"] - heights["a & b"]) * 4 - (heights["low"] - heights["full"])) < 0.5


def test_everything_lies_within_the_drawing() -> None:
    svg = _drawn()
    width, height = float(svg.get("width")), float(svg.get("height"))
    for element in svg.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(name, 0)) <= height


def test_there_is_a_panel_for_each_position_and_a_name_for_each_system() -> None:
    texts = [element.text for element in _drawn().iter(f"{SVG}text")]
    for text in ("question last", "question later", "50 %", "544 tokens", "full", "a & b:x=0.25,y=0.5", "low"):
        assert text in texts


def test_nothing_to_draw_is_an_empty_drawing_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    evaluate_plot.write(tmp_path / "x.svg", "A", [], "rank1")
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    ElementTree.parse(tmp_path / "x.svg")
