"""What `kvcompile import-qserve` refuses: one line, exit code 2, nothing left behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.tools import qserve_sources
from tests.tools.qserve_sources import HIDDEN, Tensors, merged, without

from kvcompile.cli import main
from kvcompile.tools.quantize_output import Workspace


@pytest.fixture(scope="module")
def published() -> Tensors:
    return qserve_sources.published()


@pytest.fixture
def folder(tmp_path: Path):
    """`folder(tensors, file, **changes of config.json)`: a checkpoint folder."""
    return partial(qserve_sources.write, tmp_path / "src")


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
    left = without(published, f"{block}.k_proj", f"{block}.v_proj")
    source = folder({key.replace(f"{block}.q_proj", f"{block}.qkv_proj"): value for key, value in left.items()})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor {block}.qkv_proj.qweight has shape [128, 64], by config.json it has [256, 64]; the two "
        "do not belong together, get the checkpoint again"
    )


def test_a_linear_that_is_there_merged_and_by_itself_is_refused(folder, published, tmp_path, capsys):
    up = "model.layers.1.mlp.up_proj.qweight"
    source = folder({**merged(published), up: published[up]})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: {up} is there twice, by itself and in model.layers.1.mlp.gate_up_proj.qweight; remove one of "
        "them"
    )


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("model.layers.0.self_attn.k_proj.bias", [128], [64]),
        ("model.layers.1.self_attn.q_proj.bias", [128, 1], [128]),
        ("model.layers.1.self_attn.o_proj.bias", [0], [128]),
        ("model.norm.weight", [64], [128]),
        ("model.layers.1.input_layernorm.weight", [1, 128], [128]),
        ("model.embed_tokens.weight", [63, 128], [64, 128]),
        ("lm_head.weight", [64, 64], [64, 128]),
    ],
)
def test_a_shape_that_is_not_that_of_the_configuration_is_refused(
    folder, published, tmp_path, capsys, name, given, wanted
):
    biases = {
        f"model.layers.{i}.self_attn.{part}_proj.bias": torch.ones(64 if part in "kv" else 128).half()
        for i in range(2)
        for part in "qkvo"
    }
    source = folder({**published, **biases, name: torch.ones(given).half()}, attention_bias=True)
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor {name} has shape {given}, by config.json it has {wanted}; the two do not belong "
        "together, get the checkpoint again"
    )


def test_a_bias_that_vllm_would_leave_out_is_refused(folder, published, tmp_path, capsys):
    name = "model.layers.1.self_attn.q_proj.bias"
    source = folder({**published, name: torch.ones(128).half()})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor {name} is a bias that config.json does not have, so that vLLM would leave it out; set "
        "attention_bias or mlp_bias there"
    )


def test_a_bias_that_is_missing_is_refused(folder, published, tmp_path, capsys):
    line = _refused(capsys, folder(published, attention_bias=True), tmp_path / "out")
    assert line == "the checkpoint has nothing for model.layers.0.self_attn.q_proj.bias; it is incomplete, get it again"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.post_attention_layernorm.weight"]
)
def test_a_kept_tensor_that_is_not_finite_is_refused(folder, published, tmp_path, capsys, name, value):
    tensor = published[name].clone()
    tensor.flatten()[7] = value
    source = folder({**published, name: tensor})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor {name} holds NaN or infinity; get the checkpoint again"
    )


def test_scales_that_are_not_finite_are_refused(folder, published, tmp_path, capsys):
    name = "model.layers.1.mlp.up_proj"
    tensors = {**published, f"{name}.s1_scales": published[f"{name}.s1_scales"].clone()}
    tensors[f"{name}.s1_scales"][3] = torch.nan
    line = _refused(capsys, folder(tensors), tmp_path / "out")
    assert line.startswith(f"{name}: channel_scales hold a value that is not finite and above 0; ")


def test_a_tensor_in_two_files_is_refused(folder, published, tmp_path, capsys):
    source = folder(published)
    torch.save({"model.norm.weight": published["model.norm.weight"]}, source / "pytorch_model_2.bin")
    assert _refused(capsys, source, tmp_path / "out") == (
        f"SRC {source}: tensor model.norm.weight is in pytorch_model_2.bin and in another file; remove one of them"
    )


def test_an_unquantised_checkpoint_is_refused(folder, tmp_path, capsys):
    line = _refused(capsys, folder({"model.norm.weight": torch.ones(4)}), tmp_path / "out")
    assert "has no s1_scales, so it is no W4A8 checkpoint of QServe" in line


def test_a_file_of_the_converter_that_orders_scales_otherwise_is_refused(folder, published, tmp_path, capsys):
    line = _refused(capsys, folder(published, "quant_model.pt"), tmp_path / "out")
    assert "quant_model.pt is of deepcompressor's own converter, which orders the scales of groups otherwise" in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is None; allowed is a whole number from 1"),
        ({"head_dim": "x"}, "head_dim is 'x'; allowed is a whole number from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; allowed is a whole number from 1"),
        ({"intermediate_size": True}, "intermediate_size is True; allowed is a whole number from 1"),
    ],
)
def test_a_size_that_is_none_is_refused(folder, published, tmp_path, capsys, changes, says):
    assert says in _refused(capsys, folder(published, **changes), tmp_path / "out")


@pytest.mark.parametrize("described", ["qserve", {"quant_method": "QServe"}, None, ""])
def test_a_configuration_that_names_qserve_or_nothing_is_taken(folder, published, tmp_path, described):
    source = folder(published, quantization_config=described)
    assert main(["import-qserve", str(source), str(tmp_path / "out")]) == 0


def test_an_interruption_is_told_and_leaves_nothing(folder, published, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Workspace, "copy", stop)
    assert main(["import-qserve", str(folder(published)), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "import-qserve: interrupted: nothing is kept, as no step was finished; run the same again to start over"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_damaged_file_is_refused(folder, published, tmp_path, capsys):
    source = folder(published)
    with (source / "pytorch_model.bin").open("r+b") as file:
        file.truncate(5000)
    assert f"{source / 'pytorch_model.bin'} cannot be read (" in _refused(capsys, source, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; get the checkpoint again"),
        (b"version https://git-lfs.github.com/spec/v1", "is not a file of torch.save; get the checkpoint again"),
        (bytes(5000), "is not a file of torch.save; get the checkpoint again"),
    ],
)
def test_a_file_that_is_none_of_torch_is_said_to_be_so(folder, published, tmp_path, capsys, content, said):
    source = folder(published)
    (source / "pytorch_model.bin").write_bytes(content)
    assert _refused(capsys, source, tmp_path / "out") == f"{source / 'pytorch_model.bin'} {said}"


def test_a_legacy_file_is_said_to_be_one_with_what_to_do(folder, published, tmp_path, capsys):
    source = folder(published)
    torch.save(published, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert _refused(capsys, source, tmp_path / "out") == (
        f"{source / 'pytorch_model.bin'} is in the format of torch.save before torch 1.6, which cannot be mapped; load "
        "it with a current torch and torch.save it anew"
    )


@pytest.mark.parametrize(
    ("tensor", "odd"),
    [
        (torch.eye(4).to_sparse(), "sparse"),
        (torch.empty(4, device="meta"), "on the meta device, without values"),
        (torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "of a quantised dtype of torch's own"),
    ],
    ids=["sparse", "meta", "quantised"],
)
def test_a_tensor_that_is_not_dense_is_named(folder, published, tmp_path, capsys, recwarn, tensor, odd):
    source = folder({**published, "model.norm.weight": tensor})
    recwarn.clear()
    assert _refused(capsys, source, tmp_path / "out") == (
        f"{source / 'pytorch_model.bin'}: tensor model.norm.weight is {odd}; allowed are dense ones; get the "
        "checkpoint again"
    )
    assert not recwarn.list  # they would be further lines on standard error


@pytest.mark.parametrize(("name", "shown"), [(3, "3"), (("a", 1), "('a', 1)"), (None, "none")])
def test_a_tensor_whose_name_is_no_text_is_told(folder, published, tmp_path, capsys, name, shown):
    source = folder({**published, name: torch.ones(4)})
    assert _refused(capsys, source, tmp_path / "out") == (
        f"{source / 'pytorch_model.bin'} has a tensor named {shown}; allowed are texts; give a QServe checkpoint"
    )


def test_code_in_a_file_is_not_run(folder, tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    line = _refused(capsys, folder({"a.s1_scales": Trap()}), tmp_path / "out")
    assert "cannot be read" in line
    assert not (tmp_path / "ran").exists()


def test_an_output_that_exists_or_lies_in_the_source_is_refused(folder, published, tmp_path, capsys):
    source = folder(published)
    assert "lie one in the other; name another OUT" in _refused(capsys, source, source / "out")
    (tmp_path / "out").mkdir()
    assert "exists; name a new folder, or remove it" in _refused(capsys, source, tmp_path / "out")
