"""The hooks in vLLM: installed once, and vLLM's own result for whatever is not kvcompile's."""

from __future__ import annotations

import argparse
import importlib.metadata
import socket
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.fx
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import compat
from kvcompile.integrations.vllm.request import CompilationConfigAction, Request
from kvcompile.plugin import register
from kvcompile.presets import compilation_config

OURS = "kvcompile.integrations.vllm.attention.KV8AttentionBackend"
CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
HOOKS = {
    "add_cli_args": lambda: EngineArgs.add_cli_args,
    "create_engine_config": lambda: EngineArgs.create_engine_config,
    "get_attn_backend_cls": lambda: CpuPlatform.get_attn_backend_cls.__func__,
    "check_and_update_config": lambda: CpuPlatform.check_and_update_config.__func__,
    "LLMEngine": lambda: LLMEngine.__init__,
    "StatLoggerManager": lambda: StatLoggerManager.__init__,
}


def _selector(**changes: Any) -> AttentionSelectorConfig:
    fields = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "int8_per_token_head", "block_size": 128}
    return AttentionSelectorConfig(**{**fields, **changes})


# --- installing -----------------------------------------------------------------------------------------------------


def test_vllm_finds_the_plugin_by_its_entry_point():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvcompile")
    assert entry.load() is register


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_every_function_of_vllm_is_wrapped_once_however_often_the_plugin_is_loaded(hook):
    before = hook()
    register()
    compat.install()
    assert hook() is before
    assert before.__module__ == before.__wrapped__.__module__
    assert before.__name__ == before.__wrapped__.__name__
    assert not hasattr(before.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("args", [EngineArgs, AsyncEngineArgs], ids=lambda args: args.__name__)
def test_both_kinds_of_engine_arguments_learn_the_word(args):
    parser = args.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    action = parser._option_string_actions["--compilation-config"]
    assert type(action) is CompilationConfigAction
    assert parser._option_string_actions["-cc"] is action


def test_both_kinds_of_engine_arguments_apply_the_preset(llama):
    args = AsyncEngineArgs(
        model=str(llama), skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, compilation_config="kvcompile"
    )
    assert args.create_engine_config().cache_config.cache_dtype == "int8_per_token_head"


def test_the_custom_attention_backend_is_ours():
    assert AttentionBackendEnum.CUSTOM.get_path() == OURS
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"
    compat.refuse_foreign_attention_backend()


def test_a_custom_backend_that_was_there_first_is_not_replaced(monkeypatch):
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    compat._register_attention_backend()
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.plugin.Backend"


# --- the CPU platform -------------------------------------------------------------------------------------------------


def test_these_tests_run_on_the_cpu_build():
    assert current_platform.is_cpu()


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_the_cpu_takes_our_backend_for_our_cache(head_size):
    assert CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, _selector(head_size=head_size), 2) == OURS


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "fp8", "fp8_e5m2", "fp8_per_token_head", None])
def test_for_another_cache_the_cpu_ignores_the_custom_backend_as_ever(dtype):
    assert CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, _selector(kv_cache_dtype=dtype), 2) == CPU_ATTN


@pytest.mark.parametrize("name", [None, "CPU_ATTN", "TRITON_ATTN", "FLASH_ATTN"])
def test_another_backend_is_what_the_cpu_makes_of_it(name):
    selected = None if name is None else AttentionBackendEnum[name]
    assert CpuPlatform.get_attn_backend_cls(selected, _selector(), 2) == CPU_ATTN


def test_the_custom_backend_of_another_plugin_is_what_the_cpu_makes_of_it(monkeypatch):
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    assert CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, _selector(), 2) == CPU_ATTN


@pytest.mark.parametrize("flag", ["use_mla", "use_sparse"])
def test_what_the_cpu_refuses_it_still_refuses(flag):
    with pytest.raises(NotImplementedError, match="is not supported on CPU"):
        CpuPlatform.get_attn_backend_cls(None, _selector(kv_cache_dtype="auto", **{flag: True}), 2)


@pytest.mark.parametrize("given", [{}, {"mode": 3}, {"mode": 3, "backend": "eager"}, {"compile_sizes": [8]}], ids=str)
def test_an_unasked_configuration_on_a_cpu_still_becomes_a_single_trace(engine_args, given):
    compilation = engine_args(compilation_config=CompilationConfig(**given)).create_engine_config().compilation_config
    assert compilation.mode is CompilationMode.DYNAMO_TRACE_ONCE
    assert compilation.backend == "inductor"
    assert compilation.ir_enable_torch_wrap is False


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_only_vllms_own_compile_path_is_given_back_to_a_cpu(build, mode):
    compilation = build(compilation_config=compilation_config(mode=mode)).compilation_config
    assert compilation.mode is CompilationMode(mode)


