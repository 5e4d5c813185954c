"""What `kvcompile quantize` refuses as SRC, before anything is written: one line, exit code 2, nothing left behind."""

import json

import pytest
import torch
from tests.tools import quantize_sources as sources

from kvcompile import cli
from kvcompile.ops.w4a8 import dequantize
from kvcompile.tools.quantize_source import LARGEST

_LINEAR = "model.layers.1.mlp.up_proj"
_NORM = "model.layers.1.input_layernorm"


def _changed(name, change):
    state = sources.tensors()
    change(state, name)
    return state


def _with(state):
    return lambda folder: sources.write(folder, state)


def _set(value):
    def change(state, name):
        state[name][3, 5] = value

    return change


def _without_config(folder):
    sources.write(folder)
    (folder / "config.json").unlink()


def _with_config(text):
    def make(folder):
        sources.write(folder)
        (folder / "config.json").write_text(text)

    return make


def _config(**changes):
    return lambda folder: sources.write(folder, **changes)


def _missing_shard(index):
    def make(folder):
        sources.write(folder, shards=3, index=index)
        (folder / "model-00002-of-00003.safetensors").unlink()

    return make


def _damaged(change):
    def make(folder):
        sources.write(folder)
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return make


def _weights_of_another_kind(folder):
    sources.write(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _twice(folder):
    sources.write(folder, shards=2, index=False)
    (folder / "other.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())


def _index(text):
    def make(folder):
        sources.write(folder, shards=2)
        (folder / "model.safetensors.index.json").write_text(text)

    return make


def _already(state, name):
    state[f"{name}.qweight"] = state.pop(f"{name}.weight").to(torch.uint8)


def _to_float8(state, name):
    state[f"{name}.weight"] = state[f"{name}.weight"].to(torch.float8_e4m3fn)


def _to_float64(state, name):
    state[name] = state[name].double()


def _remove(state, name):
    del state[name]


def _add(state, name):
    state[name] = torch.ones(4)


def _empty(state, name):
    state[name] = state[name][:0]


def _moved(folder):
    """The index has one tensor in the other file."""
    sources.write(folder, shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))


def _invented(folder):
    """The index has a tensor more than the files."""
    sources.write(folder, shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.layers.0.nothing.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))


def _narrow(folder):
    sources.write(folder, sources.tensors(mlp=190), intermediate_size=190)


def _flat(state, name):
    state[f"{name}.weight"] = torch.ones(7)


