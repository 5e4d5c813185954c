"""One node of a graph as plain data: what it computes, from what, of which size, for which layer of the model.

The token dimension is the graph's one symbolic size and is written T. Names of layers come from the node's
`nn_module_stack`, which vLLM's graph keeps for operators; inputs have lost theirs by then and get them from the names
that Dynamo gave them (see `graph_recorder`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from kvcompile.passes.nodes import operator_name
from kvcompile.tools.graph_bytes import moved

TOKENS = "T"
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SHOWN_CHARACTERS = 200


def token_symbol(nodes: Iterable[Node]) -> Any | None:
    """The sympy symbol of the token dimension; None if no size is symbolic, or more than one is."""
    symbols = {s for node in nodes if node.op == "placeholder" for s in _symbols(node.meta.get("val"))}
    return symbols.pop() if len(symbols) == 1 else None


def record(node: Node, tokens: Any | None, layer_of: Callable[[str], str]) -> dict[str, Any]:
    """The node as JSON can hold it. `layer_of` turns a path below the compiled module into a name of the model."""
    path = module_path(node)
    return {
        "name": node.name,
        "op": node.op if node.op in ("placeholder", "output") else "call",
        "target": target(node),
        "args": _arguments(node),
        "inputs": [source.name for source in node.all_input_nodes],
        "value": described(node.meta.get("val"), tokens),
        "layer": "" if path is None else layer_of(path),
        "where": _where(node),
        "bytes": moved(node, tokens),
    }


def target(node: Node) -> str:
    """What a node calls: `namespace.operator`, with its overload where it has one of several."""
    if node.op != "call_function":
        return node.op if node.op == "output" else str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    if name := operator_name(node):
        shown = name.replace("::", ".")
        if not isinstance(node.target, torch._ops.OpOverload):
            return f"{node.target.__name__}({shown})"
        suffix = node.target._overloadname
        return shown if suffix == "default" else f"{shown}.{suffix}"
    return getattr(node.target, "__name__", str(node.target))


def module_path(node: Node) -> str | None:
    """Path of the innermost module that a node was traced in, below the compiled one: "layers.3.mlp"; None: unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = re.sub(r"_modules\['(\w+)'\]", r"\1", list(stack.values())[-1][0])
    return re.sub(r"^L\['self'\]\.?", "", path)


def described(value: Any, tokens: Any | None) -> str:
    """`bf16[T, 576]`; a tuple of results in brackets; a symbolic size as itself."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(size_text(size, tokens) for size in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(described(item, tokens) or 'None' for item in value)})"
    if isinstance(value, torch.SymInt):
        return size_text(value, tokens)
    return "" if value is None else type(value).__name__


def size_text(size: Any, tokens: Any | None) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    return re.sub(rf"\b{tokens}\b", TOKENS, str(size)) if tokens is not None else str(size)


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.SymInt):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return set().union(*(_symbols(size) for size in value.shape))
    return set()


def _arguments(node: Node) -> str:
    if node.op == "placeholder":
        return ""
    parts = [_argument(value) for value in node.args]
    parts += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    text = ", ".join(parts)
    return text if len(text) <= _SHOWN_CHARACTERS or node.op == "output" else f"{text[:_SHOWN_CHARACTERS]}…"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, torch._ops.OpOverload):
        return value._schema.name.replace("::", ".")
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device | None):
        return str(value).removeprefix("torch.")
    return type(value).__name__


def _where(node: Node) -> str:
    """Innermost line of vLLM's model code that made the node, wherever vLLM is installed; "" if there is none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    inside = [(path, line) for path, line in frames if "/vllm/model_executor/" in path]
    if not inside:
        return ""
    path, line = inside[-1]
    return f"vllm/model_executor/{path.rpartition('/vllm/model_executor/')[2]}:{line}"