def test_what_else_the_cpu_sets_stays_set(build, engine_args):
    ours = build(additional_config={"kvcompile": {"prune.enabled": False}})  # which has a worker of its own
    stock = engine_args().create_engine_config()
    assert ours.parallel_config.worker_cls == stock.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert ours.scheduler_config.async_scheduling is stock.scheduler_config.async_scheduling is False
    assert ours.cache_config.block_size == stock.cache_config.block_size == 128
    assert ours.compilation_config.cudagraph_capture_sizes == []
    set_by_cpu = {"dce": True, "nan_asserts": False, "epilogue_fusion": True, "cpp.dynamic_threads": True}
    assert set_by_cpu.items() <= ours.compilation_config.inductor_compile_config.items()


def test_lora_turns_compilation_off_on_a_cpu_also_with_kvcompile(build):
    config = build(enable_lora=True, additional_config={"kvcompile": {"kv8.enabled": False}})
    assert config.compilation_config.mode is CompilationMode.NONE


def test_the_pass_that_names_cuda_operators_leaves_a_cpu_graph_alone():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    before = str(graph)
    assert FixFunctionalizationPass.__call__(object(), graph) is None
    assert str(graph) == before


# --- `vllm serve` -----------------------------------------------------------------------------------------------------


class _Serve:
    """vLLM's command: keeps what it was called with and, if told so, fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, []

    def __call__(self, args: argparse.Namespace) -> str:
        self.calls.append(args)
        if self.error:
            raise self.error
        return "served"


def _serving(tag: object, asking: bool = True, **changes: Any) -> argparse.Namespace:
    compilation = Request().compilation_config() if asking else CompilationConfig()
    fields = {"model_tag": tag and str(tag), "model": "vLLM's default", "host": "127.0.0.1", "port": 0, "uds": None}
    return argparse.Namespace(compilation_config=compilation, headless=False, **{**fields, **changes})


def _exit(command: Any, args: argparse.Namespace, capfd: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(args)
    assert stop.value.__cause__ is None and stop.value.__suppress_context__
    return stop.value.code, capfd.readouterr().err


def test_serve_runs_with_a_good_request(llama):
    command, args = _Serve(), _serving(llama)
    assert compat._serve(command)(args) == "served"
    assert command.calls == [args]


def test_serve_reads_the_model_from_the_flag_where_no_position_names_it(llama, tmp_path, capfd):
    assert compat._serve(_Serve())(_serving(None, model=str(llama))) == "served"
    code, error = _exit(compat._serve(_Serve()), _serving(None, model=str(tmp_path)), capfd)
    assert (code, f"model {tmp_path}: the folder has no config.json" in error) == (2, True)


def test_serve_ends_a_mistake_with_one_line_and_exit_code_2(llama, capfd):
    command = _Serve(UsageError("prune.keep_ratio is 2"))
    result = _exit(compat._serve(command), _serving(llama), capfd)
    assert result == (2, "kvcompile: error: prune.keep_ratio is 2\n")


def test_serve_does_not_start_for_a_missing_checkpoint(tmp_path, capfd):
    command = _Serve()
    code, error = _exit(compat._serve(command), _serving(tmp_path / "nowhere"), capfd)
    assert (code, command.calls) == (2, [])
    assert error.startswith(f"kvcompile: error: model {tmp_path / 'nowhere'}: no such folder")
    assert error.count("\n") == 1


def test_serve_does_not_start_on_a_port_in_use(llama, capfd):
    command = _Serve()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, error = _exit(compat._serve(command), _serving(llama, port=port), capfd)
    assert (code, command.calls) == (2, [])
    assert error == (
        f"kvcompile: error: port {port} of 127.0.0.1 is in use; give another --port, or stop what listens there\n"
    )


def test_serve_does_not_start_for_a_hub_name_that_is_not_there(capfd, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    command = _Serve()
    code, error = _exit(compat._serve(command), _serving("nobody/no-such-model"), capfd)
    assert (code, command.calls) == (2, [])
    assert error.startswith("kvcompile: error: vLLM refused the arguments for model nobody/no-such-model: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("of vLLM"), KeyboardInterrupt()], ids=repr)
def test_serve_hands_on_what_is_no_mistake_of_the_user(llama, error):
    with pytest.raises(type(error)) as caught:
        compat._serve(_Serve(error))(_serving(llama))
    assert caught.value is error


def test_serve_checks_nothing_for_who_does_not_ask(tmp_path):
    command, args = _Serve(), _serving(tmp_path / "nowhere", asking=False, port=-1)
    assert compat._serve(command)(args) == "served"


def test_a_mistake_that_only_kvcompile_knows_is_one_line_for_who_does_not_ask_too(tmp_path, capfd):
    """Such as a W4A8 checkpoint that is incomplete."""
    command = _Serve(UsageError("the checkpoint has no tensor lm_head.weight"))
    result = _exit(compat._serve(command), _serving(tmp_path, asking=False), capfd)
    assert result == (2, "kvcompile: error: the checkpoint has no tensor lm_head.weight\n")
