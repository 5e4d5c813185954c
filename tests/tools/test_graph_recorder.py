"""The recorder: what it keeps of each graph and of the pieces that share one."""

from __future__ import annotations

import json

import torch
from tests.passes.graphs import trace
from tests.tools.graph_documents import OPTIONS, WIDTH, document, recorded, traced

from kvcompile.passes.pipeline import PassPipeline, observed_by
from kvcompile.tools import graph_document, graph_text
from kvcompile.tools.graph_recorder import Recorder, _root


def test_the_graph_is_kept_before_and_after_each_pass() -> None:
    (graph,) = recorded().graphs()
    assert [stage["after"] for stage in graph["stages"]][:3] == ["", "norm_quant", "swiglu_quant"]
    before, norm, swiglu = graph["stages"][:3]
    assert norm["nodes"] == before["nodes"], "there is no norm"
    assert before["histogram"]["aten.exp"] == 1
    assert "aten.exp" not in swiglu["histogram"]
    assert swiglu["histogram"]["kvcompile.silu_mul_quant"] == 1
    assert (graph["symbolic"], graph["tokens"], graph["pieces"]) == (True, [1, 256], [0])


def test_bytes_per_token_fall_by_what_is_no_longer_written_and_read() -> None:
    (graph,) = recorded().graphs()
    before, after = graph["stages"][0]["bytes"], graph["stages"][-1]["bytes"]
    row = WIDTH * 4  # fp32, one half
    # neg, exp, add 1 read and write a row each, the quotient and the product read two and write one, the quantiser
    # reads one; silu_mul_quant reads gate_up instead.
    assert before["token"] - after["token"] == 3 * 2 * row + 2 * 3 * row + row - 2 * row
    assert before["constant"] == after["constant"] == row


def test_the_fused_site_and_the_one_that_is_left_are_told_apart() -> None:
    (graph,) = recorded().graphs()
    (site,), (left,) = graph["sites"], graph["left"]
    assert (site["pass"], site["operator"]) == ("swiglu_quant", "kvcompile.silu_mul_quant")
    assert {"neg", "exp", "div"} <= set(site["removed"])
    assert left["reason"] == "no pass is for what it quantises: an input of the graph"


def test_equal_pieces_share_a_graph_and_count_once_each_in_the_totals() -> None:
    recorder, module = recorded(), traced()
    alone = document(recorder)["totals"][0]
    for number in (1, 2):
        recorder.piece(number, (1, 256), module, [])
        recorder.same_as(0, (1, 256))
    (graph,), (total,) = recorder.graphs(), document(recorder)["totals"]
    assert graph["pieces"] == [0, 1, 2]
    assert len(graph["sites"][0]["layers"]) == 3
    assert total["pieces"] == 3
    assert total["sites"]["swiglu_quant"] == {"matched": 3, "candidates": 3}
    for when in ("before", "after"):
        assert total[when]["operators"] == 3 * alone[when]["operators"]
        assert total[when]["bytes"]["token"] == 3 * alone[when]["bytes"]["token"]


def test_a_graph_that_two_ranges_of_batch_sizes_share_counts_in_the_totals_of_each() -> None:
    recorder = recorded()
    recorder.piece(0, (257, 512), traced(), [])
    recorder.same_as(0, (1, 256))
    recorder.piece(1, (257, 512), traced(), [])
    recorder.same_as(0, (257, 512))
    small, large = recorder.graphs()
    assert (small["tokens"], small["pieces"]) == ([1, 256], [0])
    assert (large["tokens"], large["pieces"]) == ([257, 512], [0, 1])
    one, two = document(recorder)["totals"]
    assert 2 * one["after"]["operators"] == two["after"]["operators"]


def test_names_of_layers_get_what_stands_before_the_compiled_module() -> None:
    assert _root(["model.layers.0.self_attn.attn"], ["embed_tokens", "layers.0"]) == "model."
    assert _root(["language_model.model.layers.10.attn"], ["layers.10"]) == "language_model.model."
    assert _root(["layers.0.attn"], ["layers.0"]) == ""
    assert _root([], ["layers.0"]) == ""


def test_inputs_are_called_as_in_the_model() -> None:
    recorder = Recorder()
    mangled = "l_self_modules_layers_modules_3_modules_mlp_modules_down_proj_parameters_tiles_"
    assert recorder._input(mangled) == "layers.3.mlp.down_proj.tiles"
    assert recorder._input("l_positions_") == "l_positions_"


def test_the_text_of_a_graph_has_a_line_per_node_with_sizes_in_tokens() -> None:
    (graph,) = recorded().graphs()
    lines = graph_text.text(graph, len(graph["stages"]) - 1).splitlines()
    assert len(lines) == 2 + len(graph["stages"][-1]["nodes"])
    fused = next(line for line in lines if line.startswith("silu_mul_quant_default:"))
    assert fused.startswith(f"silu_mul_quant_default: (i8[T, {WIDTH}], f32[T]) = kvcompile.silu_mul_quant(gate_up_1)")
    assert lines[-1].startswith("return ")


def test_two_recordings_are_the_same_to_the_byte() -> None:
    assert json.dumps(document()) == json.dumps(document())


def test_several_symbolic_sizes_are_no_token_dimension() -> None:
    def two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -x, -y

    recorder, module = Recorder(), trace(two, torch.zeros(5, 8), torch.zeros(6, 8))
    with observed_by(recorder):
        recorder.piece(0, (1, 256), module, [])
        PassPipeline(OPTIONS)(module.graph)
    (graph,) = recorder.graphs()
    assert graph["symbolic"] is False
    assert graph["stages"][0]["bytes"] == {"token": 0, "constant": 0, "other": 2}
    assert graph_document.totals([graph])[0]["before"]["bytes"]["other"] == 2
