"""Under tensor parallelism a norm reads what all ranks have summed, before the pass and after it."""

from __future__ import annotations

import operator

import pytest
import torch
import vllm._C  # vLLM's own kernels
import vllm.distributed.parallel_state  # noqa: F401  vLLM's collectives
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.ir.ops import fused_add_rms_norm, rms_norm

from kvcompile.ops.act_quant import quant_per_token as quant
from kvcompile.passes.nodes import operator_name
from kvcompile.passes.pipeline import PassResult
from tests.passes.graphs import trace
from tests.passes.norm_graphs import R, W, X, untouched
from tests.passes.norm_graphs import fused as fuse


def _reduced_out_of_place(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.vllm.all_reduce(x, "tp:0")  # as on a GPU


def _reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    return auto_functionalized(torch.ops._C.shm_allreduce.default, handle=0, data=x)[1]  # as on a CPU


def _is_sum(node: torch.fx.Node) -> bool:
    """Whether `node` is what an all-reduce gives."""
    if node.target is auto_functionalized:
        return False
    source = node.args[0] if node.target is operator.getitem else node
    return operator_name(source) in ("vllm::all_reduce", "_C::shm_allreduce")


def _summed(node: torch.fx.Node) -> torch.fx.Node:
    """What the all-reduce behind `node` was given."""
    source = node.args[0] if node.target is operator.getitem else node
    return source.kwargs["data"] if source.target is auto_functionalized else source.args[0]


@pytest.mark.parametrize("reduce", [_reduced_out_of_place, _reduced_in_place])
def test_a_norm_stays_behind_the_all_reduce_in_front_of_it(reduce):
    # What o_proj gives on one rank is summed over the ranks, and only then added to the residual and normalised.
    def function(x, residual, weight):
        y, new_residual = fused_add_rms_norm(reduce(x * 2), residual, weight, 1e-5)
        return *quant(y), reduce(weight * new_residual)

    module = trace(function, X, R, W)
    assert fuse(module) == PassResult("norm_quant", 1, 1)
    module.graph.lint()
    before, after = (n for n in module.graph.nodes if _is_sum(n))
    fused = next(n for n in module.graph.nodes if n.target is torch.ops.kvcompile.fused_add_rms_norm_quant.default)
    assert fused.args[0] is before
    # What is summed are the doubled x of each rank, and of the new residual what the fused operator gives.
    assert _summed(before).target is torch.ops.aten.mul.Tensor and _summed(before).args[1] == 2
    assert any(n.target is operator.getitem and n.args == (fused, 2) for n in _summed(after).all_input_nodes)


@pytest.mark.parametrize("reduce", [_reduced_out_of_place, _reduced_in_place])
def test_a_quantiser_of_what_is_reduced_after_the_norm_is_no_candidate(reduce):
    result = untouched(lambda x, r, w: quant(reduce(rms_norm(x, w, 1e-5))), X, R, W)
    assert (result.matched, result.candidates) == (0, 0)
