"""`kvcompile import-qserve`: a published QServe / OmniServe checkpoint as a W4A8 checkpoint that vLLM can shard."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import W4A8Weight
from kvcompile.tools import qserve
from kvcompile.tools.quantize_output import Entry, Workspace
from kvcompile.tools.quantize_progress import say

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")  # those that QServe publishes
INDEX = "model.safetensors.index.json"

_LINEARS = re.compile(
    r"(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(?:[qkvo]|qkv|gate|up|down|gate_up)_proj)"
    r"\.(qweight|s1_scales|s1_szeros|s2_scales|s2_zeros|bias)"
)
_KEPT = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|model\.norm\.weight"
    r"|model\.layers\.(\d+)\.(?:input|post_attention)_layernorm\.weight"
)
# The first is computed from config.json; the others scale QServe's own KV cache, which is not vLLM's.
_DROPPED = re.compile(r".*\.(?:rotary_emb\.inv_freq|kv_scale_quant_orig|kv_scale_orig_quant)")
_ELSEWHERE = "quantise the original model with `kvcompile quantize` instead"
_FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
_DTYPES = {torch.uint8: "U8", **_FLOATS}  # what OUT may hold
_NO_SIDE_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")

Tensors = dict[str, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert a W4A8 checkpoint of QServe / OmniServe (per group or per channel). Every weight keeps its value; a "
        "checkpoint that this format does not hold exactly is refused."
    )
    parser.add_argument("src", type=Path, metavar="SRC", help="folder of the checkpoint; it is not changed")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; called OUT.part until it is complete")


def run(args: argparse.Namespace) -> int:
    """0 once OUT is complete; its path is printed on standard output, everything else on standard error."""
    source, out = args.src.expanduser().resolve(), args.out.expanduser().absolute()
    if out.resolve().is_relative_to(source) or source.is_relative_to(out.resolve()):
        raise UsageError(f"OUT {out} and SRC {source} lie one in the other; name another OUT")
    config = _config(source)
    tensors = _tensors(source)
    _refuse_foreign(source, config["num_hidden_layers"], tensors)
    try:
        with torch.inference_mode(), Workspace(out, {"command": "import-qserve", "source": str(source)}) as workspace:
            # Of the same size but for s1, which grows from two to four bytes a row.
            workspace.need(sum(tensor.nbytes for tensor in tensors.values()) * 105 // 100)
            _write(source, config, tensors, workspace)
            workspace.publish(drop=())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}; put that right and run it again") from error
    print(out)
    return 0


def _config(source: Path) -> dict[str, Any]:
    file = source / "config.json"
    if not file.is_file():
        raise UsageError(f"SRC {source}: has no config.json; give the folder of a QServe checkpoint")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        names = config.get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{file} cannot be read as a JSON object ({' '.join(str(error).split())})") from error
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UsageError(f"SRC {source}: architectures is {names}; supported are {', '.join(ARCHITECTURES)}")
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise UsageError(f"{file}: {key} is {config.get(key)!r}; allowed is a whole number from 1")
    described = config.get("quantization_config") or {}
    if described and "qserve" not in str(described.get("quant_method")).lower():
        raise UsageError(f"SRC {source}: quantization_config is of {described.get('quant_method')}, not of QServe")
    return config


def _tensors(source: Path) -> Tensors:
    """All tensors, mapped from their files rather than read."""
    if not source.is_dir():
        raise UsageError(f"SRC {source}: no such folder; give the folder of a QServe checkpoint")
    files = sorted(source.glob("*.safetensors")) or sorted(source.glob("pytorch_model*.bin"))
    if not files and (source / "quant_model.pt").is_file():
        raise UsageError(
            f"SRC {source}: quant_model.pt is of deepcompressor's own converter, which orders the scales of groups "
            "otherwise than QServe's kernels read them; convert with checkpoint_converter.py of OmniServe"
        )
    if not files:
        raise UsageError(f"SRC {source}: has no pytorch_model.bin and no safetensors file; give a QServe checkpoint")
    tensors: Tensors = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                part = load_file(file)
            else:
                part = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
            raise UsageError(f"{file} cannot be read ({' '.join(str(error).split())[:200]}); get it again") from error
        if not isinstance(part, dict) or not all(isinstance(value, torch.Tensor) for value in part.values()):
            raise UsageError(f"{file} holds something else than named tensors; give a QServe checkpoint")
        tensors.update(part)
    return tensors


def _refuse_foreign(source: Path, layers: int, tensors: Tensors) -> None:
    """What is not known to be harmless may change results: smoothing, rotations, other activations, more layers."""
    if not any(name.endswith(".s1_scales") for name in tensors):
        raise UsageError(f"SRC {source}: has no s1_scales, so it is no W4A8 checkpoint of QServe; {_ELSEWHERE}")
    for name in sorted(tensors):
        if _DROPPED.fullmatch(name):
            continue
        linear, kept = _LINEARS.fullmatch(name), _KEPT.fullmatch(name)
        if not linear and not kept:
            raise UsageError(
                f"SRC {source}: tensor {name} has no place in a W4A8 Llama, and leaving it out could change results; "
                f"{_ELSEWHERE}"
            )
        layer = linear[2] if linear else kept[1]
        if layer is not None and int(layer) >= layers:
            raise UsageError(
                f"SRC {source}: tensor {name} is of layer {layer}; by config.json num_hidden_layers is {layers}, so "
                f"that the last one is {layers - 1}; the two do not belong together, get the checkpoint again"
            )
        if (kept or linear[3] == "bias") and tensors[name].dtype not in _FLOATS:
            raise UsageError(
                f"SRC {source}: tensor {name} is {tensors[name].dtype}; allowed are {', '.join(map(str, _FLOATS))}; "
                f"{_ELSEWHERE}"
            )


def _write(source: Path, config: dict[str, Any], tensors: Tensors, workspace: Workspace) -> None:
    """One file per decoder layer, and one for the rest; one layer at a time is in memory."""
    layers = config["num_hidden_layers"]
    where: dict[str, str] = {}
    groups: dict[int, int] = {}
    total = 0
    for index in range(layers + 1):
        file = f"model-{index + 1:05}-of-{layers + 1:05}.safetensors"
        made = _layer(index, config, tensors, groups) if index < layers else _rest(config, tensors)
        entries: list[Entry] = [(name, _DTYPES[t.dtype], tuple(t.shape)) for name, t in made.items()]
        workspace.write_tensors(file, entries, made.values())
        where |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
        if index < layers and (index + 1) * 10 // layers > index * 10 // layers:
            say(f"import-qserve: {index + 1} of {layers} layers")
    widest = max(groups, key=lambda width: width != groups[width])
    described = {
        "quant_method": "kvcompile_w4a8",
        "format": 1,
        "group_size": "channel" if groups[widest] == widest else groups[widest],
        "group_sizes": {str(width): group for width, group in sorted(groups.items())},
        "method": "qserve",
        "modules_to_not_convert": ["lm_head"],
    }
    for side in sorted(source.iterdir()):
        if side.is_file() and side.name != "config.json" and not side.name.endswith(_NO_SIDE_FILES):
            workspace.copy(side)
    workspace.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    workspace.write_json("config.json", {**config, "quantization_config": described})


def _rest(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """What belongs to no layer: embeddings, the last norm, and lm_head unless it is the embeddings over again."""
    made = {n: t for n, t in tensors.items() if (kept := _KEPT.fullmatch(n)) and kept[1] is None}
    tied = config.get("tie_word_embeddings", False)
    _refuse_missing(["model.embed_tokens.weight", "model.norm.weight", *([] if tied else ["lm_head.weight"])], made)
    return made


def _layer(index: int, config: dict[str, Any], tensors: Tensors, groups: dict[int, int]) -> Tensors:
    """The tensors of one decoder layer in this project's layout; `groups` learns input width -> group size."""
    made = {n: t for n, t in tensors.items() if (kept := _KEPT.fullmatch(n)) and kept[1] == str(index)}
    linears: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        if (match := _LINEARS.fullmatch(name)) and match[2] == str(index):
            linears.setdefault(match[1], {})[match[3]] = tensor
    for name, parts in linears.items():
        bias = parts.pop("bias", None)
        try:
            weight = qserve.convert(parts)
        except ValueError as error:
            raise UsageError(f"{name}: {error}; {_ELSEWHERE}") from None
        if groups.setdefault(weight.in_features, weight.group_size) != weight.group_size:
            raise UsageError(
                f"{name}: has groups of {weight.group_size}, another layer with {weight.in_features} inputs has "
                f"{groups[weight.in_features]}; allowed is one size for all layers of a width"
            )
        for part, rows in _parts(name, weight.out_features, config).items():
            made |= {f"{part}.{n}": t[rows].contiguous() for n, t in zip(W4A8Weight._fields, weight, strict=True)}
            if bias is not None:
                made[f"{part}.bias"] = bias[rows].contiguous()
    layer = f"model.layers.{index}"
    names = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    wanted = [f"{layer}.{name}.qweight" for name in names]
    wanted += [f"{layer}.{name}_layernorm.weight" for name in ("input", "post_attention")]
    _refuse_missing(wanted, made)
    return made


