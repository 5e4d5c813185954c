"""The checkpoint that `kvcompile quantize` reads: what it must be, and its tensors one at a time. It is not changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcompile.config import UsageError
from kvcompile.llama import ARCHITECTURES, expected, is_superfluous
from kvcompile.ops.w4a8 import legal_group
from kvcompile.shards import INDEX, announced
from kvcompile.tools.checkpoint_config import quantised_by, read_config, read_json, refuse_other_values
from kvcompile.tools.quantize_side import refuse_no_text, side_files

_FLOATS = ("BF16", "F16", "F32")
# Errors are squared and summed in float32: up to here the sum over a whole linear cannot overflow. Trained weights stay
# below 1e4.
LARGEST = 2.0**48


class TensorFiles:
    """The tensors of a folder of safetensors files: `shards` maps each file's name to its tensors, in file order."""

    def __init__(self, path: Path, files: list[str]) -> None:
        self.path = path
        self.shards: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        self._file_of: dict[str, str] = {}
        for file in files:
            with self._open(file) as handle:
                slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118, it is no mapping
                self.shards[file] = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            for name in self.shards[file]:
                if name in self._file_of:
                    raise UsageError(
                        f"{path}: tensor {name} is in {self._file_of[name]} and in {file}; "
                        f"add {INDEX}, or leave one set of shards in the folder"
                    )
                self._file_of[name] = file

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype, as safetensors writes it, and shape of a tensor."""
        return self.shards[self._file_of[name]][name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.kind(name)[1] for name in self._file_of}

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        with self._open(self._file_of[name]) as handle:
            return handle.get_tensor(name)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, "pt")
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{self.path / file} cannot be read as safetensors ({' '.join(str(error).split())}); "
                "get the checkpoint again"
            ) from error


class Source(TensorFiles):
    """An unquantised Llama-family checkpoint folder with exactly the tensors that its config.json says.

    `linears` maps the name of every linear inside the decoder layers (without ".weight") to (N, K). Raises UsageError,
    in one line, for whatever else the folder may be. Only the headers of the weight files are read.
    """

    def __init__(self, path: Path) -> None:
        self.config = _config(path)
        files, indexed = _shard_names(path)
        super().__init__(path, files)
        absent = next((name for name, file in indexed.items() if name not in self.shards[file]), None)
        if absent is not None:
            raise UsageError(
                f"{path / INDEX} has tensor {absent} in {indexed[absent]}, which does not hold it; "
                "get the checkpoint again"
            )
        self.linears: dict[str, tuple[int, int]] = {}
        allowed = set()
        for name, shape, linear in expected(self.config, f"{path / 'config.json'}"):
            self._refuse_other(name, shape, linear)
            allowed.add(name)
            if linear is not None:
                self.linears[linear] = (shape[0], shape[1])
        self.layers: int = self.config["num_hidden_layers"]
        for name in sorted(self.names - allowed):
            if not is_superfluous(name):
                raise UsageError(
                    f"SRC {path}: tensor {name} has no place in the {self.config['architectures'][0]} of config.json, "
                    f"which has {self.layers} layers; correct config.json, or get the checkpoint again"
                )
            self._refuse_other(name, self.kind(name)[1])

    def check_finite(self, advance: Callable[[int], None]) -> None:
        """Read everything once, telling `advance` the bytes.

        Raises UsageError, naming the tensor, for NaN, infinity, or a linear's weight beyond what can be calculated
        with. Ahead of the work, as a calibrated run would find out after hours.
        """
        for name in sorted(self.names):
            tensor = self.read(name)
            ends = [end.item() for end in tensor.aminmax()]  # NaN if there is one
            if not all(map(math.isfinite, ends)):
                raise UsageError(f"SRC {self.path}: tensor {name} holds NaN or infinity; get the checkpoint again")
            largest = max(map(abs, ends))
            if name.removesuffix(".weight") in self.linears and largest > LARGEST:
                raise UsageError(
                    f"SRC {self.path}: tensor {name} holds {largest:.2g}; allowed are magnitudes up to {LARGEST:.2g}, "
                    "as float32 does not hold the squares of larger ones; get the checkpoint again"
                )
            advance(tensor.nbytes)

    def group_sizes(self, wanted: int | None) -> dict[int, int]:
        """Group by input width: the largest legal one up to `wanted`, or the whole width (None)."""
        widths = {width: name for name, (_, width) in self.linears.items()}
        sizes = {}
        for width, name in sorted(widths.items()):
            try:
                sizes[width] = legal_group(width, width if wanted is None else wanted)
            except ValueError as error:
                raise UsageError(f"{self.path}: {name}.weight cannot be quantised: {error}") from error
            if wanted is None:
                sizes[width] = width
        return sizes

    def side_files(self) -> list[Path]:
        """Tokenizer and other files that go with the weights."""
        return side_files(self.path)

    def identity(self) -> dict[str, list[int]]:
        """Size and time of last change (ns) of every file that the result depends on."""
        files = [*(self.path / file for file in self.shards), self.path / "config.json", *self.side_files()]
        sizes = ((str(file.relative_to(self.path)), file.stat()) for file in files)
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in sizes}

    def _refuse_other(self, name: str, shape: tuple[int, ...], linear: str | None = None) -> None:
        """Raise UsageError unless there is a tensor `name` of that shape and of a float dtype."""
        if name not in self.names:
            parts = [] if linear is None else [n for n in self.names if n.startswith(f"{linear}.")]
            packed = min((part for part in parts if not part.endswith(".bias")), default=None)
            if packed:
                raise UsageError(f"{self.path}: holds {packed}: it is quantised already; give the original")
            raise UsageError(f"{self.path}: tensor {name} is missing from the weight files; get the checkpoint again")
        dtype, found = self.kind(name)
        if dtype not in _FLOATS:
            raise UsageError(
                f"{self.path}: tensor {name} is {dtype}; allowed are {', '.join(_FLOATS)}; give the original, "
                "unquantised checkpoint"
            )
        if found != shape:
            raise UsageError(
                f"{self.path}: tensor {name} has shape {list(found)}, by config.json it has {list(shape)}; correct "
                "config.json, or get the checkpoint again"
            )
        if 0 in shape:
            raise UsageError(f"{self.path}: tensor {name} is empty; get the checkpoint again")


def _config(path: Path) -> dict[str, Any]:
    config = read_config(path, "a Hugging Face checkpoint")
    quantised = next((key for key in ("quantization_config", "compression_config") if config.get(key)), None)
    if quantised:
        method = quantised_by(config[quantised])
        raise UsageError(f"SRC {path}: is quantised already ({quantised}: {method}); give the original checkpoint")
    refuse_other_values(config, path / "config.json", ARCHITECTURES)
    return config


def _shard_names(path: Path) -> tuple[list[str], dict[str, str]]:
    """The files that hold the weights, and the file of each tensor where an index says so.

    Those of the index; else model.safetensors; else all, which must be complete.
    """
    index: dict[str, str] = {}
    if (path / INDEX).is_file():
        index = read_json(path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
            raise UsageError(f"{path / INDEX} has no weight_map; get the checkpoint again")
        files = sorted(set(index.values()))
        if inside := next((file for file in files if Path(file).name != file), None):
            raise UsageError(
                f"{path / INDEX} names {inside}; allowed are files of the same folder; get the checkpoint again"
            )
    elif (path / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        present = {file.name for file in path.glob("*.safetensors")}
        files = sorted(present | announced(present))
    if not files:
        raise UsageError(f"SRC {path}: no safetensors file; convert the checkpoint to safetensors first")
    for file in files:
        refuse_no_text("SRC: file", path / file)
    missing = next((file for file in files if not (path / file).is_file()), None)
    if missing:
        raise UsageError(f"SRC {path}: shard {missing} is missing; get the checkpoint again")
    return files, index
