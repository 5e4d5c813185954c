"""What of a layer the checkpoint has delivered: wrong tensors are refused as they come, missing ones at the end.

vLLM itself checks neither for a quantised checkpoint: a tensor that never came is whatever memory held before, one of
another dtype is converted, one with rows to spare is cut, and one that is too small is an assertion without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

from kvcompile.config import UsageError

_POSITION = {"q": 0, "k": 1, "v": 2}  # vLLM's names of the parts of a qkv linear; those of others are numbers

_NAMED = 3  # of the missing tensors, in a message


def refuse_missing(names: Sequence[str]) -> None:
    """Raise UsageError if there are `names`, of tensors that the checkpoint should have."""
    if names:
        some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        raise UsageError(f"the checkpoint has no tensor {some}; it is incomplete, quantise or copy it anew")


def part_rows(layer: LinearBase) -> list[int]:
    """Output channels, over all ranks, of each tensor that vLLM merges into `layer`; of a plain layer its own."""
    if isinstance(layer, QKVParallelLinear):  # its `output_sizes` count a KV head once per rank that repeats it
        kv_heads = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", (layer.output_size,)))


class Arrivals:
    """The tensors of one linear layer, which vLLM may have merged from several of the checkpoint.

    `parts`: the checkpoint's own names of what was merged, where known; `rows`: output channels of each over all ranks
    (`part_rows`), one entry for a plain layer.
    """

    def __init__(self, layer: str, parts: Sequence[str], rows: Sequence[int]) -> None:
        self._layer, self._parts, self._rows = layer, list(parts), list(rows)
        self._seen: dict[str, set[int]] = {}

    def loader(
        self, name: str, weight_loader: MethodType, dtype: torch.dtype | None, columns: int | None
    ) -> MethodType:
        """`weight_loader`, a method of the layer, for the tensor `name`, with a look at what it is given.

        `dtype` and `columns` (second dimension before any sharding; None for a vector): what the checkpoint must have;
        dtype None is any float. The result is a method of the layer too: vLLM keeps loaders for a later reload and
        takes the layer out of such methods, and of nothing else, so that a deleted model can be freed.
        """
        self._seen[name] = set()
        plain = weight_loader.__func__

        @functools.wraps(plain)
        def load(
            layer: torch.nn.Module, param: torch.nn.Parameter, loaded_weight: torch.Tensor, *rest: Any, **named: Any
        ) -> None:
            shard = rest[0] if rest else named.get("loaded_shard_id")
            self._refuse_other(name, shard, loaded_weight, dtype, columns)
            plain(layer, param, loaded_weight, *rest, **named)
            self._seen[name].update(self._positions(shard))

        return MethodType(load, weight_loader.__self__)

    def names(self) -> list[str]:
        """What the checkpoint should have of the layer, such as qweight."""
        return list(self._seen)

    def refuse_missing(self) -> None:
        """Raise UsageError naming the first tensors that should have come and did not. Counting then starts again."""
        refuse_missing(self.missing())
        for seen in self._seen.values():
            seen.clear()

    def missing(self) -> list[str]:
        """Full names, in the checkpoint, of the tensors that have not come yet."""
        return [
            f"{self._name(position)}.{name}"
            for name, seen in self._seen.items()
            for position in range(len(self._rows))
            if position not in seen
        ]

    def _refuse_other(
        self, name: str, shard: Any, given: torch.Tensor, dtype: torch.dtype | None, columns: int | None
    ) -> None:
        right_dtype = given.dtype == dtype if dtype is not None else given.dtype.is_floating_point
        shape, positions = list(given.shape), self._positions(shard)
        rows = sum(self._rows[position] for position in positions)
        wanted = [rows] if columns is None else [rows, columns]
        if right_dtype and shape == wanted:
            return
        position = positions[0] if len(positions) == 1 else None
        raise UsageError(
            f"tensor {self._name(position)}.{name} is {given.dtype} {shape}; by the checkpoint's config.json it is "
            f"{dtype or 'of a float type'} {wanted}; the two do not belong together, quantise the model anew"
        )

    def _positions(self, shard: Any) -> list[int]:
        """The parts that a tensor is for: `shard` is vLLM's name of one, a tuple of names, or None for all."""
        if shard is None:
            return list(range(len(self._rows)))
        return [_POSITION.get(s, s) for s in (shard if isinstance(shard, tuple) else (shard,))]

    def _name(self, position: int | None) -> str:
        if position is None or position >= len(self._parts):
            return self._layer
        return f"{self._layer.rpartition('.')[0]}.{self._parts[position]}"
