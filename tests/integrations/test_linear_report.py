"""What the log says of W4A8 linears: how they were quantised while loading, and what is off without the preset."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvcompile import __version__
from kvcompile.integrations.vllm import linear_report
from tests.integrations.w4a8_checkpoints import QUANTISED
from tests.integrations.w4a8_layers import HEAD, checkpoint_of, config_of, finish, layer_of, load, rank, weights


@pytest.mark.parametrize(
    ("fields", "how"),
    [
        ({}, "W4A8 checkpoint, lm_head as it is: modules_to_not_convert has it"),
        ({"quantization": "kvcompile_w4a8"}, "quantised while loading, lm_head int8"),
    ],
)
def test_without_the_preset_one_line_says_what_is_not_active(engine_args, checkpoint, startup_lines, fields, how):
    model = checkpoint() if fields else checkpoint(quantization_config=QUANTISED)
    engine_args(model=model, **fields).create_engine_config()
    assert startup_lines == [
        f"kvcompile {__version__}: active: linear ({how}); not active without --compilation-config kvcompile: kv8, "
        "passes, prune, scheduler"
    ]


@pytest.mark.parametrize("fields", [{}, {"quantization": "fp8"}])
def test_of_other_models_nothing_is_said_without_the_preset(engine_args, startup_lines, fields):
    engine_args(**fields).create_engine_config()
    assert startup_lines == []


def _model(group: int | None) -> torch.nn.Module:
    """Two linears, 256 and 320 wide, of a checkpoint in groups of `group`, or rounded while loading (None)."""
    model = torch.nn.Module()
    with rank(0, 1):
        for name, width, sizes in (("qkv_proj", 256, [2 * HEAD, HEAD, HEAD]), ("down_proj", 320, [72])):
            layer = layer_of(name, width, sizes, config_of(width, group))
            floats = weights(name, width, sizes)
            plain = {part: {"weight": weight} for part, weight in floats.items()}
            load(layer, name, checkpoint_of(floats, group) if group else plain)
            model.add_module(name, finish(layer))
    return model


def test_linears_that_were_quantised_while_loading_are_counted_with_groups_and_bits(startup_lines):
    linear_report.say_what_was_quantised(_model(None))
    # 80 rows are stored for the 72 of the second: the kernels take 16 at a time.
    bits = 256 * 256 * 4 + 256 * 2 * 16 + 256 * 32 + 80 * 320 * 4 + 80 * 5 * 16 + 72 * 32
    assert startup_lines == [
        "W4A8: 2 linears were quantised while loading, by rounding to nearest (rtn; `kvcompile quantize` searches or "
        f"calibrates instead): 1 in groups of 128 and 1 in groups of 64, {bits / (256 * 256 + 72 * 320):.3f} bits per "
        "weight"
    ]


def test_of_a_checkpoint_nothing_was_quantised_while_loading(startup_lines):
    linear_report.say_what_was_quantised(_model(64))
    assert startup_lines == []


def test_loading_the_plugin_imports_none_of_vllms_loaders_or_layers():
    program = (
        "import sys, vllm.engine.arg_utils; from kvcompile.plugin import register; before = set(sys.modules);"
        "register(); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "VLLM_PLUGINS": ""},
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert "kvcompile.integrations.vllm.linear_config" in loaded
    heavy = ("vllm.model_executor.model_loader", "vllm.model_executor.layers.linear")
    assert [name for name in loaded if name.startswith(heavy)] == []
