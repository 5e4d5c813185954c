"""`kvcompile import-qserve`: a published QServe / OmniServe checkpoint as a W4A8 checkpoint that vLLM can shard."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import W4A8Weight
from kvcompile.shards import INDEX
from kvcompile.tools import qserve, qserve_source
from kvcompile.tools.qserve_source import ELSEWHERE, FLOATS, KEPT, LINEARS, MERGED, QServeSource, Tensors
from kvcompile.tools.quantize_output import Entry, Workspace, found, kept
from kvcompile.tools.quantize_paths import source_and_out
from kvcompile.tools.quantize_progress import print_result, say
from kvcompile.tools.quantize_side import say_what_is_left_out, side_files

_DTYPES = {torch.uint8: "U8", **FLOATS}  # what OUT may hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert a W4A8 checkpoint of QServe / OmniServe (per group or per channel). Every weight keeps its value; a "
        "checkpoint that this format does not hold exactly is refused."
    )
    parser.add_argument("src", metavar="SRC", help="folder of the checkpoint; it is not changed")
    parser.add_argument("out", metavar="OUT", help="folder to make; called OUT.part until it is complete")


def run(args: argparse.Namespace) -> int:
    """0 once OUT is complete; its path is printed on standard output, everything else on standard error."""
    workspace = None
    try:
        path, out = source_and_out(args.src, args.out)
        source = qserve_source.read(path)
        side_files(path)  # it has judged the names by then
        with torch.inference_mode(), Workspace(out, {"command": "import-qserve", "source": str(path)}) as workspace:
            if (told := found(workspace)) is not None:
                say(f"import-qserve: {told}")
            # Of the same size but for s1, which grows from two to four bytes a row.
            workspace.need(sum(tensor.nbytes for tensor in source.tensors.values()) * 105 // 100)
            say_what_is_left_out("import-qserve", path, source.files)
            _write(path, source, workspace)
            workspace.publish(drop=())
    except KeyboardInterrupt:
        say(f"import-qserve: interrupted: {kept(workspace)}")
        raise
    except OSError as error:
        cause = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise UsageError(f"cannot make {args.out}: {cause}; put that right and run it again") from error
    print_result(f"{out}\n", out)
    return 0


def _write(path: Path, source: QServeSource, workspace: Workspace) -> None:
    """One file per decoder layer, and one for the rest; one layer at a time is in memory."""
    layers = source.config["num_hidden_layers"]
    where: dict[str, str] = {}
    groups: dict[int, int] = {}
    total = 0
    for index in range(layers + 1):
        file = f"model-{index + 1:05}-of-{layers + 1:05}.safetensors"
        made = _kept(source.tensors, str(index) if index < layers else None)
        if index < layers:
            made |= _linears(index, source, groups)
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
        "modules_to_not_convert": [],
    }
    for side in side_files(path):
        workspace.copy(side, str(side.relative_to(path)))
    workspace.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    workspace.write_json("config.json", {**source.config, "quantization_config": described})


def _kept(tensors: Tensors, layer: str | None) -> Tensors:
    """What stays as it is of one layer; of None, what belongs to no layer: embeddings, the last norm, lm_head."""
    return {name: t for name, t in tensors.items() if (match := KEPT.fullmatch(name)) and match[1] == layer}


def _linears(index: int, source: QServeSource, groups: dict[int, int]) -> Tensors:
    """The linears of one decoder layer in this project's layout; `groups` learns input width -> group size."""
    made: Tensors = {}
    linears: dict[str, Tensors] = {}
    for name, tensor in source.tensors.items():
        if (match := LINEARS.fullmatch(name)) and match[2] == str(index):
            linears.setdefault(match[1], {})[match[3]] = tensor
    for name, parts in linears.items():
        bias = parts.pop("bias", None)
        try:
            weight = qserve.convert(parts)
        except ValueError as error:
            raise UsageError(f"{name}: {error}; {ELSEWHERE}") from None
        if groups.setdefault(weight.in_features, weight.group_size) != weight.group_size:
            raise UsageError(
                f"{name}: has groups of {weight.group_size}, another layer with {weight.in_features} inputs has "
                f"{groups[weight.in_features]}; allowed is one size for all layers of a width"
            )
        for part, rows in _parts(name, source.rows).items():
            made |= {f"{part}.{n}": t[rows].contiguous() for n, t in zip(W4A8Weight._fields, weight, strict=True)}
            if bias is not None:
                made[f"{part}.bias"] = bias[rows].contiguous()
    return made


def _parts(name: str, rows: dict[str, int]) -> dict[str, slice]:
    """Names as Hugging Face has them, and the rows of each: a merged linear is several."""
    block, _, last = name.rpartition(".")
    slices, start = {}, 0
    for part in (f"{block}.{each}" for each in MERGED.get(last, (last,))):
        slices[part] = slice(start, start + rows[part])
        start += rows[part]
    return slices


if __name__ == "__main__":
    from kvcompile.cli import main

    sys.exit(main(["import-qserve", *sys.argv[1:]]))
