"""Compiling a model as `vllm serve` would, as far as kvcompile's passes, and showing each graph to a watcher.

What vLLM does from the model's code to the post-grad graph runs unchanged, and so do the passes; then a graph is left
as it is instead of being turned into machine code, which takes minutes and changes nothing any more. The engine runs in
this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) and stops when the last graph has been seen, so the process is good for
nothing else afterwards. Compile caches would hide the passes: VLLM_CACHE_ROOT must name a fresh folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol
from unittest.mock import patch

import torch
from torch._functorch._aot_autograd import autograd_cache
from vllm.compilation.backends import CompilerManager, VllmBackend
from vllm.config import VllmConfig
from vllm.config.utils import Range
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import checks_memory, preset, report
from kvcompile.integrations.vllm.inductor_pass import PASS_KEY, KVCompilePass
from kvcompile.model_path import refuse_missing_checkpoint
from kvcompile.passes.pipeline import Observer, PassError, observed_by
from kvcompile.plugin import register
from kvcompile.presets import NAME

# Where the user names none: vLLM would ask for most of the host. Compiling ends before it is allocated.
_CPU_CACHE_BYTES = 1 << 30


class Watcher(Observer, Protocol):
    """What is told of a compilation. vLLM cuts a model into pieces, and equal pieces share one graph."""

    def configured(self, settings: dict[str, Any], startup_line: str) -> None:
        """What decides the graphs, plain values, before anything is compiled."""

    def piece(
        self, number: int, tokens: tuple[int, int], module: torch.fx.GraphModule, attention: Sequence[str]
    ) -> None:
        """Piece `number`, from 0, as Dynamo saw it, is compiled for batches of `tokens`, least and most, next.

        `attention`: the full names of the model's attention layers.
        """

    def same_as(self, number: int, tokens: tuple[int, int]) -> None:
        """The piece shares the graph that piece `number` has for batches of `tokens`, and no pass runs."""

    def fault(self, message: str) -> None:
        """A pass has refused the graph, which the server would not start with."""


class _PassesRan(BaseException):
    """Leaves Inductor. No Exception: nothing on the way may take it for a failed compilation."""


class _AllSeen(BaseException):
    """Leaves the engine."""


class _Lost(BaseException):
    """Leaves the engine too: vLLM compiles otherwise than the wrappers here can follow. Its text says how."""


def compile_model(model: str, arguments: Sequence[str], watcher: Watcher) -> None:
    """Compile `model` with the flags of `vllm serve` in `arguments` and the preset. Raises `UsageError`."""
    register()
    args = _parse(["--model", model, "--compilation-config", NAME, *arguments])
    refuse_missing_checkpoint(args.model)
    if args.speculative_config is not None:
        raise UsageError("--speculative-config is given; the graphs of the model alone are shown: leave it out")
    config = _config(args)
    _refuse_uncompiled(config)
    watcher.configured(_settings(config), preset.startup_line(config))
    try:
        with _up_to_the_passes(watcher, config), observed_by(watcher):
            LLMEngine.from_vllm_config(config, UsageContext.OPENAI_API_SERVER, disable_log_stats=True)
    except _AllSeen:
        return
    except _Lost as lost:
        raise UsageError(
            f"model {model}: {lost}, so its graph cannot be shown; leave out what of these flags and of vLLM's "
            "environment variables is about compiling"
        ) from None
    raise UsageError(f"model {model}: vLLM compiled nothing with these flags; leave out what switches compilation off")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve", add_help=False))

    def refuse(message: str) -> NoReturn:
        raise UsageError(
            f"{' '.join(message.split())}; allowed are the flags of `vllm serve` that concern the engine "
            "(not those of the HTTP server, such as --port)"
        )

    def leave(status: int = 0, message: str | None = None) -> NoReturn:
        raise UsageError(" ".join((message or f"exit code {status}").removeprefix("kvcompile: error: ").split()))

    parser.error, parser.exit = refuse, leave
    try:
        return parser.parse_args(list(arguments))
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"vLLM refused the flags: {' '.join(str(error).split())}") from error


def _config(args: argparse.Namespace) -> VllmConfig:
    """A configuration that needs neither a tokenizer nor a KV cache, which have nothing to do with the graph."""
    args.skip_tokenizer_init = True
    sized_by_us = current_platform.is_cpu() and args.kv_cache_memory_bytes is None
    if sized_by_us:
        args.kv_cache_memory_bytes = _CPU_CACHE_BYTES
    try:
        engine_args = EngineArgs.from_cli_args(args)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"model {args.model}: vLLM refused: {' '.join(str(error).split())}") from error
    # A size that the user has not given is not judged: neither a request of the full length nor the host need have it.
    with patch.object(checks_memory, "refuse_too_little_memory", lambda config: None) if sized_by_us else nullcontext():
        # Some defaults depend on who asks: those of the server.
        return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _refuse_uncompiled(config: VllmConfig) -> None:
    parallel = config.parallel_config
    if parallel.world_size_across_dp > 1:
        raise UsageError(
            f"these flags ask for {parallel.world_size_across_dp} processes (tensor, pipeline or data parallel); "
            "allowed is 1: leave them out, the graph of a rank differs in widths only"
        )
    if not isinstance(config.compilation_config.inductor_compile_config.get(PASS_KEY), KVCompilePass):
        raise UsageError(f"{PASS_KEY} is given, which takes the place of kvcompile's passes; leave it out")
    if why := report.unreachable(config):
        raise UsageError(f"no graph reaches the passes ({why}); leave out what switches that off")


def _settings(config: VllmConfig) -> dict[str, Any]:
    """What of vLLM's final configuration decides how the graphs look, and kvcompile's own options."""
    model, compilation = config.model_config, config.compilation_config
    backend = config.attention_config.backend
    return {
        "architecture": model.architecture,
        "attention_backend": backend.name if backend else "vLLM's choice",
        "compilation_backend": compilation.backend,
        "compilation_mode": compilation.mode.name,
        "compile_ranges": [[r.start, r.end] for r in compilation.get_compile_ranges()],
        "compile_sizes": list(compilation.compile_sizes or []),
        "custom_ops": list(compilation.custom_ops),
        "device": current_platform.device_type if current_platform.is_cpu() else current_platform.get_device_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "inductor_graph_partition": bool(compilation.use_inductor_graph_partition),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "kvcompile": config.additional_config[NAME],
        "layers": model.hf_text_config.num_hidden_layers,
        "load_format": str(config.load_config.load_format),
        "max_model_len": model.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "quantization": model.quantization,
        "splitting_ops": list(compilation.splitting_ops or []),
        "vllm_passes": _vllm_passes(config),
    }


def _vllm_passes(config: VllmConfig) -> list[str]:
    """vLLM's own passes that are on."""
    values = vars(config.compilation_config.pass_config)
    return sorted(name for name, value in values.items() if value is True)


