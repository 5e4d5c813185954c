r"""RMSNorm, alone or with the residual added, and the quantisers of its output become one operator.

before                                                      after

    x   weight                                                  x   weight
     \   /                                                       \   /
    vllm_ir.rms_norm(epsilon)                                   kvcompile.rms_norm_quant(eps=epsilon)
        |                                                        |[0]   |[1]
    (reshape)                                                   x_q    x_scale
        |
    kvcompile.quant_per_token
     |[0]   |[1]
    x_q    x_scale


    x  residual  weight                                         x  residual  weight
     \     |      /                                              \     |      /
    vllm_ir.fused_add_rms_norm(epsilon)                         kvcompile.fused_add_rms_norm_quant(eps=epsilon)
     |[0]           |[1]                                         |[0]   |[1]       |[2]
    (reshape)    new residual                                   x_q    x_scale   new residual
     |
    kvcompile.quant_per_token
     |[0]   |[1]
    x_q    x_scale

Both sides round to the dtype of x at the same places: the sum goes into the norm in fp32 and into the residual rounded,
the normalised row is rounded before and after the product with the weight.

Candidates are quantisers of a norm's output: of an operator with "norm" in its name, also behind views and casts, or of
anything elementwise around an rsqrt, which is what a norm looks like that is taken apart. So if vLLM writes its norms
differently one day, there are candidates without a match; a quantiser behind attention or SwiGLU is none. Two things
are meant to stay and are no candidates either: a norm whose output somebody else reads too (see `fuse_quantisers`), and
one that vLLM has fused with the all-reduce before it.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.fuse import Fusion, Kept, Misfit, fuse_quantisers
from kvcompile.passes.nodes import (
    arguments,
    behind_views,
    calls,
    is_item,
    is_ours,
    operator_name,
    pointwise_cone,
    value,
)
from kvcompile.passes.result import PassResult

_RMS_NORM = "vllm_ir::rms_norm"
_ADD_RMS_NORM = "vllm_ir::fused_add_rms_norm"


class NormQuant:
    """The pass; see above."""

    name = "norm_quant"

    def __call__(self, graph: Graph) -> PassResult:
        return fuse_quantisers(graph, self.name, _find)


def _find(y: Node) -> Fusion | None:
    ours = torch.ops.kvcompile
    if operator_name(y) == _RMS_NORM:
        given = arguments(y)
        rows = [given["x"]]
        _check(given, rows)
        return Fusion(ours.rms_norm_quant.default, rows, (given["weight"], given["epsilon"]), y)
    if calls(y, operator.getitem) and operator_name(y.args[0]) == _ADD_RMS_NORM:
        if y.args[1] != 0:
            return None  # the new residual: not normalised
        norm = y.args[0]
        given = arguments(norm)
        rows = [given["x"], given["x_residual"]]
        _check(given, rows)
        residual = [(2, user) for user in norm.users if is_item(user, 1)]
        return Fusion(ours.fused_add_rms_norm_quant.default, rows, (given["weight"], given["epsilon"]), norm, residual)
    _refuse_other_norms(y)
    return None


def _check(given: dict[str, Any], rows: list[Node]) -> None:
    """Raise Misfit for arguments that vLLM's norm takes and the fused operator does not."""
    x, weight, epsilon = value(rows[0]), given["weight"], given["epsilon"]
    if given["variance_size"] is not None:
        raise Misfit(f"variance_size is {given['variance_size']}")
    if weight is None:
        raise Misfit("the norm has no weight")
    weight = value(weight)
    if weight.dtype != x.dtype:
        raise Misfit(f"the weight is {weight.dtype}, x {x.dtype}")
    if weight.dim() != 1 or not statically_known_true(weight.shape[0] == x.shape[-1]) or not weight.is_contiguous():
        raise Misfit(f"the weight is {tuple(weight.shape)} for {x.shape[-1]} channels, or no plain row")
    if not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise Misfit(f"epsilon is {epsilon}")
    residual = value(rows[-1])
    same = residual.dim() == x.dim() and all(map(_known_equal, residual.shape, x.shape))
    if residual.dtype != x.dtype or not same:
        raise Misfit(f"the residual is {residual.dtype} {tuple(residual.shape)}, x {x.dtype} {tuple(x.shape)}")


def _known_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    return statically_known_true(a == b)


def _refuse_other_norms(y: Node) -> None:
    """Raise if y is the output of a norm in a form that this pass does not know."""
    source = y
    while calls(source, torch.ops.prims.convert_element_type.default):
        source = behind_views(source.args[0])
    name = operator_name(source.args[0] if calls(source, operator.getitem) else source)
    if is_ours(name):
        return  # its new residual, which is not normalised, or a row that it has quantised already
    if "allreduce" in name:
        raise Kept(f"{name}: fused with the all-reduce before it")
    if name == _RMS_NORM or (name == _ADD_RMS_NORM and is_item(source, 0)):
        raise Misfit(f"{name} is followed by a cast to {value(y).dtype}")
    if "norm" in name and name != _ADD_RMS_NORM:
        raise Misfit(f"{name} is none of the norms that this pass knows: {_RMS_NORM}, {_ADD_RMS_NORM}")
    if any(calls(node, torch.ops.aten.rsqrt.default) for node in pointwise_cone(y)):
        raise Misfit(f"{y.name} is computed with an rsqrt: a norm that is taken apart")
