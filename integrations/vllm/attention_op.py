"""The operator `kvcompile::pruned_kv8_attention`: vLLM's attention operator, for layers of the KV8 backend alone.

    pruned_kv8_attention(query [T, H, d], key [T, G, d], value [T, G, d], output! [T, H, d], layer_name,
                         output_scale=None, output_block_scale!=None, kv_cache_dummy_dep=None) -> ()

T tokens, H query heads, G KV heads, d channels of a head. The schema is that of `vllm::unified_attention_with_output`,
so that a pass can put the one in the other's place without touching an argument (`passes/attention_swap.py`). The layer
is looked up by name in vLLM's forward context, and its backend does the work, as behind vLLM's operator: a graph with
either gives the same. What the name adds is that a compiled graph, a trace and a profile say which attention ran.
"""

# No `from __future__ import annotations`: the schema is inferred from the annotations, which must be types for that.

import torch
from vllm.config import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from kvcompile.ops.library import register

NAME = "kvcompile::pruned_kv8_attention"
REPLACES = "vllm::unified_attention_with_output"


def pruned_kv8_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: LayerNameType,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:
    # Not at the top: the process that only parses a command line registers the operator and never runs a layer.
    from vllm.model_executor.layers.attention import attention

    from kvcompile.integrations.vllm.attention import KV8AttentionBackend

    name = _resolve_layer_name(layer_name)
    backend = get_forward_context().no_compile_layers[name].attn_backend
    if not issubclass(backend, KV8AttentionBackend):
        raise RuntimeError(
            f"{NAME} was called for layer {name}, whose attention backend is {backend.get_name()} and not kvcompile's; "
            "switch the pass off with passes.attention_swap=false"
        )
    attention.unified_attention_with_output(
        query, key, value, output, layer_name, output_scale, output_block_scale, kv_cache_dummy_dep
    )


def _fake(*_: object) -> None:
    """All that it writes is there already."""


register(
    NAME.partition("::")[2]
    + torch.library.infer_schema(pruned_kv8_attention, mutates_args=("output", "output_block_scale")),
    fake=_fake,
    **{current_platform.dispatch_key: pruned_kv8_attention},
)


def split_where_vllm_splits(compilation: CompilationConfig) -> None:
    """Have Inductor cut its graphs at this operator if it cuts them at vLLM's.

    Both read the metadata of the step at hand, which a CUDA graph would freeze. Only with graph partition: without it
    the graph is split before any pass has put this operator there.
    """
    ops = compilation.splitting_ops
    if not compilation.use_inductor_graph_partition or not ops or NAME in ops:
        return
    if REPLACES in ops or f"{REPLACES}.default" in ops:
        compilation.splitting_ops = [*ops, NAME]