@contextmanager
def _up_to_the_passes(watcher: Watcher, config: VllmConfig) -> Iterator[None]:
    seen = _Seen(watcher, config)
    wrapped = [
        (CompilerManager, "compile", seen.compile),
        (KVCompilePass, "__call__", seen.run_passes),
        (VllmBackend, "__call__", seen.finish),
        (autograd_cache, "autograd_cache_key", seen.cache_key),
    ]
    with ExitStack() as stack:
        for owner, name, wrap in wrapped:
            stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        yield


class _Seen:
    """The wrappers. By a key of Inductor's for each piece vLLM finds an equal one that it compiled before."""

    def __init__(self, watcher: Watcher, config: VllmConfig) -> None:
        self._watcher = watcher
        self._layers = config.compilation_config.static_forward_context
        self._key: str | None = None
        self._first: dict[str, tuple[int, tuple[int, int]]] = {}  # key -> the piece whose graph it is

    def compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(manager: CompilerManager, graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            number, sizes = kwargs["graph_index"], kwargs["compile_range"]
            if not isinstance(sizes, Range):
                raise _Lost(f"piece {number} is compiled for {sizes!r} instead of a range of batch sizes")
            tokens = (sizes.start, sizes.end)
            self._watcher.piece(number, tokens, graph, list(self._layers))
            self._key = None
            try:
                compiled = original(manager, graph, *args, **kwargs)
            except _PassesRan:
                if self._key is not None:
                    # As vLLM does with what is compiled: it looks here whether it has an equal graph already.
                    manager.loaded_artifacts[self._key] = graph
                    self._first[self._key] = number, tokens
                return graph
            if self._key not in self._first:
                raise _Lost(f"piece {number} was compiled without a pass being called")
            self._watcher.same_as(*self._first[self._key])
            return compiled

        return compile

    def cache_key(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cache_key(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._key = None if result is None else result[0]
            return result

        return cache_key

    def run_passes(self, original: Callable[..., None]) -> Callable[..., None]:
        def run_passes(ours: KVCompilePass, graph: torch.fx.Graph) -> NoReturn:
            try:
                original(ours, graph)
            except PassError as error:
                self._watcher.fault(str(error))
            raise _PassesRan

        return run_passes

    def finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish(backend: VllmBackend, *args: Any, **kwargs: Any) -> NoReturn:
            original(backend, *args, **kwargs)
            raise _AllSeen

        return finish
