"""A W4A8 model's weight files, judged by their headers before an engine is started: is everything there, and as said?

Then the scales (`linear_values`); no 4-bit code is read. Loading checks the same again (`linear_loading`,
`linear_complete`), and what only the codes can tell; but it runs in a worker, whose failure ends in a long trace and
exit code 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.config import ModelConfig

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import linear_values
from kvcompile.integrations.vllm.active import W4A8_QUANTIZATION
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.llama import ARCHITECTURES, Expected, expected, is_superfluous
from kvcompile.shards import INDEX, announced

# Those under which vLLM reads a folder's *.safetensors as they are.
_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
_FLOATS = {"BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32"}
_DTYPES = {**_FLOATS, "U8": "torch.uint8", "I8": "torch.int8", "F64": "torch.float64", "F8_E4M3": "torch.float8_e4m3fn"}
# Scales of vLLM's own fp8 KV cache, which it takes or leaves by itself.
_KV_SCALE = re.compile(r".*\.(?:[kvq]|kv)_scale")
_ANEW = "it is incomplete, quantise or copy it anew"

Headers = dict[str, tuple[str, list[int]]]  # name -> dtype as safetensors writes it, shape


def refuse_damaged(model: ModelConfig, load_format: str) -> None:
    """Raise UsageError, naming the first tensor or file, unless the files fit the model that config.json describes.

    Judged are folders on this machine with an architecture that kvcompile knows; of others nothing is known here.
    """
    folder = Path(model.model)
    if model.quantization != W4A8_QUANTIZATION or model.architecture not in ARCHITECTURES:
        return
    if str(load_format) not in _FORMATS or not folder.is_dir() or any(folder.glob("consolidated*.safetensors")):
        return
    described = getattr(model.hf_config, "quantization_config", None)
    config = W4A8Config() if described is None else W4A8Config.from_config(described)
    files = _files(folder, str(model.model))
    if not files and described is None:
        return  # weights of another kind, such as *.bin
    if not files:
        raise UsageError(f"model {model.model}: the folder has no safetensors file; {_ANEW}")
    headers: Headers = {}
    for file in files:
        headers |= _header(file, str(model.model))
    known, linears = set(), set()
    text = model.hf_text_config
    said = {**text.to_dict(), "architectures": [model.architecture], "tie_word_embeddings": text.tie_word_embeddings}
    for name, dtype, shape in _wanted(said, f"model {model.model}: config.json", config):
        _refuse_other(name, dtype, shape, headers)
        known.add(name)
        if name.endswith(".qweight"):
            linears.add(name.removesuffix(".qweight"))
    for name in sorted(headers.keys() - known):
        if not is_superfluous(name) and not _KV_SCALE.fullmatch(name):
            raise UsageError(
                f"the checkpoint has a tensor {name} that its config.json has no place for; remove the tensor, or "
                "quantise the model anew"
            )
    linear_values.refuse_wrong(files, linears)


def _wanted(said: dict[str, Any], where: str, config: W4A8Config) -> Iterator[tuple[str, str | None, list[int]]]:
    """Name, dtype (None: a float) and shape of every tensor."""
    for tensor in expected(said, where):
        group = _group(tensor, config)
        if group is None:
            yield tensor.name, None, list(tensor.shape)
            continue
        rows, width = tensor.shape
        yield f"{tensor.linear}.qweight", "U8", [rows, width // 2]
        for field in ("group_scales", "group_zeros"):
            yield f"{tensor.linear}.{field}", "U8", [rows, width // group]
        yield f"{tensor.linear}.channel_scales", "F32", [rows]


def _group(tensor: Expected, config: W4A8Config) -> int | None:
    """Channels a group, or None for what is not quantised in the checkpoint.

    Raises UsageError for a width that config.json has no group for.
    """
    if tensor.linear is None or config.group_sizes is None or tensor.linear in config.skipped:
        return None
    return config.group_on_rank(tensor.linear, tensor.shape[1], 1)


def _refuse_other(name: str, dtype: str | None, shape: list[int], headers: Headers) -> None:
    if name not in headers:
        raise UsageError(f"the checkpoint has no tensor {name}; {_ANEW}")
    found, has = headers[name]
    if has == shape and (found == dtype or (dtype is None and found in _FLOATS)):
        return
    raise UsageError(
        f"tensor {name} is {_DTYPES.get(found, found)} {has}; by the checkpoint's config.json it is "
        f"{_DTYPES[dtype] if dtype else 'of a float type'} {shape}; the two do not belong together, quantise the model "
        "anew"
    )


def _files(folder: Path, model: str) -> list[Path]:
    """The files that vLLM will load: all, or where there is an index those that it names. None may be missing."""
    present = {file.name for file in folder.glob("*.safetensors")}
    index = folder / INDEX
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"model {model}: {INDEX} has no weight_map that can be read; {_ANEW}") from error
    else:
        wanted = present | announced(present)
    if missing := sorted(str(name) for name in wanted - present):
        raise UsageError(f"model {model}: file {missing[0]} is missing; {_ANEW}")
    return [folder / name for name in sorted(wanted)]


def _header(file: Path, model: str) -> Headers:
    try:
        with safe_open(file, "pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118, it is no mapping
            return {name: (part.get_dtype(), list(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"model {model}: {file.name} cannot be read as safetensors ({why}); quantise or copy it anew"
        ) from error
