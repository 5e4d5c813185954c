"""Where a checkpoint with W4A8 linears reaches into vLLM's own code, whether or not the preset is asked for."""

from __future__ import annotations

import functools

from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

from kvcompile.llama import ARCHITECTURES


def install() -> None:
    """Look at a checkpoint's description of itself before vLLM does, and at the headers of its weights after that.

    Once per process; other models go through untouched. What watches the loading is installed when a model with W4A8
    linears is built (`W4A8Config.get_quant_method`): vLLM's loaders take most of a second to import.
    """
    create_model_config = EngineArgs.create_model_config

    @functools.wraps(create_model_config)
    def wrapped(self: EngineArgs) -> ModelConfig:
        from kvcompile.integrations.vllm import checks, linear_headers  # not at the top: a worker has no use for them

        checks.refuse_malformed_description(self)
        model = create_model_config(self)
        if model.architecture in ARCHITECTURES:  # of others the preset speaks, or vLLM
            checks.refuse_unservable_linears(self, model)
        linear_headers.refuse_damaged(model, self.load_format)
        return model

    EngineArgs.create_model_config = wrapped
