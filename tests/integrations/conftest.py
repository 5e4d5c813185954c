"""A VllmConfig can be built without weights and engine: a checkpoint here is a folder with nothing but config.json."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CompilationConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvcompile.config import UsageError
from kvcompile.plugin import register

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
MEMORY = 64 << 20


@pytest.fixture(scope="session", autouse=True)
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """kvcompile's hooks are installed, and vLLM learns what a model class can do in this process.

    By itself it starts another one per class, which imports all of vLLM again, and keeps what it learns in a cache.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm-cache")))
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        register()
        yield


@pytest.fixture(autouse=True)
def environment(hooks: None) -> Iterator[None]:
    """No option from outside; and what vLLM writes to the environment while it builds a configuration is undone."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("KVCOMPILE_") or name in ("VLLM_ANDPRO_BUDGET_TOKENS", "VLLM_CPU_KVCACHE_SPACE"):
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(**changes)`: a folder with the configuration of a two-layer Llama, `changes` laid over it."""

    def make(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return folder

    return make


@pytest.fixture(scope="session")
def llama(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    return EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))


@pytest.fixture
def parse(parser: FlexibleArgumentParser) -> Callable[..., CompilationConfig]:
    return lambda *argv: parser.parse_args(list(argv)).compilation_config


@pytest.fixture
def engine_args(llama: Path) -> Callable[..., EngineArgs]:
    """`engine_args(**fields)`: EngineArgs of the small Llama, not asking for kvcompile, with weights made up."""

    def make(**fields: Any) -> EngineArgs:
        common = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": MEMORY, "load_format": "dummy"}
        fields = {"model": llama, **common, **fields}
        return EngineArgs(**{**fields, "model": str(fields["model"])})

    return make


@pytest.fixture
def build(engine_args: Callable[..., EngineArgs]) -> Callable[..., VllmConfig]:
    """`build(**fields)`: the VllmConfig, kvcompile asked for as in `LLM(model, compilation_config="kvcompile")`."""
    return lambda **fields: engine_args(**{"compilation_config": "kvcompile", **fields}).create_engine_config()


@pytest.fixture
def refusal(build: Callable[..., VllmConfig]) -> Callable[..., str]:
    """`refusal(**fields)`: the one line with which `build(**fields)` is refused."""

    def refused(**fields: Any) -> str:
        with pytest.raises(UsageError) as caught:
            build(**fields)
        message = str(caught.value)
        assert message.splitlines() == [message]
        return message

    return refused


@pytest.fixture
def startup_lines() -> Iterator[list[str]]:
    """What kvcompile logs; vLLM cuts its loggers off from pytest's own capture."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.kvcompile"), Keep(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
