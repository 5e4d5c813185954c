"""What `kvcompile quantize` refuses: one line, exit code 2, nothing left behind."""

import json

import pytest
import torch
from tests.tools import quantize_sources as sources

from kvcompile import cli

_LINEAR = "model.layers.1.mlp.up_proj"


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


def _narrow(state, name):
    state["model.layers.0.mlp.down_proj.weight"] = torch.ones(sources.HIDDEN, 190)


def _flat(state, name):
    state[f"{name}.weight"] = torch.ones(7)


BAD_SOURCES = {
    "no folder": (lambda folder: None, "no such folder"),
    "a file": (lambda folder: folder.write_text("x"), "is a file"),
    "no config": (_without_config, "no config.json"),
    "config is no JSON": (_with_config("{"), "cannot be read as JSON"),
    "config is a list": (_with_config("[]"), "holds no JSON object"),
    "no architecture": (_config(architectures=None), "architecture none is not supported"),
    "another architecture": (_config(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM is not supported"),
    "no layers": (_config(num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "too many layers": (_config(num_hidden_layers=3), "model.layers.2.self_attn.q_proj.weight is missing"),
    "quantised by its config": (_config(quantization_config={"quant_method": "awq"}), "is quantised already"),
    "quantised by its tensors": (_with(_changed(_LINEAR, _already)), f"holds {_LINEAR}.qweight: it is quantised"),
    "float8": (_with(_changed(_LINEAR, _to_float8)), f"{_LINEAR}.weight is F8_E4M3: it is quantised already"),
    "a missing shard": (_missing_shard(True), "shard model-00002-of-00003.safetensors is missing"),
    "a missing shard without index": (_missing_shard(False), "shard model-00002-of-00003.safetensors is missing"),
    "an empty index": (_index('{"weight_map": {}}'), "has no weight_map"),
    "an index that leaves the folder": (_index('{"weight_map": {"a": "../x.safetensors"}}'), "names ../x.safetensors"),
    "no safetensors": (_weights_of_another_kind, "no safetensors file"),
    "a tensor twice": (_twice, "model.embed_tokens.weight is in"),
    "truncated": (_damaged(lambda data: data[:-10]), "cannot be read as safetensors"),
    "garbage": (_damaged(lambda data: b"\xff" * 100), "cannot be read as safetensors"),
    "empty": (_damaged(lambda data: b""), "cannot be read as safetensors"),
    "NaN": (_with(_changed(f"{_LINEAR}.weight", _set(float("nan")))), f"tensor {_LINEAR}.weight holds NaN"),
    "infinity": (_with(_changed("model.embed_tokens.weight", _set(-float("inf")))), "model.embed_tokens.weight holds"),
    "an impossible width": (_with(_changed("", _narrow)), "in_features is 190"),
    "a flat weight": (_with(_changed(_LINEAR, _flat)), f"{_LINEAR}.weight has shape [7]"),
}


def _refused(tmp_path, capsys, *arguments):
    """The one line that a refused run writes; it must leave nothing."""
    before = sorted(tmp_path.iterdir())
    assert cli.main(["quantize", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvcompile: error: ") and err.count("\n") == 1, err
    assert sorted(tmp_path.iterdir()) == before
    return err


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources_are_refused(tmp_path, capsys, case):
    make, told = BAD_SOURCES[case]
    make(tmp_path / "s")
    assert told in _refused(tmp_path, capsys, tmp_path / "s", tmp_path / "o")


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("taken", "taken exists"),
        ("taken-file", "taken-file exists"),
        ("dangling", "dangling exists"),
        ("no/where", "no does not exist"),
        ("s/inside", "lie one in the other"),
        ("in-the-way", "in-the-way.part is in the way"),
        ("foreign", "foreign.part is not of a run"),
        (".", "lie one in the other"),
    ],
)
def test_places_that_cannot_become_out_are_refused(tmp_path, capsys, out, told):
    source = sources.write(tmp_path / "s")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken-file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "in-the-way.part").write_text("x")
    (tmp_path / "foreign.part").mkdir()
    (tmp_path / "foreign.part" / "mine.txt").write_text("x")
    assert told in _refused(tmp_path, capsys, source, tmp_path / out)
    assert (tmp_path / "foreign.part" / "mine.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--method", "gptq"], "give --calibration FILE"),
        (["--method", "rtn", "--calibration", "long.txt"], "--calibration has no use in --method rtn"),
        (["--calibration-tokens", "4096"], "--calibration-tokens has no use in --method search"),
        (["--calibration", "long.txt", "--calibration-tokens", "511"], "allowed is 512 or more"),
        (["--calibration", "short.txt"], "short.txt holds 5 tokens; at least 512"),
        (["--calibration", "none.txt"], "none.txt cannot be read"),
        (["--calibration", "binary.txt"], "binary.txt cannot be read as UTF-8 text"),
        (["--perplexity", "short.txt"], "short.txt holds 5 tokens; at least 512"),
        (["--perplexity", "none.txt"], "none.txt cannot be read"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(tmp_path, capsys, monkeypatch, arguments, told):
    source = sources.write(tmp_path / "s")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "long.txt").write_text("long " * 200)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 600)
    monkeypatch.chdir(tmp_path)
    assert told in _refused(tmp_path, capsys, source, tmp_path / "o", *arguments)


def test_a_checkpoint_without_a_tokenizer_cannot_be_calibrated(tmp_path, capsys):
    source = sources.write(tmp_path / "s")
    (tmp_path / "long.txt").write_text("long " * 200)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    err = _refused(tmp_path, capsys, source, tmp_path / "o", "--calibration", tmp_path / "long.txt")
    assert "the tokenizer of" in err and "cannot be loaded" in err


def _biased(state, name):
    state[f"{_LINEAR}.bias"] = torch.zeros(sources.MLP)


def _without_norm(state, name):
    del state["model.layers.1.input_layernorm.weight"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_config(intermediate_size=256), "model.layers.0.mlp.down_proj.weight has shape [128, 192], by config.json it"),
        (_config(head_dim=32), "self_attn.k_proj.weight has shape [64, 128], by config.json it has [32,"),
        (_config(num_hidden_layers=1, vocab_size=300), "embed_tokens.weight has shape [256, 128], by config.json"),
        (_config(hidden_size="wide"), "config.json: transformers makes no model of it"),
        (_config(num_attention_heads=0, head_dim=None), "config.json: transformers makes no model of it"),
        (_with(_changed("", _biased)), f"{_LINEAR}.bias has shape [192], by config.json it has none"),
        (_with(_changed("", _without_norm)), "1.input_layernorm.weight has shape none, by config.json it has [128]"),
    ],
)
def test_a_config_that_contradicts_the_tensors_cannot_be_run(tmp_path, capsys, make, told):
    make(tmp_path / "s")
    (tmp_path / "long.txt").write_text("long " * 200)
    assert told in _refused(tmp_path, capsys, tmp_path / "s", tmp_path / "o", "--perplexity", tmp_path / "long.txt")


def test_nor_can_it_be_calibrated(tmp_path, capsys):
    source = sources.write(tmp_path / "s", intermediate_size=256)
    (tmp_path / "long.txt").write_text("long " * 200)
    err = _refused(tmp_path, capsys, source, tmp_path / "o", "--calibration", tmp_path / "long.txt")
    assert "by config.json it has" in err


def test_an_already_quantised_checkpoint_of_ours_is_refused(tmp_path, capsys):
    source = sources.write(tmp_path / "s")
    assert cli.main(["quantize", str(source), str(tmp_path / "o")]) == 0
    capsys.readouterr()
    assert "kvcompile_w4a8" in _refused(tmp_path, capsys, tmp_path / "o", tmp_path / "again")
    assert json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]["format"] == 1
