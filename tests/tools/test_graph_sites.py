"""Sites are found by comparing two graphs."""

from __future__ import annotations

from typing import Any

from kvcompile.tools import graph_sites

BYTES = {"token": 4, "constant": 0}


def _node(name: str, target: str, *inputs: str, layer: str = "", free: bool = False) -> dict[str, Any]:
    op = "placeholder" if target == "input" else "call"
    given = {"name": name, "op": op, "target": target, "inputs": list(inputs), "layer": layer}
    return {**given, "bytes": None if free or op == "placeholder" else BYTES}


def _element(name: str, source: str) -> dict[str, Any]:
    return _node(name, "getitem", source, free=True)


def _norm(number: int, x: str, residual: str) -> list[dict[str, Any]]:
    """A residual norm, its quantiser and a linear behind it."""
    i = number
    return [
        _node(f"norm{i}", "vllm_ir.fused_add_rms_norm", x, residual, layer=f"layers.{i}.norm"),
        _element(f"y{i}", f"norm{i}"),
        _element(f"r{i}", f"norm{i}"),
        _node(f"quant{i}", graph_sites.QUANTISER, f"y{i}", layer=f"layers.{i}.up"),
        _element(f"q{i}", f"quant{i}"),
        _node(f"linear{i}", "kvcompile.w4a8_linear", f"q{i}", layer=f"layers.{i}.up"),
    ]


def _fused(number: int, x: str, residual: str) -> list[dict[str, Any]]:
    i = number
    return [
        _node(f"fused{i}", "kvcompile.fused_add_rms_norm_quant", x, residual, layer=f"layers.{i}.norm"),
        _element(f"fq{i}", f"fused{i}"),
        _element(f"fr{i}", f"fused{i}"),
        _node(f"linear{i}", "kvcompile.w4a8_linear", f"fq{i}", layer=f"layers.{i}.up"),
    ]


START = [_node("x", "input"), _node("r", "input")]


def test_each_site_has_what_it_replaced_although_the_residual_joins_them() -> None:
    before = [*START, *_norm(0, "x", "r"), *_norm(1, "linear0", "r0"), _node("end", "aten.add", "linear1", "r1")]
    after = [*START, *_fused(0, "x", "r"), *_fused(1, "linear0", "fr0"), _node("end", "aten.add", "linear1", "fr1")]
    first, second = graph_sites.matched("norm_quant", before, after)
    assert first == {
        "pass": "norm_quant",
        "node": "fused0",
        "operator": "kvcompile.fused_add_rms_norm_quant",
        "layer": "layers.0.norm",
        "feeds": ["layers.0.up", "layers.1.norm"],
        "added": ["fused0", "fq0", "fr0"],
        "removed": ["norm0", "y0", "r0", "quant0", "q0"],
    }
    assert second["removed"] == ["norm1", "y1", "r1", "quant1", "q1"]
    assert second["layer"] == "layers.1.norm"


def test_an_operator_that_was_exchanged_in_place_is_a_site() -> None:
    reader = [_element("y", "attention"), _node("o", "kvcompile.w4a8_linear", "y", layer="layers.0.o")]
    before = [*START, _node("attention", "vllm.attention", "x", "r", layer="layers.0.attn"), *reader]
    after = [*START, _node("attention", "kvcompile.attention", "x", "r", layer="layers.0.attn"), *reader]
    (site,) = graph_sites.matched("attention_swap", before, after)
    assert site["feeds"] == ["layers.0.o"], "also behind an element of its results"
    assert (site["node"], site["layer"], site["added"], site["removed"]) == (
        "attention",
        "layers.0.attn",
        ["attention"],
        [],
    )


def test_a_graph_that_a_pass_left_alone_has_no_site() -> None:
    graph = [*START, *_norm(0, "x", "r")]
    assert graph_sites.matched("norm_quant", graph, graph) == []


def test_a_refused_site_names_the_node_that_differed() -> None:
    graph = [*START, *_norm(0, "x", "r")]
    by_name, by_position = graph_sites.refused(
        ["quant0: r: the elements of a row are not neighbours", "quant0: epsilon is 0"], "norm_quant", graph
    )
    assert (by_name["node"], by_name["layer"], by_name["differs"]) == ("quant0", "layers.0.up", ["r"])
    assert by_name["reason"] == "r: the elements of a row are not neighbours"
    assert by_position["differs"] == ["norm0"], "what computes the quantised tensor, where the reason names no node"


def test_a_quantiser_that_no_pass_spoke_of_is_listed_with_what_it_reads() -> None:
    graph = [*START, _node("view", "aten.reshape", "x", free=True), _node("q", graph_sites.QUANTISER, "view")]
    assert graph_sites.left(graph, set()) == [
        {
            "pass": "",
            "node": "q",
            "layer": "",
            "reason": "no pass is for what it quantises: an input of the graph",
            "differs": ["x"],
        }
    ]
    assert graph_sites.left(graph, {"q"}) == []