def _parts(name: str, rows: int, config: dict[str, Any]) -> dict[str, slice]:
    """Names as Hugging Face has them, and the rows of each: a merged linear is several."""
    block, _, last = name.rpartition(".")
    if last == "qkv_proj":
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        kv_rows = (config.get("num_key_value_heads") or heads) * head
        sizes = {"q_proj": heads * head, "k_proj": kv_rows, "v_proj": kv_rows}
    elif last == "gate_up_proj":
        sizes = {"gate_proj": rows // 2, "up_proj": rows // 2}
    else:
        return {name: slice(0, rows)}
    if sum(sizes.values()) != rows:
        raise UsageError(f"{name}: has {rows} output channels; by config.json it is {sum(sizes.values())}")
    starts = [sum(list(sizes.values())[:i]) for i in range(len(sizes))]
    return {
        f"{block}.{part}": slice(start, start + size) for (part, size), start in zip(sizes.items(), starts, strict=True)
    }


def _refuse_missing(wanted: list[str], made: Tensors) -> None:
    for name in wanted:
        if name not in made:
            raise UsageError(f"the checkpoint has nothing for {name}; it is incomplete, get it again")


if __name__ == "__main__":
    from kvcompile.cli import main

    sys.exit(main(["import-qserve", *sys.argv[1:]]))
