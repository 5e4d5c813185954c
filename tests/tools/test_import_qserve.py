"""`kvcompile import-qserve` on small checkpoints in QServe's layout: what OUT holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tools.qserve_layout import grouped

from kvcompile.cli import main
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.ops.w4a8 import W4A8Weight, check_weight, rebuild
from kvcompile.tools.qserve import convert

HIDDEN, INTERMEDIATE, HEAD = 128, 256, 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "torch_dtype": "float16",
}
LINEARS = {
    "self_attn.q_proj": (4 * HEAD, HIDDEN),
    "self_attn.k_proj": (2 * HEAD, HIDDEN),
    "self_attn.v_proj": (2 * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
MERGED = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def published() -> Tensors:
    """A two-layer Llama as OmniServe's converter leaves it: Hugging Face's names, q, k and v apart."""
    tensors = {"model.embed_tokens.weight": torch.randn(64, HIDDEN).half(), "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = torch.randn(64, HIDDEN).half()
    for i in range(2):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.rand(HIDDEN).half()
        tensors[f"{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(HEAD // 2)
        tensors[f"{layer}.self_attn.kv_scale_quant_orig"] = torch.rand(2)
        for seed, (name, shape) in enumerate(LINEARS.items()):
            for part, tensor in grouped(*shape, seed=100 * i + seed)[0].items():
                tensors[f"{layer}.{name}.{part}"] = tensor
    return tensors


@pytest.fixture
def folder(tmp_path: Path):
    """`folder(tensors, **changes of config.json)`: a checkpoint folder."""

    def make(tensors: Tensors, file: str = "pytorch_model.bin", **changes: Any) -> Path:
        path = tmp_path / "src"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        (path / "tokenizer.json").write_text("{}")
        (save_file if file.endswith(".safetensors") else torch.save)(tensors, path / file)
        return path

    return make


def _loaded(out: Path) -> tuple[Tensors, dict[str, Any]]:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {file: load_file(out / file) for file in sorted(set(index["weight_map"].values()))}
    tensors = {name: tensor for part in files.values() for name, tensor in part.items()}
    assert {name: file for file, part in files.items() for name in part} == index["weight_map"]
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    return tensors, json.loads((out / "config.json").read_text())


def _weight(tensors: Tensors, name: str) -> W4A8Weight:
    return W4A8Weight(*(tensors[f"{name}.{field}"] for field in W4A8Weight._fields))


def _given(tensors: Tensors, name: str) -> Tensors:
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


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
            for a, b in zip(weight, convert(_given(published, full)), strict=True):
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
    merged = dict(published)
    for i in range(2):
        for name, parts in MERGED.items():
            full = f"model.layers.{i}.{name}"
            block = full.rpartition(".")[0]
            given = [_given(published, f"{block}.{part}_proj") for part in parts]
            for part in parts:
                for tensor in given[0]:
                    del merged[f"{block}.{part}_proj.{tensor}"]
            for tensor in given[0]:  # rows of qweight and s1 follow each other, and so do columns of s2
                merged[f"{full}.{tensor}"] = torch.cat([g[tensor] for g in given], dim=int(tensor.startswith("s2")))
    assert main(["import-qserve", str(folder(merged)), str(tmp_path / "out")]) == 0
    tensors, _ = _loaded(tmp_path / "out")
    for i in range(2):
        for name in LINEARS:
            full = f"model.layers.{i}.{name}"
            for a, b in zip(_weight(tensors, full), convert(_given(published, full)), strict=True):
                assert torch.equal(a, b)


def test_a_bias_stays_with_its_rows(folder, published, tmp_path):
    bias = {
        f"model.layers.{i}.self_attn.{part}_proj.bias": torch.randn(n).half()
        for i in range(2)
        for part, n in (("q", 128), ("k", 64), ("v", 64), ("o", 128))
    }
    assert main(["import-qserve", str(folder({**published, **bias})), str(tmp_path / "out")]) == 0
    tensors, _ = _loaded(tmp_path / "out")
    assert all(torch.equal(tensors[name], value) for name, value in bias.items())


def test_a_checkpoint_per_channel_says_so(folder, published, tmp_path):
    tensors = {name: tensor for name, tensor in published.items() if ".s2_" not in name}
    for name in [name for name in tensors if name.endswith("s1_scales")]:
        tensors[name.replace("s1_scales", "s1_szeros")] = tensors[name] * 8
    assert main(["import-qserve", str(folder(tensors)), str(tmp_path / "out")]) == 0
    made, config = _loaded(tmp_path / "out")
    assert config["quantization_config"]["group_size"] == "channel"
    assert W4A8Config.from_config(config["quantization_config"]).group_sizes == {128: 128, 256: 256}
    assert int(rebuild(_weight(made, "model.layers.1.mlp.down_proj")).min()) == -8


# --- refused --------------------------------------------------------------------------------------------------------


def _refused(capsys: pytest.CaptureFixture[str], source: Path, out: Path) -> str:
    assert main(["import-qserve", str(source), str(out)]) == 2
    printed, error = capsys.readouterr()
    lines = [line for line in error.splitlines() if not line.startswith("import-qserve: ")]
    assert (printed, len(lines)) == ("", 1)
    assert not out.with_name(f"{out.name}.part").exists()
    return lines[0].removeprefix("kvcompile: error: ")


FOREIGN = [
    "model.layers.0.self_attn.o_proj.input_quant.scale",
    "model.layers.0.mlp.act_fn.scales",
    "model.layers.1.self_attn.rotation",
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.bias",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tensor_that_could_change_results_is_refused_by_its_name(folder, published, tmp_path, capsys, name):
    line = _refused(capsys, folder({**published, name: torch.ones(4)}), tmp_path / "out")
    assert f"tensor {name} has no place in a W4A8 Llama, and leaving it out could change results; " in line


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj.qweight"),
        ("model.layers.1.input_layernorm", "model.layers.1.input_layernorm.weight"),
        ("model.embed_tokens", "model.embed_tokens.weight"),
        ("model.norm", "model.norm.weight"),
        ("lm_head", "lm_head.weight"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused(folder, published, tmp_path, capsys, name, wanted):
    tensors = {key: value for key, value in published.items() if not key.startswith(f"{name}.")}
    line = _refused(capsys, folder(tensors), tmp_path / "out")
    assert line == f"the checkpoint has nothing for {wanted}; it is incomplete, get it again"
    assert not (tmp_path / "out").exists()


def test_tied_embeddings_need_no_head(folder, published, tmp_path):
    tensors = {name: tensor for name, tensor in published.items() if name != "lm_head.weight"}
    source = folder(tensors, tie_word_embeddings=True)
    assert main(["import-qserve", str(source), str(tmp_path / "out")]) == 0
    assert "lm_head.weight" not in _loaded(tmp_path / "out")[0]


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.qweight", "model.layers.10.input_layernorm.weight"])
def test_a_layer_more_than_the_configuration_has_is_refused(folder, published, tmp_path, capsys, name):
    source = folder({**published, name: torch.ones(HIDDEN)})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor {name} is of layer {name.split('.')[2]}; by config.json num_hidden_layers is 2, so that "
        "the last one is 1; the two do not belong together, get the checkpoint again"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_a_kept_tensor_of_another_dtype_is_refused(folder, published, tmp_path, capsys, name, dtype):
    source = folder({**published, name: torch.ones(HIDDEN, dtype=dtype)})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor {name} is {dtype}; allowed are torch.float16, torch.bfloat16, torch.float32; quantise "
        "the original model with `kvcompile quantize` instead"
    )


def test_a_weight_that_is_not_exact_here_is_refused_with_its_layer(folder, published, tmp_path, capsys):
    name = "model.layers.1.mlp.down_proj"
    tensors = {**published, f"{name}.s2_scales": torch.full((2, HIDDEN), 13, dtype=torch.int8)}
    tensors[f"{name}.s2_zeros"] = torch.full((2, HIDDEN), -40, dtype=torch.int8)
    line = _refused(capsys, folder(tensors), tmp_path / "out")
    assert line.startswith(f"{name}: row 0, group 0: its zero point is not a whole number of 0 to 15 times s2")
    assert line.endswith("; quantise the original model with `kvcompile quantize` instead")


def test_merged_rows_that_do_not_fit_the_configuration_are_refused(folder, published, tmp_path, capsys):
    block = "model.layers.0.self_attn"
    renamed = {key.replace(f"{block}.q_proj", f"{block}.qkv_proj"): value for key, value in published.items()}
    line = _refused(capsys, folder(renamed), tmp_path / "out")
    assert line == f"{block}.qkv_proj: has 128 output channels; by config.json it is 256"


def test_an_unquantised_checkpoint_is_refused(folder, tmp_path, capsys):
    line = _refused(capsys, folder({"model.norm.weight": torch.ones(4)}), tmp_path / "out")
    assert "has no s1_scales, so it is no W4A8 checkpoint of QServe" in line


def test_a_file_of_the_converter_that_orders_scales_otherwise_is_refused(folder, published, tmp_path, capsys):
    line = _refused(capsys, folder(published, "quant_model.pt"), tmp_path / "out")
    assert "quant_model.pt is of deepcompressor's own converter, which orders the scales of groups otherwise" in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is ['GPT2LMHeadModel']; supported are LlamaForCausalLM",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; allowed is a whole number from 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is of awq, not of QServe"),
    ],
)
def test_a_configuration_of_something_else_is_refused(folder, published, tmp_path, capsys, changes, says):
    assert says in _refused(capsys, folder(published, **changes), tmp_path / "out")


def test_a_damaged_file_is_refused(folder, published, tmp_path, capsys):
    source = folder(published)
    with (source / "pytorch_model.bin").open("r+b") as file:
        file.truncate(5000)
    assert f"{source / 'pytorch_model.bin'} cannot be read (" in _refused(capsys, source, tmp_path / "out")


def test_code_in_a_file_is_not_run(folder, tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    line = _refused(capsys, folder({"a.s1_scales": Trap()}), tmp_path / "out")
    assert "cannot be read" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("given", ["nowhere", "src/config.json"])
def test_a_source_that_is_no_checkpoint_folder_is_refused(folder, published, tmp_path, capsys, given):
    folder(published)
    assert "has no config.json; give the folder of a QServe checkpoint" in _refused(
        capsys, tmp_path / given, tmp_path / "out"
    )


def test_an_output_that_exists_or_lies_in_the_source_is_refused(folder, published, tmp_path, capsys):
    source = folder(published)
    assert "lie one in the other; name another OUT" in _refused(capsys, source, source / "out")
    (tmp_path / "out").mkdir()
    assert "exists; name a new folder, or remove it" in _refused(capsys, source, tmp_path / "out")
