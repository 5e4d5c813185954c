"""What the request makes of vLLM's configuration, and which of the user's own values it leaves alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from vllm.config import CompilationMode, KVTransferConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvcompile.config import KVCompileConfig, resolve, to_dict
from kvcompile.integrations.vllm.active import is_active
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY, KVCompilePass
from kvcompile.integrations.vllm.request import Request, request_of
from kvcompile.passes import pipeline
from kvcompile.presets import compilation_config

DEFAULTS = to_dict(KVCompileConfig())


def _pass_of(config: Any) -> object:
    return config.compilation_config.inductor_compile_config.get(PASS_KEY)


def _options(**changes: Any) -> dict[str, Any]:
    return {"kvcompile": changes}


def _carried(config: Any) -> KVCompileConfig:
    return resolve(overrides=config.additional_config["kvcompile"], environ={}).config


def _resolved(changes: dict[str, Any]) -> dict[str, Any]:
    return to_dict(resolve(overrides=changes, environ={}).config)


# The same wish, by each way of saying it in Python.
ASKING = {
    "word": lambda: "kvcompile",
    "made": compilation_config,
    "marked": lambda: Request().compilation_config(),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_the_preset_fills_in_the_cache_the_backend_the_pass_and_the_options(build, ask):
    config = build(compilation_config=ask())
    assert config.cache_config.cache_dtype == "int8_per_token_head"
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert type(_pass_of(config)) is KVCompilePass
    assert config.additional_config == {"kvcompile": DEFAULTS}
    assert is_active(config)
    assert _carried(config) == KVCompileConfig()
    assert request_of(config.compilation_config) == Request()


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_on_a_cpu_vllms_own_compile_path_stays_on_and_the_passes_see_its_ir(build, ask):
    compilation = build(compilation_config=ask()).compilation_config
    assert compilation.mode is CompilationMode.VLLM_COMPILE
    assert compilation.backend == "inductor"
    assert compilation.ir_enable_torch_wrap is True
    assert compilation.compile_sizes == []
    assert compilation.pass_config.fuse_rope_kvcache_cat_mla is False


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"enforce_eager": True}, "--enforce-eager: nothing is compiled"),
        ({"optimization_level": 0}, "compilation mode NONE: nothing is compiled"),
        ({"compilation_config": compilation_config(mode=0)}, "compilation mode NONE: nothing is compiled"),
    ],
    ids=["enforce_eager", "O0", "mode"],
)
def test_without_compilation_the_cache_stays_int8_and_the_line_says_that_no_pass_runs(
    build, startup_lines, fields, why
):
    config = build(**fields)
    assert config.compilation_config.mode is CompilationMode.NONE
    assert config.compilation_config.ir_enable_torch_wrap is False
    assert config.cache_config.cache_dtype == "int8_per_token_head"
    assert len(startup_lines) == 1
    assert f"not active: passes ({why}), linear" in startup_lines[0]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_other_optimization_level_compiles(build, level):
    compilation = build(optimization_level=level).compilation_config
    assert (compilation.mode, compilation.backend) == (CompilationMode.VLLM_COMPILE, "inductor")


# --- the user's own values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8", "fp8_e5m2"])
def test_a_cache_dtype_of_the_user_wins_and_kv8_is_off(build, startup_lines, dtype):
    config = build(kv_cache_dtype=dtype)
    assert config.cache_config.cache_dtype == dtype
    assert config.attention_config.backend is None
    assert type(_pass_of(config)) is KVCompilePass
    assert f"kv8 (--kv-cache-dtype {dtype} given)" in startup_lines[0]


@pytest.mark.parametrize("dtype", ["auto", "int8_per_token_head"])
def test_the_cache_dtype_may_be_named_or_left_open(build, dtype):
    config = build(kv_cache_dtype=dtype)
    assert config.cache_config.cache_dtype == "int8_per_token_head"
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM


# Triton among them: a CPU replaces it by a backend that reads an int8 cache as fp8.
@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "CPU_ATTN", "TRITON_ATTN"])
@pytest.mark.parametrize("form", ["word", "lower", "member", "table"])
def test_an_attention_backend_of_the_user_wins_and_kv8_is_off(build, startup_lines, name, form):
    given = {
        "word": {"attention_backend": name},
        "lower": {"attention_backend": name.lower()},
        "member": {"attention_backend": AttentionBackendEnum[name]},
        "table": {"attention_config": {"backend": name}},
    }[form]
    config = build(**given)
    assert config.attention_config.backend is AttentionBackendEnum[name]
    assert config.cache_config.cache_dtype == "auto"
    assert f"kv8 (--attention-backend {name} given)" in startup_lines[0]


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": "CUSTOM"},
        {"attention_backend": "custom"},
        {"attention_backend": AttentionBackendEnum.CUSTOM},
        {"attention_config": {"backend": "CUSTOM"}},
        {"attention_backend": "auto"},
    ],
    ids=str,
)
def test_the_attention_backend_may_be_named_or_left_open(build, given):
    config = build(**given)
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert config.cache_config.cache_dtype == "int8_per_token_head"


@pytest.mark.parametrize("mode", [1, 2])
def test_a_compilation_mode_of_the_user_wins_and_the_line_says_so(build, startup_lines, mode):
    config = build(compilation_config=compilation_config(mode=mode))
    assert config.compilation_config.mode is CompilationMode(mode)
    assert config.compilation_config.ir_enable_torch_wrap is False
    assert f"passes (compilation mode {CompilationMode(mode).name} runs no passes)" in startup_lines[0]


def test_a_compilation_backend_of_the_user_wins_and_the_line_says_so(build, startup_lines):
    config = build(compilation_config=compilation_config(backend="eager"))
    assert config.compilation_config.mode is CompilationMode.VLLM_COMPILE
    assert config.compilation_config.backend == "eager"
    assert config.compilation_config.ir_enable_torch_wrap is False
    assert "passes (compilation backend eager runs no passes)" in startup_lines[0]


def test_inductor_options_of_the_user_stay_beside_the_pass(build):
    mine = {"max_autotune": True, "epilogue_fusion": False}
    config = build(compilation_config=compilation_config(inductor_compile_config=mine))
    options = config.compilation_config.inductor_compile_config
    assert options["max_autotune"] is True
    assert type(options[PASS_KEY]) is KVCompilePass
    assert mine == {"max_autotune": True, "epilogue_fusion": False}


def test_a_pass_of_the_user_keeps_its_place_and_ours_is_off(build, startup_lines):
    mine = KVCompilePass(DEFAULTS)
    config = build(compilation_config=compilation_config(inductor_compile_config={PASS_KEY: mine}))
    assert type(_pass_of(config)) is KVCompilePass
    assert _pass_of(config)._config == DEFAULTS
    assert "passes (post_grad_custom_post_pass given)" in startup_lines[0]


@pytest.mark.parametrize("value", [True, False])
def test_pass_flags_of_the_user_win(build, value):
    flags = {"fuse_norm_quant": value, "eliminate_noops": not value, "fuse_act_quant": value}
    config = build(compilation_config=compilation_config(pass_config=flags))
    assert {name: getattr(config.compilation_config.pass_config, name) for name in flags} == flags


def test_graph_partition_does_not_turn_on_a_fusion_that_a_cpu_does_not_have(build):
    fields = {"use_inductor_graph_partition": True}
    config = build(compilation_config=compilation_config(**fields))
    assert config.compilation_config.use_inductor_graph_partition is True
    assert config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla is False


def test_other_additional_configuration_stays(build):
    config = build(additional_config={"other": {"a": 1}, "kvcompile": {"strict": True}})
    assert config.additional_config == {"other": {"a": 1}, "kvcompile": _resolved({"strict": True})}


def test_with_kv8_switched_off_the_cache_is_vllms_own(build, startup_lines):
    config = build(additional_config=_options(kv8={"enabled": False}))
    assert config.cache_config.cache_dtype == "auto"
    assert config.attention_config.backend is None
    assert "kv8 (kv8.enabled=false)" in startup_lines[0]


def test_with_kv8_switched_off_what_it_does_not_support_is_accepted(build):
    config = build(
        additional_config=_options(kv8={"enabled": False}),
        kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
    )
    assert config.kv_transfer_config.kv_connector == "ExampleConnector"


# --- twice, and elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_building_twice_gives_the_same_and_leaves_the_arguments_as_they_were(engine_args, ask):
    args = engine_args(compilation_config=ask(), additional_config={"kvcompile": {"strict": True}, "other": [1]})
    # vLLM itself writes into some of the objects that its arguments hold; the ones that kvcompile touches stay equal.
    ours = ("compilation_config", "attention_config", "additional_config")
    fields, contents = dict(vars(args)), {name: repr(vars(args)[name]) for name in ours}
    first, second = args.create_engine_config(), args.create_engine_config()
    assert [name for name, value in vars(args).items() if value is not fields[name]] == []
    assert {name: repr(vars(args)[name]) for name in ours} == contents
    assert first.compute_hash() == second.compute_hash()
    assert first.additional_config == {"kvcompile": _resolved({"strict": True}), "other": [1]}
    assert second.additional_config == first.additional_config
    assert first.cache_config == second.cache_config
    assert first.attention_config == second.attention_config
    assert _pass_of(first) is not _pass_of(second)


def test_the_configuration_reaches_another_process_whole(build):
    config = build(additional_config=_options(strict=True))
    arrived = pickle.loads(pickle.dumps(config))
    assert arrived.compute_hash() == config.compute_hash()
    assert _carried(arrived) == KVCompileConfig(strict=True)
    assert _pass_of(arrived).uuid() == _pass_of(config).uuid()
    assert copy.deepcopy(config).compute_hash() == config.compute_hash()


def test_the_compile_cache_key_changes_with_every_option(build):
    passes = ({"passes": {name: False}} for name in ("norm_quant", "swiglu_quant", "rotary", "attention_swap"))
    changes = ({}, {"strict": True}, *passes)
    hashes = [build(additional_config=_options(**change)).compute_hash() for change in changes]
    assert len(set(hashes)) == len(changes)
    assert build().compute_hash() == hashes[0]


def test_the_compile_cache_key_changes_with_the_sources_of_the_passes(build, monkeypatch):
    before = build().compute_hash()
    monkeypatch.setattr(pipeline, "source_hash", lambda *packages: "of edited sources")
    assert build().compute_hash() != before
