"""`kvcompile graph-dump` of real checkpoints: compiled by vLLM, watched up to the passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcompile.tools import graph_diff
from tests.e2e.w4a8_model import HEAD, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, write_plain, write_quantised

SMALL = ("--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20))


@dataclass(frozen=True)
class Dump:
    code: int
    said: str
    folder: Path

    @property
    def content(self) -> dict[str, Any]:
        return json.loads((self.folder / "graphs.json").read_text())


def _dump(model: Path, folder: Path, *flags: str) -> Dump:
    done = subprocess.run(
        [sys.executable, "-m", "kvcompile.cli", "graph-dump", str(model), "--out", str(folder), *SMALL, *flags],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return Dump(done.returncode, done.stdout + done.stderr, folder)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dump]:
    """Two models at a time, as everything but a second of a dump is starting vLLM. Without rotary bf16 has no site."""
    folder = tmp_path_factory.mktemp("graph-dump")
    plain = write_plain(folder / "plain")
    quantised = write_quantised(folder / "quantised", plain)
    with ThreadPoolExecutor(2) as pool:
        w4a8 = pool.submit(_dump, quantised, folder / "w4a8")
        no_rotary = ("--additional-config", json.dumps({"kvcompile": {"passes.rotary": False}}))
        bf16 = pool.submit(_dump, plain, folder / "bf16", "--load-format", "dummy", *no_rotary)
        return {"w4a8": w4a8.result(), "bf16": bf16.result()}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_norm_and_swiglu_in_front_of_a_w4a8_linear_is_a_site_with_the_name_of_its_layer(
    dumps: dict[str, Dump],
) -> None:
    assert dumps["w4a8"].code == 0, dumps["w4a8"].said
    content = dumps["w4a8"].content
    sites = [(s["pass"], layer) for graph in content["graphs"] for s in graph["sites"] for layer in s["layers"]]
    norms = ("input_layernorm", "post_attention_layernorm")
    wanted = [("norm_quant", f"model.layers.{i}.{norm}") for i in range(LAYERS) for norm in norms]
    wanted += [("swiglu_quant", f"model.layers.{i}.mlp.act_fn") for i in range(LAYERS)]
    wanted += [("rotary", f"model.layers.{i}.self_attn.rotary_emb") for i in range(LAYERS)]
    assert sorted(sites) == sorted(wanted)
    left = [
        (layer, entry["reason"]) for graph in content["graphs"] for entry in graph["left"] for layer in entry["layers"]
    ]
    reason = "no pass is for what it quantises: an input of the graph"
    assert left == [(f"model.layers.{i}.self_attn.o_proj", reason) for i in range(LAYERS)]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_bytes_are_those_of_the_model_dimensions(dumps: dict[str, Dump]) -> None:
    (total,) = dumps["w4a8"].content["totals"]
    element, scale = 2, 4
    # A norm no longer writes, and the quantiser behind it no longer reads, a normalised row.
    norms = 2 * LAYERS * 2 * HIDDEN * element
    # SwiGLU in bf16 is taken apart into a cast, neg, exp, add 1, a quotient, a cast back and the product: rows of fp32
    # but for the halves and the last two results. The fused operator reads gate_up and writes what the quantiser did.
    wide, narrow = 4 * INTERMEDIATE, element * INTERMEDIATE
    apart = (narrow + wide) + 3 * 2 * wide + 3 * wide + (wide + narrow) + 3 * narrow + narrow
    # Rotary embedding is taken apart into the rows of cos and sin (gathered, then half of them with each of four
    # products), those products, a difference, a sum, and their concatenation. The operator reads and writes each row
    # once, and one row of the table.
    rows, table = (HEADS + KV_HEADS) * HEAD * element, HEAD * element
    rotary = 2 * table + 2 * 2 * table + (4 + 3 + 2) * rows - 2 * rows - table
    saved = norms + LAYERS * (apart - 2 * narrow + rotary)
    assert total["before"]["bytes"]["token"] - total["after"]["bytes"]["token"] == saved
    # Of weights: 4 bits each, 16 bits per group, 32 per row; two norms a layer and the last; and cos and sin are
    # gathered, as are embeddings.
    linears = [
        ((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN, 128),
        (HIDDEN, HEADS * HEAD, 128),
        (2 * INTERMEDIATE, HIDDEN, 128),
        (HIDDEN, INTERMEDIATE, 64),
    ]
    weights = LAYERS * sum(n * k // 2 + n * (k // group) * 2 + n * scale for n, k, group in linears)
    norms = (2 * LAYERS + 1) * HIDDEN * element
    assert total["before"]["bytes"]["constant"] == total["after"]["bytes"]["constant"] == weights + norms
    assert total["after"]["bytes"]["other"] == 0


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_folder_holds_the_texts_the_report_and_the_log(dumps: dict[str, Dump]) -> None:
    folder = dumps["w4a8"].folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "engine.log",
        "graph-1",
        "graph-2",
        "graph-3",
        "graphs.json",
        "report.html",
    ]
    texts = {path.name: path.read_text() for path in (folder / "graph-2").iterdir()}
    assert sorted(texts) == ["0-before.txt", "1-norm_quant.txt", "2-swiglu_quant.txt", "3-rotary.txt"]
    assert texts["0-before.txt"].count("= vllm_ir.fused_add_rms_norm(") == 2
    assert "vllm_ir.fused_add_rms_norm(" not in texts["1-norm_quant.txt"]
    assert f"# model.layers.{LAYERS - 1}.self_attn.qkv_proj" in texts["2-swiglu_quant.txt"]
    assert "input  # model.layers.0.mlp.down_proj.tiles" in texts["0-before.txt"]
    # vLLM's own log of the same run: what the passes said.
    assert "graph 2, 89 nodes" in (folder / "engine.log").read_text()
    assert len(texts["0-before.txt"].splitlines()) == 2 + 89


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_summary_says_what_was_active_matched_and_written(dumps: dict[str, Dump]) -> None:
    said = dumps["w4a8"].said
    content = dumps["w4a8"].content
    assert content["startup_line"].startswith("kvcompile ")
    assert "active: kv8" in said
    assert f"{2 * LAYERS} of {2 * LAYERS}" in said
    assert f"{content['totals'][0]['after']['bytes']['token']:,}" in said
    assert content["settings"]["quantization"] == "kvcompile_w4a8"
    assert content["arguments"] == list(SMALL)
    assert content["versions"]["vllm"].startswith("0.23.0")


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_model_without_a_match_is_said_to_have_none_and_the_report_is_there(dumps: dict[str, Dump]) -> None:
    bf16 = dumps["bf16"]
    assert bf16.code == 0, bf16.said
    assert "No site matched" in bf16.said
    (total,) = bf16.content["totals"]
    assert total["before"] == total["after"]
    assert "No site matched" in (bf16.folder / "report.html").read_text()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_two_dumps_of_different_checkpoints_differ_where_they_should(dumps: dict[str, Dump]) -> None:
    a, b = dumps["w4a8"].content, dumps["bf16"].content
    assert graph_diff.differences(a, a) == []
    found = {(d.part, d.what): (d.a, d.b) for d in graph_diff.differences(a, b)}
    assert found["Flags and settings", "quantization"] == ("kvcompile_w4a8", "null")
    assert len([part for part, _ in found if part == "Sites"]) == 4 * LAYERS