BAD_SOURCES = {
    "no folder": (lambda folder: None, "no such folder"),
    "a file": (lambda folder: folder.write_text("x"), "is a file"),
    "no config": (_without_config, "no config.json"),
    "no layers": (_config(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "too many layers": (_config(num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight is missing"),
    "quantised by its config": (_config(quantization_config={"quant_method": "awq"}), "is quantised already"),
    "quantised by its tensors": (_with(_changed(_LINEAR, _already)), f"holds {_LINEAR}.qweight: it is quantised"),
    "float8": (_with(_changed(_LINEAR, _to_float8)), f"tensor {_LINEAR}.weight is F8_E4M3; allowed are BF16"),
    "a missing shard": (_missing_shard(True), "shard model-00002-of-00003.safetensors is missing"),
    "a missing shard without index": (_missing_shard(False), "shard model-00002-of-00003.safetensors is missing"),
    "an empty index": (_index('{"weight_map": {}}'), "has no weight_map"),
    "an index that leaves the folder": (
        _index('{"weight_map": {"a": "../x.safetensors"}}'),
        "names ../x.safetensors; allowed are files of the same folder; get the checkpoint again",
    ),
    "an index that is no JSON": (_index("{"), "index.json cannot be read as JSON (Expecting property name enclosed"),
    "no safetensors": (_weights_of_another_kind, "no safetensors file"),
    "a tensor twice": (_twice, "model.embed_tokens.weight is in"),
    "truncated": (_damaged(lambda data: data[:-10]), "cannot be read as safetensors"),
    "garbage": (_damaged(lambda data: b"\xff" * 100), "cannot be read as safetensors"),
    "empty": (_damaged(lambda data: b""), "cannot be read as safetensors"),
    "NaN": (_with(_changed(f"{_LINEAR}.weight", _set(float("nan")))), f"tensor {_LINEAR}.weight holds NaN"),
    "infinity": (_with(_changed("model.embed_tokens.weight", _set(-float("inf")))), "model.embed_tokens.weight holds"),
    "an impossible width": (_narrow, "in_features is 190"),
    "a flat weight": (_with(_changed(_LINEAR, _flat)), f"{_LINEAR}.weight has shape [7], by config.json it has [192"),
    "no rows": (_with(_changed(f"{_LINEAR}.weight", _empty)), f"{_LINEAR}.weight has shape [0, 128], by config.json"),
    "no embeddings": (_with(_changed("model.embed_tokens.weight", _empty)), "has shape [0, 128], by config.json it"),
    "an empty extra": (
        _with(_changed("lm_head.weight", lambda state, name: state.update({name: torch.ones(0, 128)}))),
        "tensor lm_head.weight is empty",
    ),
    "float8 embeddings": (_with(_changed("model.embed_tokens", _to_float8)), "model.embed_tokens.weight is F8_E4M3; a"),
    "float64 norms": (
        _with(_changed("model.norm.weight", _to_float64)),
        "tensor model.norm.weight is F64; allowed are",
    ),
    "no norm of a layer": (_with(_changed(f"{_NORM}.weight", _remove)), f"tensor {_NORM}.weight is missing"),
    "no last norm": (_with(_changed("model.norm.weight", _remove)), "tensor model.norm.weight is missing"),
    "no head": (_config(tie_word_embeddings=False), "tensor lm_head.weight is missing from the weight files"),
    "too few layers": (
        _config(num_hidden_layers=1),
        "tensor model.layers.1.input_layernorm.weight has no place in the LlamaForCausalLM of config.json, which has 1",
    ),
    "a bias that config.json does not name": (_with(_changed(f"{_LINEAR}.bias", _add)), f"{_LINEAR}.bias has no place"),
    "no bias": (_config(attention_bias=True), "tensor model.layers.0.self_attn.q_proj.bias is missing"),
    "no bias of Qwen2": (
        _config(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
        "self_attn.q_proj.bias is missing",
    ),
    "no head norm of Qwen3": (
        _config(architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
        "self_attn.q_norm.weight is missing",
    ),
    "an unknown tensor": (_with(_changed("model.layers.0.rotation", _add)), "tensor model.layers.0.rotation has no pl"),
    "an index with a tensor elsewhere": (
        _moved,
        "has tensor model.norm.weight in model-00001-of-00002.safetensors, wh",
    ),
    "an index with a tensor nowhere": (_invented, "has tensor model.layers.0.nothing.weight in model-00001-of-00002"),
    "another width": (
        _config(intermediate_size=256),
        "gate_proj.weight has shape [192, 128], by config.json it has [256",
    ),
    "other heads": (
        _config(head_dim=32),
        "self_attn.q_proj.weight has shape [128, 128], by config.json it has [64, 128",
    ),
    "another vocabulary": (
        _config(vocab_size=300),
        "embed_tokens.weight has shape [256, 128], by config.json it has [3",
    ),
    "a width in words": (_config(hidden_size="wide"), "config.json: hidden_size is 'wide'; allowed is a whole number"),
    "no heads": (_config(num_attention_heads=0, head_dim=None), "config.json: num_attention_heads is 0; allowed is a"),
    "more heads than channels": (
        _config(num_attention_heads=500, head_dim=None),
        "num_attention_heads is 500 and hidden",
    ),
    "a head in words": (_config(head_dim="x"), "config.json: head_dim is 'x'; allowed is a whole number from 1"),
    "layers beyond measure": (_config(num_hidden_layers=10**12), "model.layers.2.self_attn.q_proj.weight is missing"),
    "huge weights": (
        _with({**sources.tensors(), f"{_LINEAR}.weight": torch.full((192, 128), 3e38)}),
        f"tensor {_LINEAR}.weight holds 3e+38; allowed are magnitudes up to 2.8e+14",
    ),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources_are_refused(tmp_path, capsys, case):
    make, told = BAD_SOURCES[case]
    make(tmp_path / "s")
    assert told in sources.refused(tmp_path, capsys, tmp_path / "s", tmp_path / "o")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_tensors_that_are_known_to_be_harmless_are_kept(tmp_path, name):
    state = {**sources.tensors(), name: torch.rand(256, 128)}
    assert (
        cli.main(["quantize", str(sources.write(tmp_path / "s", state)), str(tmp_path / "o"), "--method", "rtn"]) == 0
    )
    assert torch.equal(sources.read(tmp_path / "o")[name], state[name])


@pytest.mark.parametrize("method", ["rtn", "search"])
def test_the_largest_weights_that_are_allowed_are_quantised(tmp_path, method):
    name = "model.layers.0.mlp.up_proj"
    state = {**sources.tensors(), f"{name}.weight": torch.randn(192, 128).clamp(-1, 1) * LARGEST}
    assert (
        cli.main(["quantize", str(sources.write(tmp_path / "s", state)), str(tmp_path / "o"), "--method", method]) == 0
    )
    made = dequantize(sources.linear(sources.read(tmp_path / "o"), name))
    assert (made - state[f"{name}.weight"]).norm() < 0.15 * state[f"{name}.weight"].norm()
    report = json.loads((tmp_path / "o" / "kvcompile_quantize.json").read_text())
    assert all(0 < row["weight_error"] < 0.15 for row in report["layers"])
