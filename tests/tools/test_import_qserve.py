"""`kvcompile import-qserve` on small checkpoints in QServe's layout: what OUT holds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tools import qserve_sources
from tests.tools.qserve_sources import CONFIG, LINEARS, Tensors, merged, of_linear

from kvcompile.cli import main
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.ops.w4a8 import W4A8Weight, check_weight, rebuild
from kvcompile.tools.qserve import convert


@pytest.fixture(scope="module")
def published() -> Tensors:
    return qserve_sources.published()


@pytest.fixture
def folder(tmp_path: Path):
    """`folder(tensors, file, **changes of config.json)`: a checkpoint folder."""
    return partial(qserve_sources.write, tmp_path / "src")


def _loaded(out: Path) -> tuple[Tensors, dict[str, Any]]:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {file: load_file(out / file) for file in sorted(set(index["weight_map"].values()))}
    tensors = {name: tensor for part in files.values() for name, tensor in part.items()}
    assert {name: file for file, part in files.items() for name in part} == index["weight_map"]
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    return tensors, json.loads((out / "config.json").read_text())


def _weight(tensors: Tensors, name: str) -> W4A8Weight:
    return W4A8Weight(*(tensors[f"{name}.{field}"] for field in W4A8Weight._fields))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_every_linear_is_converted_and_everything_else_kept(folder, published, tmp_path, capsys, file):
    source = folder(published, file)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    assert main(["import-qserve", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    tensors, config = _loaded(tmp_path / "out")
    for i in range(2):
        for name, shape in LINEARS.items():
            full = f"model.layers.{i}.{name}"
            weight = _weight(tensors, full)
            check_weight(weight)
            assert (weight.out_features, weight.in_features) == shape
            for a, b in zip(weight, convert(of_linear(published, full)), strict=True):
                assert torch.equal(a, b)
    kept = {name for name in published if name.endswith(("norm.weight", "lm_head.weight", "embed_tokens.weight"))}
    assert all(torch.equal(tensors[name], published[name]) for name in kept)
    assert len(tensors) == len(kept) + 2 * len(LINEARS) * 4
    described = config.pop("quantization_config")
    assert config == CONFIG
    assert W4A8Config.from_config(described).group_sizes == {128: 128, 256: 128}
    assert described["group_size"] == 128
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not (tmp_path / "out.part").exists()


def test_merged_linears_are_taken_apart(folder, published, tmp_path):
    assert main(["import-qserve", str(folder(merged(published))), str(tmp_path / "out")]) == 0
    tensors, _ = _loaded(tmp_path / "out")
    for i in range(2):
        for name in LINEARS:
            full = f"model.layers.{i}.{name}"
            for a, b in zip(_weight(tensors, full), convert(of_linear(published, full)), strict=True):
                assert torch.equal(a, b)


BIASES = {"self_attn": {"q": 128, "k": 64, "v": 64, "o": 128}, "mlp": {"gate": 256, "up": 256, "down": 128}}


def test_a_bias_stays_with_its_rows(folder, published, tmp_path):
    bias = {
        f"model.layers.{i}.{block}.{part}_proj.bias": torch.randn(n).half()
        for i in range(2)
        for block, parts in BIASES.items()
        for part, n in parts.items()
    }
    source = folder({**published, **bias}, attention_bias=True, mlp_bias=True)
    assert main(["import-qserve", str(source), str(tmp_path / "out")]) == 0
    tensors, _ = _loaded(tmp_path / "out")
    assert all(torch.equal(tensors[name], value) for name, value in bias.items())


def test_a_merged_bias_is_taken_apart_too(folder, published, tmp_path):
    qkv, out = torch.randn(256).half(), torch.randn(128).half()
    bias = {f"model.layers.{i}.self_attn.qkv_proj.bias": qkv for i in range(2)}
    bias |= {f"model.layers.{i}.self_attn.o_proj.bias": out for i in range(2)}
    source = folder({**merged(published), **bias}, attention_bias=True)
    assert main(["import-qserve", str(source), str(tmp_path / "out")]) == 0
    tensors, _ = _loaded(tmp_path / "out")
    made = [tensors[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert [len(part) for part in made] == [128, 64, 64]
    assert torch.equal(torch.cat(made), qkv)


def test_a_checkpoint_per_channel_says_so(folder, published, tmp_path):
    tensors = {name: tensor for name, tensor in published.items() if ".s2_" not in name}
    for name in [name for name in tensors if name.endswith("s1_scales")]:
        tensors[name.replace("s1_scales", "s1_szeros")] = tensors[name] * 8
    assert main(["import-qserve", str(folder(tensors)), str(tmp_path / "out")]) == 0
    made, config = _loaded(tmp_path / "out")
    assert config["quantization_config"]["group_size"] == "channel"
    assert W4A8Config.from_config(config["quantization_config"]).group_sizes == {128: 128, 256: 256}
    assert int(rebuild(_weight(made, "model.layers.1.mlp.down_proj")).min()) == -8


def test_tied_embeddings_need_no_head(folder, published, tmp_path):
    tensors = {name: tensor for name, tensor in published.items() if name != "lm_head.weight"}
    source = folder(tensors, tie_word_embeddings=True)
    assert main(["import-qserve", str(source), str(tmp_path / "out")]) == 0
    assert "lm_head.weight" not in _loaded(tmp_path / "out")[0]
