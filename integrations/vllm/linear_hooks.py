"""Where a checkpoint with W4A8 linears reaches into vLLM's own code, whether or not the preset is asked for."""

from __future__ import annotations

import functools

from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

from kvcompile.integrations.vllm import linear_complete


def install() -> None:
    """Wrap what vLLM does with such a checkpoint. Once per process; other models go through untouched."""
    linear_complete.install()
    _wrap_model_config()


def _wrap_model_config() -> None:
    """Look at a checkpoint's description of itself before vLLM does."""
    create_model_config = EngineArgs.create_model_config

    @functools.wraps(create_model_config)
    def wrapped(self: EngineArgs) -> ModelConfig:
        from kvcompile.integrations.vllm import checks  # not at the top: a worker has no use for it

        checks.refuse_malformed_description(self)
        return create_model_config(self)

    EngineArgs.create_model_config = wrapped
