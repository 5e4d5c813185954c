"""The checkpoint that `kvcompile import-qserve` reads: what it must be, tensor by tensor. It is not changed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from kvcompile.config import UsageError, shown
from kvcompile.llama import expected
from kvcompile.tools.checkpoint_config import quantised_by, read_config, refuse_other_values

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")  # those that QServe publishes
LINEARS = re.compile(
    r"(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(?:[qkvo]|qkv|gate|up|down|gate_up)_proj)"
    r"\.(qweight|s1_scales|s1_szeros|s2_scales|s2_zeros|bias)"
)
KEPT = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|model\.norm\.weight"
    r"|model\.layers\.(\d+)\.(?:input|post_attention)_layernorm\.weight"
)
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
ELSEWHERE = "quantise the original model with `kvcompile quantize` instead"

# The first is computed from config.json; the others scale QServe's own KV cache, which is not vLLM's.
_DROPPED = re.compile(r".*\.(?:rotary_emb\.inv_freq|kv_scale_quant_orig|kv_scale_orig_quant)")
_MERGED_INTO = {part: merged for merged, parts in MERGED.items() for part in parts}
_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle of the number that stands first
_APART = "the two do not belong together, get the checkpoint again"

Tensors = dict[str, torch.Tensor]


class QServeSource(NamedTuple):
    """`rows`: output channels of each linear by its name in Hugging Face's checkpoints, where none is merged.

    `files`: the names of those that hold the tensors.
    """

    config: dict[str, Any]
    tensors: Tensors
    rows: dict[str, int]
    files: frozenset[str]


def read(path: Path) -> QServeSource:
    """The checkpoint in the folder `path`; its weights are mapped from their files rather than read.

    Raises UsageError, in one line, for a checkpoint that is not QServe's, is incomplete, or has tensors that
    config.json has no place for or that are not as it says.
    """
    config = _config(path)
    files = _files(path)
    tensors = _tensors(path, files)
    _refuse_foreign(path, config["num_hidden_layers"], tensors)
    rows = _refuse_unfit(path, config, tensors)
    return QServeSource(config, tensors, rows, frozenset(file.name for file in files))


def _config(source: Path) -> dict[str, Any]:
    config = read_config(source, "a QServe checkpoint")
    refuse_other_values(config, source / "config.json", ARCHITECTURES)
    described = config.get("quantization_config")
    method = described.get("quant_method") if isinstance(described, dict) else described
    if described and not (isinstance(method, str) and "qserve" in method.lower()):
        raise UsageError(
            f"SRC {source}: quantization_config is of {quantised_by(described)}, not of QServe; give a checkpoint of "
            "QServe"
        )
    return config


def _files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.safetensors")) or sorted(source.glob("pytorch_model*.bin"))
    if not files and (source / "quant_model.pt").is_file():
        raise UsageError(
            f"SRC {source}: quant_model.pt is of deepcompressor's own converter, which orders the scales of groups "
            "otherwise than QServe's kernels read them; convert with checkpoint_converter.py of OmniServe"
        )
    if not files:
        raise UsageError(f"SRC {source}: has no pytorch_model.bin and no safetensors file; give a QServe checkpoint")
    return files


def _tensors(source: Path, files: list[Path]) -> Tensors:
    """All tensors, mapped from their files rather than read."""
    tensors: Tensors = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                part = load_file(file)
            else:
                _refuse_other_bin(file)
                with warnings.catch_warnings(action="ignore"):  # of torch's own, on tensors that are refused below
                    part = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except UsageError:
            raise
        except Exception as error:  # whatever goes wrong in there is the file's doing
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise UsageError(f"{file} cannot be read ({why}); get it again") from error
        if not isinstance(part, dict) or not all(isinstance(value, torch.Tensor) for value in part.values()):
            raise UsageError(f"{file} holds something else than named tensors; give a QServe checkpoint")
        for name, tensor in part.items():
            _refuse_odd(file, name, tensor)
        if twice := sorted(tensors.keys() & part.keys()):
            raise UsageError(
                f"SRC {source}: tensor {twice[0]} is in {file.name} and in another file; remove one of them"
            )
        tensors.update(part)
    return tensors


def _refuse_other_bin(file: Path) -> None:
    """Raise UsageError for a file that is not of torch.save as it is since torch 1.6, of which alone parts are read."""
    with file.open("rb") as opened:
        start = opened.read(len(_LEGACY))
    if start == _LEGACY:
        raise UsageError(
            f"{file} is in the format of torch.save before torch 1.6, which cannot be mapped; load it with a current "
            "torch and torch.save it anew"
        )
    if not start.startswith(_ZIP):
        found = "is not a file of torch.save" if start else "is empty"
        raise UsageError(f"{file} {found}; get the checkpoint again")


def _refuse_odd(file: Path, name: Any, tensor: torch.Tensor) -> None:
    """Raise UsageError for a tensor that is not named by a text, or has no plain values in the file."""
    if not isinstance(name, str):
        raise UsageError(f"{file} has a tensor named {shown(name)}; allowed are texts; give a QServe checkpoint")
    odd = "on the meta device, without values" if tensor.is_meta else None
    if tensor.layout != torch.strided or tensor.is_nested:
        odd = "sparse" if tensor.layout != torch.strided else "nested"
    if tensor.is_quantized:
        odd = "of a quantised dtype of torch's own"
    if odd is not None:
        raise UsageError(f"{file}: tensor {name} is {odd}; allowed are dense ones; get the checkpoint again")


def _refuse_foreign(source: Path, layers: int, tensors: Tensors) -> None:
    """What is not known to be harmless may change results: smoothing, rotations, other activations, more layers."""
    if not any(name.endswith(".s1_scales") for name in tensors):
        raise UsageError(f"SRC {source}: has no s1_scales, so it is no W4A8 checkpoint of QServe; {ELSEWHERE}")
    for name in sorted(tensors):
        if _DROPPED.fullmatch(name):
            continue
        linear, kept = LINEARS.fullmatch(name), KEPT.fullmatch(name)
        if not linear and not kept:
            raise UsageError(
                f"SRC {source}: tensor {name} has no place in a W4A8 Llama, and leaving it out could change results; "
                f"{ELSEWHERE}"
            )
        layer = linear[2] if linear else kept[1]
        if layer is not None and int(layer) >= layers:
            raise UsageError(
                f"SRC {source}: tensor {name} is of layer {layer}; by config.json num_hidden_layers is {layers}, so "
                f"that the last one is {layers - 1}; {_APART}"
            )
        if (kept or linear[3] == "bias") and tensors[name].dtype not in FLOATS:
            raise UsageError(
                f"SRC {source}: tensor {name} is {tensors[name].dtype}; allowed are {', '.join(map(str, FLOATS))}; "
                f"{ELSEWHERE}"
            )


def _refuse_unfit(source: Path, config: dict[str, Any], tensors: Tensors) -> dict[str, int]:
    """Compare with what config.json says, and return `QServeSource.rows`. Raises UsageError, naming the tensor."""
    rows: dict[str, int] = {}
    wanted: dict[str, list[int]] = {}  # shapes, those of merged linears put together
    for name, shape, linear in expected(config, str(source / "config.json")):
        place = name if linear is None else f"{linear}.qweight"
        merged = _merged(place)
        found = merged if merged in tensors else place
        if found not in tensors:
            raise UsageError(f"the checkpoint has nothing for {place}; it is incomplete, get it again")
        if found != place and place in tensors:
            raise UsageError(f"SRC {source}: {place} is there twice, by itself and in {merged}; remove one of them")
        if linear is not None:
            rows[linear], shape = shape[0], (shape[0], shape[1] // 2)
        if found in wanted:
            wanted[found][0] += shape[0]
        else:
            wanted[found] = list(shape)
    for name, tensor in tensors.items():
        if name.endswith(".bias") and name not in wanted:
            raise UsageError(
                f"SRC {source}: tensor {name} is a bias that config.json does not have, so that vLLM would leave it "
                "out; set attention_bias or mlp_bias there"
            )
        if name in wanted and list(tensor.shape) != wanted[name]:
            raise UsageError(
                f"SRC {source}: tensor {name} has shape {list(tensor.shape)}, by config.json it has {wanted[name]}; "
                f"{_APART}"
            )
        if name.endswith((".bias", ".weight")) and not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"SRC {source}: tensor {name} holds NaN or infinity; get the checkpoint again")
    return rows


def _merged(name: str) -> str:
    """The tensor that holds `name` where QServe merges linears; `name` itself if it never does."""
    linear, _, tensor = name.rpartition(".")
    block, _, last = linear.rpartition(".")
    return f"{block}.{_MERGED_INTO.get(last, last)}.{tensor}"
