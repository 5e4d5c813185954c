"""Graphs to run passes on: traced as Inductor traces, run as they are, and taken apart for inspection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kvcompile.passes.nodes import operator_name

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def trace(function: Callable[..., Any], *inputs: torch.Tensor, device: str = "cpu") -> torch.fx.GraphModule:
    """The graph of `function` after Inductor's decompositions. First dimensions are dynamic, of weights excepted.

    `device`: where the graph says that its tensors are; it takes no such device to trace it.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for tensor in inputs:
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if tensor.dim() > 1 or not tensor.is_floating_point():
            sizes[0] = DimDynamic.DUCK
        fake = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))
        with mode:
            fakes.append(fake if device == "cpu" else torch.empty(fake.shape, dtype=fake.dtype, device=device))
    with mode:
        module = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    # As what is in front of vLLM's passes leaves it: nothing twice, and nothing for nobody.
    module.graph = fx_graph_cse(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def operators(module: torch.fx.GraphModule) -> list[str]:
    """Names of the operators that a graph calls, in order, without namespace; less those that only look at sizes."""
    names = [operator_name(node).rpartition("::")[2] for node in module.graph.nodes]
    return [name for name in names if name and not name.startswith("sym_")]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_sound(module: torch.fx.GraphModule, *inputs: torch.Tensor) -> None:
    """The graph is in order, has no dead nodes, and says of every node what the node gives when it runs."""
    module.graph.lint()
    assert all(node.users for node in module.graph.nodes if node.op == "call_function")

    class Compare(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            result = super().run_node(node)
            if node.op == "call_function":
                said = node.meta["val"]
                for theirs, ours in zip(_tensors(said), _tensors(result), strict=True):
                    assert theirs.dtype == ours.dtype
                    assert theirs.dim() == ours.dim()
                    for a, b in zip((*theirs.shape, *theirs.stride()), (*ours.shape, *ours.stride()), strict=True):
                        assert not isinstance(a, int) or a == b, node.name
            return result

    Compare(module).run(*inputs)


def assert_one_step(ours: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...]) -> None:
    """int8 values at most one step apart and fewer than one in 1000 of them, scales to the rounding of 16 bits."""
    for a, b in zip(ours, before, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype == torch.int8:
            apart = (a.int() - b.int()).abs()
            assert apart.max() <= 1
            assert (apart != 0).sum() < max(a.numel() / 1000, 1)
        else:
            torch.testing.assert_close(a, b, rtol=2**-8, atol=0)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]
