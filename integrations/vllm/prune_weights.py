"""The weight of each layer's output projection, by which `critical` weighs values.

What it takes from a layer is its answer to unit vectors, column by column of the weight: so it has what the layer
computes with, whatever vLLM or kvcompile have made of the tensor that was loaded.

    W[:, i] = W e_i        exact for a linear that is not quantised, whose other products are zeros, and for W4A8: of
                           e_i a token's quantisation loses nothing, and what comes out is the dequantised weight
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def output_weights(model: torch.nn.Module, layers: Iterable[str]) -> dict[str, torch.Tensor]:
    """[hidden, H * d] of the model's dtype of each attention layer, by its name; H heads of d channels on this rank."""
    return {layer: _weight(model.get_submodule(f"{layer.rpartition('.')[0]}.o_proj")) for layer in layers}


def _weight(projection: torch.nn.Module) -> torch.Tensor:
    columns, dtype = projection.input_size_per_partition, projection.params_dtype
    weight = getattr(projection, "weight", None)
    if weight is not None and weight.dtype == dtype and weight.shape[1:] == (columns,):
        return weight
    units = torch.eye(columns, dtype=dtype, device=next(projection.parameters()).device)
    return projection.quant_method.apply(projection, units).t().contiguous()
