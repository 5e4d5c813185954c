"""Documents of `kvcompile graph-dump` without vLLM: the passes run on a traced graph and the recorder watches."""

from __future__ import annotations

from typing import Any

import torch
from tests.passes.graphs import trace

from kvcompile.config import KVCompileConfig, to_dict
from kvcompile.ops.act_quant import quant_per_token
from kvcompile.passes.pipeline import PassPipeline, observed_by
from kvcompile.tools import graph_document
from kvcompile.tools.graph_recorder import Recorder

WIDTH = 64
OPTIONS = to_dict(KVCompileConfig())


def swiglu_then_quantiser(gate_up: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One site that is fused, behind it an operator that reads a weight; and a quantiser that no pass is for."""
    gate, up = gate_up[..., :WIDTH], gate_up[..., WIDTH:]
    x_q, x_scale = quant_per_token(torch.nn.functional.silu(gate) * up)
    return x_q.float() * x_scale[:, None] * weight, *quant_per_token(gate_up)


def traced(function: Any = swiglu_then_quantiser, dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    return trace(function, torch.randn(5, 2 * WIDTH).to(dtype), torch.randn(WIDTH))


def recorded(*functions: Any, config: dict[str, Any] = OPTIONS) -> Recorder:
    """A recorder that has watched the passes on the graph of each function, as pieces 0, 1, ... of a model."""
    recorder, pipeline = Recorder(), PassPipeline(config)
    with observed_by(recorder):
        for number, function in enumerate(functions or (swiglu_then_quantiser,)):
            module = traced(function)
            recorder.piece(number, (1, 256), module, ["model.layers.0.self_attn.attn"])
            pipeline(module.graph)
    return recorder


def document(recorder: Recorder | None = None, **changes: Any) -> graph_document.Document:
    recorder = recorder or recorded()
    content = graph_document.document(
        "a-model",
        ["--max-model-len", "256"],
        startup_line="kvcompile: active: passes",
        settings={"architecture": "LlamaForCausalLM", "device": "cpu", "kvcompile": OPTIONS},
        versions={"vllm": "0.23.0", "torch": "2.11.0"},
        faults=recorder.faults,
        graphs=recorder.graphs(),
    )
    return {**content, **changes}
