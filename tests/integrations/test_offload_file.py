"""`config/offload.json` and `scripts/serve.sh` by way of vLLM's own command line: what they print is what it takes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvcompile.config import OffloadConfig, UsageError
from kvcompile.integrations.vllm import preset

ROOT = Path(__file__).parents[2]
FILE = ROOT / "config/offload.json"
SMALL = ("--skip-tokenizer-init", "--load-format", "dummy", "--kv-cache-memory-bytes", str(64 << 20))


@pytest.fixture
def configured(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmConfig]:
    """`configured(**settings)`: what `vllm serve` makes of the command that the script prints for a small Llama."""
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)

    def make(**settings: str) -> VllmConfig:
        environment = {"PATH": os.defpath, "VLLM": str(vllm), "MODEL": str(llama), **settings}
        command = [ROOT / "scripts/serve.sh", "--dry-run", *SMALL]
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        command, subcommand, *arguments = shlex.split(printed)
        assert (command, subcommand) == (str(vllm), "serve")
        for name, value in settings.items():
            monkeypatch.setenv(name, value)  # which the server inherits
        args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(arguments)
        args.model = args.model_tag  # as vLLM's own command does first
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()

    return make


def offloading(tmp_path: Path, **changes: object) -> dict[str, str]:
    """Settings with a file like the example, with `changes` of its options."""
    content = json.loads(FILE.read_text())
    content["kv_connector_extra_config"] |= changes
    file = tmp_path / "offload.json"
    file.write_text(json.dumps(content, indent=4))
    return {"OFFLOAD": "1", "OFFLOAD_CONFIG": str(file)}


def test_the_example_is_taken_and_says_what_the_defaults_are(configured: Callable[..., VllmConfig]) -> None:
    config = configured(OFFLOAD="1")
    assert OffloadConfig(**config.additional_config["kvcompile"]["offload"]) == OffloadConfig(enabled=True)
    assert config.kv_transfer_config.kv_connector == "KVCompileOffload"
    assert "offload (4294967296 bytes of host memory" in preset.startup_line(config).split("not active: ")[0]


def test_its_numbers_are_those_that_take_effect(configured: Callable[..., VllmConfig], tmp_path: Path) -> None:
    changed = {"cpu_bytes_to_use": 1 << 21, "lazy_gpu_free_trigger": 0.5, "max_scan_reqs": 7}
    options = configured(**offloading(tmp_path, **changed)).additional_config["kvcompile"]["offload"]
    assert options == {"enabled": True, **changed}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cpu_bytes": 1},
            "--kv-transfer-config: kv_connector_extra_config has 'cpu_bytes'; allowed are cpu_bytes_to_use, "
            "lazy_gpu_free_trigger, max_scan_reqs",
        ),
        ({"max_scan_reqs": 0}, "--kv-transfer-config: offload.max_scan_reqs is 0: give a whole number, "),
    ],
    ids=["unknown", "range"],
)
def test_what_the_file_may_not_say_is_refused(
    configured: Callable[..., VllmConfig], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        configured(**offloading(tmp_path, **change))
    assert str(caught.value).startswith(message)


def test_without_it_nothing_is_offloaded_and_settings_reach_vllm(configured: Callable[..., VllmConfig]) -> None:
    settings = {"MAX_MODEL_LEN": "192", "MAX_NUM_BATCHED_TOKENS": "256", "MAX_NUM_SEQS": "3"}
    config = configured(**settings, GPU_MEMORY_UTILIZATION="0.25", OFFLOAD="0")
    assert config.kv_transfer_config is None
    assert config.model_config.max_model_len == 192
    assert (config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs) == (256, 3)
    assert config.cache_config.gpu_memory_utilization == 0.25


def test_a_budget_of_the_environment_prunes_to_that_budget(configured: Callable[..., VllmConfig]) -> None:
    prune = configured(VLLM_ANDPRO_BUDGET_TOKENS="192").additional_config["kvcompile"]["prune"]
    assert (prune["enabled"], prune["budget_tokens"]) == (True, 192)


def test_a_budget_where_pruning_is_switched_off_does_nothing_and_that_is_said(
    configured: Callable[..., VllmConfig],
) -> None:
    config = configured(VLLM_ANDPRO_BUDGET_TOKENS="192", KVCOMPILE_PRUNE_ENABLED="0")
    off = preset.startup_line(config).partition("not active: ")[2]
    assert "prune (prune.enabled=false, so nothing comes of prune.budget_tokens)" in off
