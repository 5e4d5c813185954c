"""The one line at start-up: what of kvcompile is active, and why anything is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import kvcompile
from kvcompile.integrations.vllm import report
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY
from kvcompile.presets import MODULES, Module, compilation_config

VERSION = f"kvcompile {kvcompile.__version__}: "
KV8 = "kv8 (136 instead of 256 bytes per token and KV head, torch CPU operators)"
NO_LINEARS = "without W4A8 linears no quantiser to fuse with"
FUSIONS = f"norm_quant and swiglu_quant and rotary in VLLM_COMPILE, {NO_LINEARS}"
SPLIT = "no attention_swap: graphs are split at attention, where its backend does the same"
PASSES = f"passes ({FUSIONS}, {SPLIT})"
NO_PASSES = {"norm_quant": False, "swiglu_quant": False, "rotary": False, "attention_swap": False}
OFFLOAD = "offload (offload.enabled=false)"
NO_LINEAR = "linear (the checkpoint is not quantised)"
TOO_SHORT = "which no prompt of up to 256 tokens is long enough for, unless it brings its own kv_budget_tokens"
PRUNE = f"prune (robust, of a prompt 50%, at least 544 tokens kept, {TOO_SHORT})"
NO_PRUNE = "prune (attention is not kvcompile's)"
SCHEDULER = "scheduler (by KV length, synchronous, blocks for 32 steps ahead, passed over by at most 2 batches)"

KV8_OFF: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"additional_config": {"kvcompile": {"kv8.enabled": False}}}, "kv8.enabled=false"),
    "cache dtype": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 given"),
    "backend": ({"attention_backend": "FLASH_ATTN"}, "--attention-backend FLASH_ATTN given"),
    "triton": ({"attention_backend": "TRITON_ATTN"}, "--attention-backend TRITON_ATTN given"),
}
PASSES_OFF: dict[str, tuple[dict[str, Any], str]] = {
    "eager": ({"enforce_eager": True}, "--enforce-eager: nothing is compiled"),
    "O0": ({"optimization_level": 0}, "compilation mode NONE: nothing is compiled"),
    "mode": ({"compilation_config": {"mode": 0}}, "compilation mode NONE: nothing is compiled"),
    "stock mode": ({"compilation_config": {"mode": 1}}, "compilation mode STOCK_TORCH_COMPILE runs no passes"),
    "trace mode": ({"compilation_config": {"mode": 2}}, "compilation mode DYNAMO_TRACE_ONCE runs no passes"),
    "eager backend": ({"compilation_config": {"backend": "eager"}}, "compilation backend eager runs no passes"),
    "own pass": (
        {"compilation_config": {"inductor_compile_config": {PASS_KEY: None}}},
        "post_grad_custom_post_pass given",
    ),
    "switches": (
        {"additional_config": {"kvcompile": {"passes": NO_PASSES, "strict": True}}},
        "every pass is switched off",
    ),
    "the swap alone": (
        {"additional_config": {"kvcompile": {"passes": {**NO_PASSES, "attention_swap": True}, "strict": True}}},
        SPLIT,
    ),
}


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "compilation_config": compilation_config(**fields.get("compilation_config", {}))}


@pytest.fixture
def line(build, startup_lines):
    """`line(**fields)`: the one line that building with these fields logs."""

    def said(**fields: Any) -> str:
        build(**_asked(fields))
        assert len(startup_lines) == 1
        assert "\n" not in startup_lines[0]
        return startup_lines[0]

    return said


def test_every_part_is_in_the_line_once(line):
    said = line()
    assert [part.name for part in MODULES] == ["kv8", "passes", "linear", "prune", "scheduler", "offload"]
    for part in MODULES:
        assert said.count(f"{part.name} (") == 1


def test_with_everything_on_an_unquantised_checkpoint_gets_all_but_linear(line):
    assert line() == f"{VERSION}active: {KV8}, {PASSES}, {PRUNE}, {SCHEDULER}; not active: {NO_LINEAR}, {OFFLOAD}"


@pytest.mark.parametrize(("fields", "why"), KV8_OFF.values(), ids=KV8_OFF)
def test_the_line_says_why_the_cache_is_vllms_own(line, fields, why):
    passes = f"passes ({FUSIONS}, no attention_swap: attention is not kvcompile's)"
    off = f"kv8 ({why}), {NO_LINEAR}, {NO_PRUNE}, {OFFLOAD}"
    assert line(**fields) == f"{VERSION}active: {passes}, {SCHEDULER}; not active: {off}"


@pytest.mark.parametrize(("fields", "why"), PASSES_OFF.values(), ids=PASSES_OFF)
def test_the_line_says_why_no_pass_runs(line, fields, why):
    off = f"passes ({why}), {NO_LINEAR}, {OFFLOAD}"
    assert line(**fields) == f"{VERSION}active: {KV8}, {PRUNE}, {SCHEDULER}; not active: {off}"


def test_the_line_names_the_passes_that_are_on(line):
    said = line(additional_config={"kvcompile": {"passes.norm_quant": False}})
    assert f"passes (swiglu_quant and rotary in VLLM_COMPILE, {NO_LINEARS}, {SPLIT})" in said


def test_a_pass_that_is_switched_off_is_not_spoken_of(line):
    said = line(additional_config={"kvcompile": {"passes.attention_swap": False}})
    assert f"passes ({FUSIONS}), {PRUNE}, {SCHEDULER};" in said


@pytest.mark.parametrize(
    "fields",
    [{"use_inductor_graph_partition": True}, {"splitting_ops": []}],
    ids=["graph partition", "one graph"],
)
def test_where_the_graphs_hold_attention_the_swap_is_among_the_passes(line, fields):
    every = f"norm_quant and swiglu_quant and rotary and attention_swap in VLLM_COMPILE, {NO_LINEARS}"
    assert f"passes ({every}), {PRUNE}, {SCHEDULER};" in line(compilation_config=fields)


def test_the_swap_alone_is_active_where_the_graphs_hold_attention(line):
    said = line(
        compilation_config={"use_inductor_graph_partition": True},
        additional_config={"kvcompile": {"passes": {**NO_PASSES, "attention_swap": True}}},
    )
    assert f"passes (attention_swap in VLLM_COMPILE), {PRUNE}, {SCHEDULER};" in said


ROTARY_IDLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vLLM's own kernel": (
        {},
        {"custom_ops": ["none", "+rotary_embedding"]},
        "vLLM's own kernel is switched on (+rotary_embedding)",
    ),
    "every kernel of vLLM's": ({}, {"custom_ops": ["all"]}, "vLLM's own kernel is switched on (+rotary_embedding)"),
    "a part of a head": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {},
        "25% of each head is turned",
    ),
}


@pytest.mark.parametrize(("model", "fields", "why"), ROTARY_IDLE.values(), ids=ROTARY_IDLE)
def test_the_line_says_why_rotary_embedding_stays_as_it_is(line, checkpoint, model, fields, why):
    said = line(model=checkpoint(**model), compilation_config=fields)
    assert f"passes (norm_quant and swiglu_quant in VLLM_COMPILE, {NO_LINEARS}, no rotary: {why}, {SPLIT})" in said


@pytest.mark.parametrize(("model", "fields", "why"), ROTARY_IDLE.values(), ids=ROTARY_IDLE)
def test_strict_has_nothing_against_rotary_alone_where_it_has_nothing_to_do(line, checkpoint, model, fields, why):
    options = {"strict": True, "passes": {**NO_PASSES, "rotary": True}}
    said = line(model=checkpoint(**model), compilation_config=fields, additional_config={"kvcompile": options})
    assert f"not active: passes (no rotary: {why}), " in said


def test_with_everything_off_the_line_says_that_nothing_is_active(line):
    options = {"kv8.enabled": False, "scheduler.enabled": False}
    off = {"enforce_eager": True, "additional_config": {"kvcompile": options}}
    expected = f"kv8 (kv8.enabled=false), passes (--enforce-eager: nothing is compiled), {NO_LINEAR}, {NO_PRUNE}"
    assert line(**off) == (
        f"{VERSION}active: nothing; not active: {expected}, scheduler (scheduler.enabled=false), {OFFLOAD}"
    )


def test_lora_on_a_cpu_turns_compilation_off_and_the_line_says_so(line):
    said = line(enable_lora=True, additional_config={"kvcompile": {"kv8.enabled": False}})
    assert "passes (compilation mode NONE: nothing is compiled)" in said


@pytest.mark.parametrize(
    ("dtype", "head_size", "numbers"),
    [
        ("bfloat16", 128, "264 instead of 512"),
        ("float16", 64, "136 instead of 256"),
        ("float32", 64, "136 instead of 512"),
        ("bfloat16", 80, "168 instead of 320"),
    ],
)
def test_the_bytes_are_of_the_model_at_hand(line, checkpoint, dtype, head_size, numbers):
    said = line(model=checkpoint(head_dim=head_size), dtype=dtype)
    assert f"kv8 ({numbers} bytes per token and KV head, torch CPU operators)" in said


def test_on_a_gpu_the_line_names_the_kernels_that_run_there(build, monkeypatch):
    config = build()
    monkeypatch.setattr(report, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    said = report.startup_line(config, {})
    assert "kv8 (136 instead of 256 bytes per token and KV head, CUDA kernels)" in said
    config.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
    assert "bytes per token and KV head, vLLM's Triton kernels)" in report.startup_line(config, {})


def test_a_note_wins_over_the_state(build):
    said = report.startup_line(build(), {"kv8": "reason one", "scheduler": "reason two"})
    expected = f"kv8 (reason one), {NO_LINEAR}, scheduler (reason two), {OFFLOAD}"
    assert said == f"{VERSION}active: {PASSES}, {PRUNE}; not active: {expected}"


def test_a_part_that_this_version_does_not_have_is_said_to_be_missing(build, monkeypatch):
    monkeypatch.setattr(report, "MODULES", (*MODULES, Module("another", False, "a part to come")))
    said = report.startup_line(build(), {})
    assert said.endswith(f"not active: {NO_LINEAR}, {OFFLOAD}, another (not in this version)")


@pytest.mark.parametrize("mode", CompilationMode, ids=lambda mode: mode.name)
def test_the_line_speaks_of_the_mode_that_vllm_ended_up_with(build, mode):
    config = build()
    config.compilation_config.mode = mode
    said = report.startup_line(config, {})
    assert (PASSES in said) is (mode is CompilationMode.VLLM_COMPILE)
    assert mode.name in said


def test_who_does_not_ask_reads_nothing_of_kvcompile(engine_args, startup_lines):
    engine_args().create_engine_config()
    assert startup_lines == []
