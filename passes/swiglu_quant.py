r"""SwiGLU and the quantisers of its output become one operator.

before, as Inductor takes it apart (the casts are there for bf16 and fp16 only)

           gate_up [T, 2I]
           /            \
    slice[0:I]       slice[I:2I]
        |                |
    cast to fp32         |
      /     \            |
     |      neg          |                                      after
     |       |           |
     |      exp          |                                          gate_up
     |       |           |                                             |
     |     add 1         |                                      kvcompile.silu_mul_quant
      \     /            |                                       |[0]   |[1]
       div               |                                      x_q    x_scale
        |                |
    cast back            |
         \              /
               mul
                |
            (reshape)
                |
        kvcompile.quant_per_token
             |[0]   |[1]
            x_q    x_scale

or, before, with vLLM's own kernel (`+silu_and_mul`), and after it the same

        out = empty    gate_up
                \      /
    auto_functionalized(_C.silu_and_mul)
                |[1]
            (reshape)
                |
        kvcompile.quant_per_token

silu may also be `aten.silu` or v * sigmoid(v), the halves may come from a split, and the product may have them in
either order. Both sides round silu(gate) to the dtype of gate_up before the product, and the product. A graph that
rounds elsewhere means something else and is not matched; vLLM's kernel for CPUs is such a one, its CUDA kernel not.

Candidates are quantisers of anything elementwise around an exponential function, or of an operator with "silu" in its
name. So if vLLM or Inductor writes SwiGLU differently one day, there are candidates without a match; a quantiser behind
attention or a norm is none, and neither is one of a product that somebody else reads too (see `fuse_quantisers`).
"""

from __future__ import annotations

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import Graph, Node

from kvcompile.passes.fuse import Fusion, Misfit, fuse_quantisers
from kvcompile.passes.nodes import (
    calls,
    is_item,
    is_ours,
    operator_name,
    pointwise_cone,
    value,
    width,
)
from kvcompile.passes.parts import Part, behind_rows, part
from kvcompile.passes.result import PassResult

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_SILU_AND_MUL = "_C::silu_and_mul"


class SwigluQuant:
    """The pass; see above."""

    name = "swiglu_quant"

    def __call__(self, graph: Graph) -> PassResult:
        return fuse_quantisers(graph, self.name, _find)


def _find(y: Node) -> Fusion | None:
    gate_up = _of_kernel(y) or _of_product(y)
    if gate_up is None:
        _refuse_other_activations(y)
        return None
    return Fusion(torch.ops.kvcompile.silu_mul_quant.default, [gate_up], (), y)


def _of_kernel(y: Node) -> Node | None:
    """gate_up of vLLM's own kernel."""
    # Results are what the operator returns, here None, and then what it writes.
    if not is_item(y, 1) or not calls(y.args[0], auto_functionalized) or operator_name(y.args[0]) != _SILU_AND_MUL:
        return None
    kernel, given = y.args[0].args[0], y.args[0].kwargs
    (gate_up,) = (given[argument.name] for argument in kernel._schema.arguments if not argument.is_write)
    if value(y).device.type == "cpu" and value(y).dtype != torch.float32:
        raise Misfit(f"on a CPU {_SILU_AND_MUL} does not round silu(gate) before the product")
    if width(y) is None or width(gate_up) != 2 * width(y) or value(gate_up).dtype != value(y).dtype:
        raise Misfit(f"{_SILU_AND_MUL} of {_shown(gate_up)} gives {_shown(y)}")
    return gate_up


def _of_product(y: Node) -> Node | None:
    """gate_up of silu(gate) * up."""
    if not calls(y, _aten.mul.Tensor):
        return None
    for activated, up in (y.args, y.args[::-1]):
        if isinstance(up, Node) and (gate := _gate(activated)) is not None:
            if not value(gate).dtype == value(up).dtype == value(y).dtype:
                raise Misfit(f"gate, up and their product are {_shown(gate)}, {_shown(up)} and {_shown(y)}")
            return _whole(gate, up)
    return None


def _gate(activated: Node) -> Node | None:
    """gate where `activated` is silu(gate), computed in fp32 and rounded to gate's dtype."""
    dtype = value(activated).dtype if isinstance(activated, Node) else None
    if calls(activated, _CAST) and dtype != torch.float32:
        operand = _silu_operand(activated.args[0])
        return operand.args[0] if calls(operand, _CAST) and value(operand).dtype == torch.float32 else None
    operand = _silu_operand(activated)
    if operand is None or dtype == torch.float32 or calls(activated, _aten.silu.default):
        return operand
    raise Misfit(f"silu is computed in {dtype} instead of fp32")


def _silu_operand(node: Node) -> Node | None:
    """v where `node` is silu(v)."""
    if calls(node, _aten.silu.default):
        return node.args[0]
    if calls(node, _aten.div.Tensor):
        v, divisor = node.args
        if calls(divisor, _aten.add.Tensor, _aten.add.Scalar) and divisor.args[1] == 1 and not divisor.kwargs:
            exp = divisor.args[0]
            if calls(exp, _aten.exp.default) and calls(exp.args[0], _aten.neg.default) and exp.args[0].args[0] is v:
                return v
    if calls(node, _aten.mul.Tensor):
        for v, other in (node.args, node.args[::-1]):
            if calls(other, _aten.sigmoid.default) and other.args[0] is v:
                return v
    return None


def _whole(gate: Node, up: Node) -> Node:
    """The tensor whose first half is `gate` and whose second is `up`; Misfit if there is none."""
    first, second = _part(gate), _part(up)
    if first.source is not second.source:
        raise Misfit(f"gate and up are parts of two tensors, {first.source.name} and {second.source.name}")
    channels = width(first.source)
    halves = [(0, channels // 2), (channels // 2, channels)]
    given = [first[1:], second[1:]]
    if channels % 2 == 0 and given == halves:
        return first.source
    if channels % 2 == 0 and given == halves[::-1]:
        raise Misfit("gate is the second half and up the first")
    shown = " and ".join(f"{part.start}:{part.stop}" for part in (first, second))
    raise Misfit(f"gate and up are channels {shown} of {channels}, not its halves")


def _part(node: Node) -> Part:
    """`part`, or Misfit."""
    found = part(node)
    if found is None:
        raise Misfit(f"{behind_rows(node).name} is no slice of another tensor's channels")
    return found


def _refuse_other_activations(y: Node) -> None:
    """Raise if y looks like SwiGLU in a form that this pass does not know."""
    for node in pointwise_cone(y):
        name = operator_name(node)
        if "silu" in name and not is_ours(name):
            raise Misfit(f"{node.name}, {name}, is in no form of SwiGLU that this pass knows")
        if calls(node, _aten.exp.default):
            raise Misfit(f"{node.name} is an exponential function in no form of SwiGLU that this pass knows")


def _shown(node: Node) -> str:
    return f"{value(node).dtype} {tuple(value(node).shape)}"
