"""Whoever does not ask for kvcompile gets vLLM's own configuration, field by field, as if it were not installed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationConfig, CompilationMode
from vllm.engine.arg_utils import EngineArgs

from kvcompile.config import UsageError
from kvcompile.integrations.vllm.active import is_active
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY
from kvcompile.presets import compilation_config

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "O0": {"optimization_level": 0},
    "O3": {"optimization_level": 3},
    "mode": {"compilation_config": {"mode": 2, "custom_ops": ["none"], "pass_config": {"fuse_norm_quant": True}}},
    "graph partition": {"compilation_config": {"use_inductor_graph_partition": True}},
    "inductor options": {"compilation_config": {"inductor_compile_config": {"max_autotune": True}}},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8_per_token_head"},
    "custom backend": {"attention_backend": "CUSTOM"},
    "additional": {"additional_config": {"other": 1}},
    "float32": {"dtype": "float32", "max_model_len": 128, "enable_prefix_caching": False},
}


def describe(args: Any) -> dict[str, Any]:
    """What vLLM makes of EngineArgs: its hash, and every attribute of every part, also what is no declared field."""
    config = args.create_engine_config()
    found = {"compute_hash": config.compute_hash()}

    def walk(prefix: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            for name, inner in vars(value).items():
                walk(f"{prefix}.{name}" if prefix else name, inner)
        else:
            found[prefix] = re.sub(r" at 0x[0-9a-f]+", "", repr(value))

    walk("", config)
    del found["instance_id"]  # a new one each time
    return found


PROGRAM = f"""
import dataclasses, json, re, sys
from typing import Any
from vllm.engine.arg_utils import EngineArgs
{inspect.getsource(describe)}
described = {{name: describe(EngineArgs(**fields)) for name, fields in json.loads(sys.argv[1]).items()}}
described["kvcompile"] = sorted(name for name in sys.modules if name.startswith("kvcompile"))
with open(sys.argv[2], "w") as file:
    json.dump(described, file)
"""


@pytest.fixture(scope="module")
def stock(llama: Path, hooks: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same cases described in a process that loads no plugin."""
    common = {"model": str(llama), "skip_tokenizer_init": True, "kv_cache_memory_bytes": 64 << 20}
    common |= {"load_format": "dummy"}
    EngineArgs(**common).create_engine_config()  # leaves what vLLM knows of the model class where the process finds it
    cases = {name: {**common, **fields} for name, fields in CASES.items()}
    output = tmp_path_factory.mktemp("stock") / "described.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases), str(output)],
        env={**os.environ, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


def test_the_other_process_knew_nothing_of_kvcompile(stock):
    assert stock["kvcompile"] == []


@pytest.mark.parametrize("case", CASES)
def test_an_unasked_configuration_is_vllms_own_with_the_same_compile_cache_key(stock, engine_args, case):
    ours = describe(engine_args(**CASES[case]))
    theirs = stock[case]
    assert len(theirs) > 300
    assert ours.keys() == theirs.keys()
    differing = {key: (ours[key], theirs[key]) for key in theirs if ours[key] != theirs[key]}
    assert differing == {}


def test_the_description_would_show_a_difference(stock, engine_args):
    ours = describe(engine_args(compilation_config=compilation_config()))
    differing = {key for key in stock["plain"].keys() | ours.keys() if ours.get(key) != stock["plain"].get(key)}
    assert {
        "compute_hash",
        "cache_config.cache_dtype",
        "attention_config.backend",
        "compilation_config.mode",
        "compilation_config.inductor_compile_config",
        "compilation_config.ir_enable_torch_wrap",
        "compilation_config._kvcompile_request.fields",
        "additional_config",
    } <= differing


@pytest.mark.parametrize("value", ["bogus", "Kvcompile"])
def test_another_word_in_python_is_vllms_own_error(engine_args, value):
    with pytest.raises(ValueError, match="CompilationConfig") as caught:
        engine_args(compilation_config=value).create_engine_config()
    assert not isinstance(caught.value, UsageError)


def test_a_plain_compilation_config_is_not_touched(engine_args):
    given = CompilationConfig(mode=2)
    config = engine_args(compilation_config=given).create_engine_config()
    assert config.compilation_config.mode is CompilationMode.DYNAMO_TRACE_ONCE
    assert PASS_KEY not in config.compilation_config.inductor_compile_config
    assert not is_active(config)
