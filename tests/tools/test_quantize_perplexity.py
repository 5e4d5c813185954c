"""Perplexity through the operators, layer by layer: the same as the whole model of transformers."""

import json
import math

import pytest
import torch
from tests.tools import quantize_sources as sources
from torch.nn import functional

from kvcompile import cli
from kvcompile.ops.w4a8 import dequantize, quantize
from kvcompile.tools.prose import prose
from kvcompile.tools.quantize_calibrate import QuantisedLinear
from kvcompile.tools.quantize_model import windows
from kvcompile.tools.quantize_perplexity import W4A8Linear, compare, losses, tokens_of
from kvcompile.tools.quantize_source import Source, TensorFiles

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"attention_bias": False},
}


def _make(folder, family):
    state = sources.tensors(
        bias=family == "qwen2", head_norms=family == "qwen3", tied=FAMILIES[family].get("tie_word_embeddings", True)
    )
    names = {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family}
    return sources.write(folder, state, **names, **FAMILIES[family])


def _reference(folder, ids, weights):
    """Losses of the model that transformers loads, with `weights` (by name) in the place of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        logits = model(ids).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_gives_the_losses_of_the_whole_model(tmp_path, family):
    source = Source(_make(tmp_path / "s", family))
    tokens = list(prose()[:1500].encode())
    with torch.inference_mode():
        mine = losses(source.path, source, tokens, lambda layers: None)
    assert mine.shape == (2, 511)
    torch.testing.assert_close(mine, _reference(source.path, windows(tokens, 512), {}), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_calibrated(tmp_path, family):
    text = tmp_path / "text.txt"
    text.write_text(prose()[:3000], encoding="utf-8")
    source = _make(tmp_path / "s", family)
    after = {}
    for method, some in (("rtn", []), ("gptq", ["--calibration", str(text)])):
        out = tmp_path / method
        arguments = ["--method", method, "--perplexity", str(text), *some]
        assert cli.main(["quantize", str(source), str(out), *arguments]) == 0
        after[method] = json.loads((out / "kvcompile_quantize.json").read_text())["perplexity"]["after"]
    before = json.loads((tmp_path / "rtn" / "kvcompile_quantize.json").read_text())["perplexity"]["before"]
    # The text is the one that was calibrated on, so that a model of noise can be held to it.
    assert abs(after["gptq"] - before) < abs(after["rtn"] - before) + 0.02


@pytest.mark.parametrize("bias", [True, False])
def test_the_operators_give_what_rounded_activations_and_rebuilt_weights_give(bias):
    generator = torch.Generator().manual_seed(2)
    weight = quantize(torch.randn(48, 192, generator=generator), 64)
    offset = torch.randn(48, generator=generator) if bias else None
    x = torch.randn(3, 5, 192, generator=generator)
    with torch.inference_mode():
        torch.testing.assert_close(
            W4A8Linear(weight, offset)(x), QuantisedLinear(weight, offset)(x), rtol=1e-4, atol=1e-4
        )


def test_both_numbers_and_their_difference_are_reported(tmp_path, capsys):
    source = sources.write(tmp_path / "s")
    text = tmp_path / "text.txt"
    text.write_text(prose()[:2000], encoding="utf-8")
    assert cli.main(["quantize", str(source), str(tmp_path / "o"), "--method", "rtn", "--perplexity", str(text)]) == 0
    told = json.loads((tmp_path / "o" / "kvcompile_quantize.json").read_text())["perplexity"]
    ids = windows(tokens_of(text, source, "--perplexity", sources.VOCAB), 512)
    before = _reference(source, ids, {})
    state = sources.read(tmp_path / "o")
    rebuilt = {f"{name}.weight": dequantize(sources.linear(state, name)) for name in sources.linear_names()}
    assert told["tokens"] == before.numel() == 3 * 511
    assert told["before"] == pytest.approx(before.mean().item(), rel=1e-5)
    assert told["perplexity_before"] == pytest.approx(math.exp(told["before"]))
    # Without int8 activations the reference is only near.
    assert told["after"] == pytest.approx(_reference(source, ids, rebuilt).mean().item(), rel=5e-3)
    assert told["difference"] == pytest.approx(told["after"] - told["before"])
    assert f"perplexity on {before.numel()} tokens: {math.exp(told['before']):.3f} before" in capsys.readouterr().out


def test_the_standard_error_is_over_windows():
    before = torch.zeros(4, 10)
    after = torch.tensor([0.1, 0.3, 0.1, 0.3])[:, None].expand(4, 10)
    found = compare(before, after)
    assert (found.tokens, found.difference) == (40, pytest.approx(0.2))
    # deviations of 0.1 from the mean: variance 4 * 0.01 / 3, over 4 windows
    assert found.standard_error == pytest.approx((0.04 / 3 / 4) ** 0.5)
    assert compare(before[:1], after[:1]).standard_error is None


def test_tensors_are_read_from_any_of_the_files(tmp_path):
    folder = sources.write(tmp_path / "s", shards=3)
    files = TensorFiles(folder, sorted(file.name for file in folder.glob("*.safetensors")))
    for name, tensor in sources.tensors().items():
        assert torch.equal(files.read(name), tensor), name


@pytest.mark.parametrize(("asked", "used", "told"), [(1024, 1024, ""), (4096, 1024, ": the text has 1200, fewer than")])
def test_the_tokens_that_calibrate_are_told(tmp_path, capsys, asked, used, told):
    text = tmp_path / "text.txt"
    text.write_text("x" * 1200)
    arguments = ("--calibration", text, "--calibration-tokens", asked)
    assert cli.main(["quantize", *map(str, (sources.write(tmp_path / "s"), tmp_path / "o", *arguments))]) == 0
    ending = f"{told} --calibration-tokens {asked}" if told else ""
    assert f"calibrated on {used} tokens{ending}" in capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "o/kvcompile_quantize.json").read_text())
    assert report["calibration"] == {"tokens": used, "tokens_asked_for": asked}
