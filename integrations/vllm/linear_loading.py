"""What of a layer the checkpoint has delivered: wrong tensors are refused as they come, missing ones at the end.

vLLM itself checks neither for a quantised checkpoint: a tensor that never came is whatever memory held before, one of
another dtype is converted, and one of another shape is an assertion without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch

from kvcompile.config import UsageError

_POSITION = {"q": 0, "k": 1, "v": 2}  # vLLM's names of the parts of a qkv linear; those of others are numbers

_NAMED = 3  # of the missing tensors, in a message


def refuse_missing(names: Sequence[str]) -> None:
    """Raise UsageError if there are `names`, of tensors that the checkpoint should have."""
    if names:
        some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        raise UsageError(f"the checkpoint has no tensor {some}; it is incomplete, quantise or copy it anew")


class Arrivals:
    """The tensors of one linear layer, which vLLM may have merged from several of the checkpoint.

    `parts`: the checkpoint's own names of what was merged, where known; `count`: how many were, 1 for a plain layer.
    """

    def __init__(self, layer: str, parts: Sequence[str], count: int) -> None:
        self._layer, self._parts, self._count = layer, list(parts), count
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
            shards = range(self._count) if shard is None else shard if isinstance(shard, tuple) else (shard,)
            self._seen[name].update(_POSITION.get(s, s) for s in shards)

        return MethodType(load, weight_loader.__self__)

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
            for position in range(self._count)
            if position not in seen
        ]

    def _refuse_other(
        self, name: str, shard: Any, given: torch.Tensor, dtype: torch.dtype | None, columns: int | None
    ) -> None:
        right_dtype = given.dtype == dtype if dtype is not None else given.dtype.is_floating_point
        shape = list(given.shape)
        if right_dtype and (len(shape) == 1 if columns is None else shape[1:] == [columns]):
            return
        position = None if shard is None or isinstance(shard, tuple) else _POSITION.get(shard, shard)
        wanted = "[N]" if columns is None else f"[N, {columns}]"
        raise UsageError(
            f"tensor {self._name(position)}.{name} is {given.dtype} {shape}; by the checkpoint's config.json it is "
            f"{dtype or 'of a float type'} {wanted}; the two do not belong together, quantise the model anew"
        )

    def _name(self, position: int | None) -> str:
        if position is None or position >= len(self._parts):
            return self._layer
        return f"{self._layer.rpartition('.')[0]}.{self._parts[position]}"
