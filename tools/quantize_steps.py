"""The work of `kvcompile quantize`, in steps that are recorded when complete: calibrated layers, then output shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvcompile.config import UsageError
from kvcompile.ops.w4a8 import W4A8Weight, quantize
from kvcompile.shards import INDEX
from kvcompile.tools import quantize_calibrate
from kvcompile.tools.quantize_model import LayerwiseModel, windows
from kvcompile.tools.quantize_output import LAYER_SUFFIX, Entry, Workspace, stored_bytes
from kvcompile.tools.quantize_progress import Advance
from kvcompile.tools.quantize_report import Row, linear_row
from kvcompile.tools.quantize_search import search
from kvcompile.tools.quantize_source import Source, TensorFiles

WINDOW = 512  # tokens of calibration text that see each other

_WITHOUT_DATA = {"rtn": quantize, "search": search}
# For the time left, and only roughly: what a weight takes, in bytes that are copied meanwhile; and what a layer takes
# to be calibrated, in runs of both streams through it.
_WEIGHT_WORK = {"rtn": 150, "search": 3000}
_LAYER_WORK = 5


@dataclass(frozen=True)
class Job:
    """What is to be made: `group_size` as asked for ("128", "64", "channel"), `group_sizes` by input width."""

    source: Source
    method: str
    group_size: str
    group_sizes: dict[int, int]

    def entries(self, shard: str) -> list[Entry]:
        """The tensors of an output shard: those of the source, each quantised weight as its four parts."""
        entries = []
        for name, (dtype, shape) in self.source.shards[shard].items():
            linear = name.removesuffix(".weight")
            entries += self.parts(linear) if linear in self.source.linears else [(name, dtype, shape)]
        return entries

    def parts(self, linear: str) -> list[Entry]:
        """The tensors that take the place of a linear's weight."""
        rows, width = self.source.linears[linear]
        groups = width // self.group_sizes[width]
        shapes = ((rows, width // 2), (rows, groups), (rows, groups), (rows,))
        dtypes = ("U8", "U8", "U8", "F32")
        fields = W4A8Weight._fields
        return [(f"{linear}.{field}", *kind) for field, *kind in zip(fields, dtypes, shapes, strict=True)]

    def tensor_bytes(self) -> tuple[int, int]:
        """Of all tensors, before and after."""
        shards = self.source.shards
        before = sum(stored_bytes(*kind) for tensors in shards.values() for kind in tensors.values())
        return before, sum(stored_bytes(*kind) for shard in shards for _, *kind in self.entries(shard))

    def disk_bytes(self) -> int:
        """What OUT.part takes at most, with room for headers and reports."""
        size = self.tensor_bytes()[1] + sum(file.stat().st_size for file in self.source.side_files()) + (1 << 20)
        if self.method == "gptq":
            size += sum(stored_bytes(*kind) for linear in self.source.linears for _, *kind in self.parts(linear))
        return size

    def quantization_config(self) -> dict[str, Any]:
        """What vLLM reads from config.json."""
        return {
            "quant_method": "kvcompile_w4a8",
            "format": 1,
            "group_size": self.group_size if self.group_size == "channel" else int(self.group_size),
            "group_sizes": {str(width): size for width, size in self.group_sizes.items()},
            "method": self.method,
            "modules_to_not_convert": [],
        }


def layers_work(job: Job, workspace: Workspace) -> int:
    """What `calibrate_layers` will tell `advance` in all."""
    return sum(1 if workspace.done(layer_file(i)) else _LAYER_WORK for i in range(job.source.layers))


def shards_work(job: Job, workspace: Workspace) -> int:
    """What `write_shards` will tell `advance` in all."""
    shards = job.source.shards.items()
    return sum(_work(job, *tensor) for shard, some in shards if not workspace.done(shard) for tensor in some.items())


def _work(job: Job, name: str, kind: tuple[str, tuple[int, ...]]) -> int:
    """Of one tensor of a shard, in bytes copied."""
    shape = job.source.linears.get(name.removesuffix(".weight"))
    if shape is None or job.method not in _WEIGHT_WORK:
        return stored_bytes(*kind)
    return _WEIGHT_WORK[job.method] * shape[0] * shape[1]


def calibrate_layers(job: Job, workspace: Workspace, tokens: list[int], advance: Advance) -> None:
    """Quantise layer by layer, each to a file of its own; layers that are done are only run.

    Raises UsageError, naming the layer, for a text on which the model's numbers overflow.
    """
    source = job.source
    model = LayerwiseModel(source.path, source.read, source.names)
    streams = quantize_calibrate.Streams(model.embed(windows(tokens, WINDOW)))
    for index in range(source.layers):
        layer, prefix, file = model.layer(index), f"model.layers.{index}.", layer_file(index)
        work = 1 if workspace.done(file) else _LAYER_WORK
        if workspace.done(file):
            files = TensorFiles(workspace.path, [file])
            linears = [name for name in source.linears if name.startswith(prefix)]
            weights = {name.removeprefix(prefix): read_linear(files, name) for name in linears}
            streams.advance(model, layer, quantize_calibrate.quantised_layer(layer, weights))
        else:
            try:
                done = quantize_calibrate.calibrate(model, layer, streams, job.group_sizes.__getitem__)
            except quantize_calibrate.NotFinite as error:
                raise UsageError(
                    f"SRC {source.path}: decoder layer {index} cannot be calibrated: {error}; get the checkpoint "
                    "again, or use --method search, which runs no text"
                ) from error
            rows = [
                linear_row(prefix + part, layer.get_submodule(part).weight, *result) for part, result in done.items()
            ]
            entries = [entry for part in done for entry in job.parts(prefix + part)]
            workspace.write_tensors(file, entries, (tensor for result in done.values() for tensor in result.weight))
            workspace.finish(file, rows)
        advance(work)


def write_shards(job: Job, workspace: Workspace, advance: Advance) -> None:
    """Write every output shard that is not done yet; `advance` is told the work, by `shards_work`."""
    calibrated = None
    if job.method == "gptq":
        calibrated = TensorFiles(workspace.path, [layer_file(index) for index in range(job.source.layers)])
    for shard in job.source.shards:
        if workspace.done(shard):
            continue
        rows: list[Row] = []
        workspace.write_tensors(shard, job.entries(shard), _tensors(job, shard, calibrated, rows, advance))
        workspace.finish(shard, rows)


def write_rest(job: Job, workspace: Workspace) -> None:
    """config.json, the index if there are several shards, and the files that go with the weights."""
    for file in job.source.side_files():
        workspace.copy(file, str(file.relative_to(job.source.path)))
    workspace.write_json("config.json", {**job.source.config, "quantization_config": job.quantization_config()})
    if len(job.source.shards) > 1:
        where = {name: shard for shard in job.source.shards for name, *_ in job.entries(shard)}
        workspace.write_json(INDEX, {"metadata": {"total_size": job.tensor_bytes()[1]}, "weight_map": where})


def layer_file(index: int) -> str:
    """The file of OUT.part that holds a calibrated layer until the shards are written."""
    return f"layer-{index:04}{LAYER_SUFFIX}"


def read_linear(files: TensorFiles, linear: str) -> W4A8Weight:
    return W4A8Weight(*(files.read(f"{linear}.{field}") for field in W4A8Weight._fields))


def _tensors(
    job: Job, shard: str, calibrated: TensorFiles | None, rows: list[Row], advance: Advance
) -> Iterator[Tensor]:
    """The tensors of an output shard in the order of its entries; reports the linears that are quantised here."""
    quantise: Callable[[Tensor, int], W4A8Weight] | None = _WITHOUT_DATA.get(job.method)
    for name, kind in job.source.shards[shard].items():
        linear = name.removesuffix(".weight")
        if linear not in job.source.linears:
            yield job.source.read(name)
        elif calibrated is not None:
            yield from read_linear(calibrated, linear)
        else:
            weight = job.source.read(name)
            quantised = quantise(weight, job.group_sizes[weight.shape[1]])
            rows.append(linear_row(linear, weight, quantised))
            yield from quantised
        advance(_work(job, name, kind))
