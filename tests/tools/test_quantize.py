"""`kvcompile quantize` on small random checkpoints: what OUT holds, and that SRC is left alone."""

import json
import subprocess
import sys

import pytest
import torch
from tests.tools import quantize_sources as sources

from kvcompile import cli
from kvcompile.ops.w4a8 import check_weight, dequantize, quantize
from kvcompile.tools.prose import prose


def _quantize(source, out, *arguments):
    assert cli.main(["quantize", str(source), str(out), *arguments]) == 0
    return sources.read(out)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(prose()[:2100], encoding="utf-8")
    return file


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_writes_what_the_operator_rounds_to(tmp_path, shards, dtype):
    state = sources.tensors(dtype=dtype)
    out = _quantize(
        sources.write(tmp_path / "s", state, shards=shards), tmp_path / "o", "--method", "rtn", "--group-size", "64"
    )
    for name in sources.linear_names():
        for field, wanted in quantize(state[f"{name}.weight"], 64)._asdict().items():
            assert torch.equal(out[f"{name}.{field}"], wanted), f"{name}.{field}"
    assert not any(f"{name}.weight" in out for name in sources.linear_names())


@pytest.mark.parametrize("tied", [True, False])
def test_everything_but_the_linears_is_kept_bit_for_bit_with_its_dtype(tmp_path, tied):
    state = sources.tensors(tied=tied, bias=True)
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    source = sources.write(tmp_path / "s", state, tie_word_embeddings=tied, **qwen2)
    out = _quantize(source, tmp_path / "o", "--method", "rtn")
    kept = {
        name: tensor for name, tensor in state.items() if name.removesuffix(".weight") not in sources.linear_names()
    }
    assert sum(name.endswith(".bias") for name in kept) == 3 * sources.LAYERS
    for name, tensor in kept.items():
        assert out[name].dtype == tensor.dtype and torch.equal(out[name], tensor), name
    assert len(out) == len(kept) + 4 * len(sources.linear_names())


def test_the_configuration_tells_vllm_all_and_keeps_what_was_there(tmp_path):
    _quantize(sources.write(tmp_path / "s"), tmp_path / "o")
    written = json.loads((tmp_path / "o" / "config.json").read_text())
    assert written.pop("quantization_config") == {
        "quant_method": "kvcompile_w4a8",
        "format": 1,
        "group_size": 128,
        "group_sizes": {"128": 128, "192": 64},
        "method": "search",
        "modules_to_not_convert": [],
    }
    assert written == sources.CONFIG


def test_a_width_that_is_no_multiple_of_the_group_is_told_once(tmp_path, capsys):
    _quantize(sources.write(tmp_path / "s"), tmp_path / "o", "--group-size", "128")
    told = [line for line in capsys.readouterr().err.splitlines() if "instead" in line]
    assert told == ["quantize: 192 input channels do not divide into groups of 128: groups of 64 instead"]


def test_one_group_per_channel(tmp_path, capsys):
    out = _quantize(sources.write(tmp_path / "s"), tmp_path / "o", "--group-size", "channel")
    for name in sources.linear_names():
        assert out[f"{name}.group_scales"].shape[1] == 1
        check_weight(sources.linear(out, name))
    written = json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]
    assert (written["group_size"], written["group_sizes"]) == ("channel", {"128": 128, "192": 192})
    assert "instead" not in capsys.readouterr().err


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_with_and_without_an_index_and_written_with_one(tmp_path, index):
    state = _quantize(sources.write(tmp_path / "s", shards=2, index=index), tmp_path / "o")
    written = json.loads((tmp_path / "o" / "model.safetensors.index.json").read_text())
    assert written["weight_map"].keys() == state.keys()
    assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    for file in set(written["weight_map"].values()):
        with sources.safe_open(tmp_path / "o" / file, "pt") as handle:
            assert set(handle.keys()) == {name for name, where in written["weight_map"].items() if where == file}


def test_files_beside_the_weights_are_copied_and_the_source_is_not_touched(tmp_path, text):
    source = sources.write(tmp_path / "s", shards=2)
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    before = sources.hashes(source)
    _quantize(source, tmp_path / "o", "--calibration", str(text), "--perplexity", str(text))
    assert sources.hashes(source) == before
    after = sources.hashes(tmp_path / "o")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert after[name] == before[name], name
    assert "pytorch_model.bin" not in after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "s", "text.txt"]


@pytest.mark.parametrize("method", ["rtn", "search", "gptq"])
def test_the_report_agrees_with_the_written_weights(tmp_path, capsys, text, method):
    state = sources.tensors()
    calibration = ["--calibration", str(text)] if method == "gptq" else []
    out = _quantize(sources.write(tmp_path / "s", state, shards=2), tmp_path / "o", "--method", method, *calibration)
    report = json.loads((tmp_path / "o" / "kvcompile_quantize.json").read_text())
    assert [row["name"] for row in report["layers"]] == sources.linear_names()
    for row in report["layers"]:
        weight = state[f"{row['name']}.weight"].double()
        error = (weight - dequantize(sources.linear(out, row["name"]))).norm() / weight.norm()
        assert row["weight_error"] == pytest.approx(error.item(), rel=1e-4)
        assert (row["output_error"] is None) == (method != "gptq")
    total = {row["kind"]: row for row in report["summary"]}
    rows = total["down_proj"]["weights"]
    assert rows == sources.LAYERS * sources.HIDDEN * sources.MLP
    # 4 bits, 16 bits of s2 and z per group of 64, 32 bits of s1 per channel
    assert total["down_proj"]["bits_per_weight"] == pytest.approx(4 + 16 / 64 + 32 / sources.MLP)
    assert total["q_proj"]["bits_per_weight"] == pytest.approx(4 + 16 / 128 + 32 / sources.HIDDEN)
    assert report["tensor_bytes"]["after"] == sum(tensor.nbytes for tensor in out.values())
    assert report["tensor_bytes"]["before"] == sum(tensor.nbytes for tensor in state.values())
    assert "down_proj" in capsys.readouterr().out


def test_search_and_rounding_import_no_transformers(tmp_path):
    code = (
        "import sys; from kvcompile import cli;"
        f"assert cli.main(['quantize', {str(sources.write(tmp_path / 's'))!r}, {str(tmp_path / 'o')!r}]) == 0;"
        "assert not {'transformers', 'vllm'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_memory_stays_below_two_shards(tmp_path):
    state = sources.tensors(layers=16, mlp=16384)  # 48 tensors of 8 MiB
    large = sources.write(tmp_path / "large", state, shards=4, num_hidden_layers=16, intermediate_size=16384)
    shard = max(file.stat().st_size for file in large.glob("*.safetensors"))
    small = sources.write(tmp_path / "small")
    code = (
        "import sys; from resource import RUSAGE_SELF, getrusage; from kvcompile import cli\n"
        "def peak(source): assert cli.main(['quantize', source, source + '-out', '--method', 'rtn']) == 0;"
        " return getrusage(RUSAGE_SELF).ru_maxrss\n"
        "before = peak(sys.argv[1]); print((peak(sys.argv[2]) - before) * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(small), str(large)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout.splitlines()[-1]) < 2 * shard
    assert int(done.stdout.splitlines()[-1]) < sum(tensor.nbytes for tensor in state.values()) / 2
