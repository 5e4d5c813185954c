"""The scales and zero points of a W4A8 checkpoint, judged before an engine is started: a few percent of its bytes.

Loading checks them again (`linear.process_weights_after_loading`), with the 4-bit codes, which are not read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from kvcompile.config import UsageError

# Field of a linear -> what is wrong, True where it is; and what is allowed.
_CHECKS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "group_scales": (lambda t: t == 0, "1 to 255"),
    "group_zeros": (lambda t: t > 15, "0 to 15"),
    "channel_scales": (lambda t: ~(torch.isfinite(t) & (t > 0)), "finite numbers above 0"),
}


def refuse_wrong(files: Iterable[Path], linears: set[str]) -> None:
    """Raise UsageError, naming the tensor and a value, unless those of `linears` hold what is allowed.

    Read tensor by tensor, from files whose headers have been judged.
    """
    for file in files:
        with safe_open(file, "pt") as handle:
            for name in sorted(handle.keys()):
                linear, _, field = name.rpartition(".")
                if field in _CHECKS and linear in linears:
                    _refuse(name, handle.get_tensor(name), *_CHECKS[field])


def _refuse(name: str, tensor: torch.Tensor, is_wrong: Callable[[torch.Tensor], torch.Tensor], allowed: str) -> None:
    wrong = is_wrong(tensor)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise UsageError(
            f"tensor {name} holds {tensor[tuple(place)].item():g} in row {place[0]}; allowed are {allowed}; the "
            "checkpoint is damaged, quantise or copy it anew"
        )
