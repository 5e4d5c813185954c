"""A graph as text, one file before the passes and one after each that changed it: for reading and for `diff`.

rms_norm: bf16[T, 576] = vllm_ir.rms_norm(embedding, arg3_1, 1e-05, None)  # model.layers.0.input_layernorm
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(folder: Path, graph: Mapping[str, Any]) -> None:
    """folder/0-before.txt, folder/1-norm_quant.txt, ... A pass that changed nothing gets no file."""
    folder.mkdir()
    for number, stage in enumerate(graph["stages"]):
        if number and stage["nodes"] == graph["stages"][number - 1]["nodes"]:
            continue
        name = f"{number}-{stage['after'] or 'before'}.txt"
        (folder / name).write_text(text(graph, number), encoding="utf-8")


def text(graph: Mapping[str, Any], stage: int) -> str:
    lines = [_line(graph["nodes"][index]) for index in graph["stages"][stage]["nodes"]]
    return "\n".join([*_heading(graph, stage), *lines]) + "\n"


def counted(count: int, what: str) -> str:
    """ "1 piece", "2 pieces"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _heading(graph: Mapping[str, Any], number: int) -> list[str]:
    stage, pieces = graph["stages"][number], graph["pieces"]
    after = f"after {stage['after']}" if stage["after"] else "before the passes"
    low, high = graph["tokens"]
    shared = f"pieces {pieces[0]} to {pieces[-1]}" if len(pieces) > 1 else f"piece {pieces[0]}"
    size = stage["bytes"]
    return [
        f"# graph {graph['number']}, {after}: {shared} of the model, batches of {low} to {high} tokens",
        f"# {counted(stage['operators'], 'operator')}, {counted(stage['views'], 'view')}; "
        f"{counted(size['token'], 'byte')} per token (T) and {counted(size['constant'], 'byte')} otherwise",
    ]


def _line(node: Mapping[str, Any]) -> str:
    if node["op"] == "output":
        return f"return {node['args']}"
    origin = f"  # {node['layer']}" if node["layer"] and node["op"] == "call" else ""
    if node["op"] == "placeholder":
        return f"{node['name']}: {node['value']} = input  # {node['target']}"
    return f"{node['name']}: {node['value']} = {node['target']}({node['args']}){origin}"
