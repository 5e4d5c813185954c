"""GPTQ (Frantar et al., ICLR 2023) on the two-level W4A8 grid, for one linear layer.

Minimises tr((W - Q) H (W - Q)^T): the error of the layer's outputs on calibration inputs whose second moments are H.
Columns are rounded one after the other, and each rounding error is made up for by the columns that follow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcompile.ops.w4a8 import W4A8Weight
from kvcompile.tools.quantize_search import channel_scale, encode, group_parameters, pack_codes

DAMPING = 0.01  # of the mean diagonal of H, added to the diagonal
SWEEPS = 2  # rounds of coordinate descent after GPTQ's single pass
_BLOCK = 128  # columns between two updates of all the columns that follow


def solve(
    weight: Tensor, hessian: Tensor, group_size: int, *, damping: float = DAMPING, sweeps: int = SWEEPS
) -> W4A8Weight:
    """Quantise `weight`, float [N, K], for inputs with second moments `hessian`, float [K, K] (any positive scale).

    s1 is found first and fixed; s2 and z of a group are searched when the pass arrives at it, on weights that already
    make up for the columns before. Then each code is set anew to the best one given all others (coordinate descent),
    and s1 is refitted. A column of zeros in `hessian` (an input that was never active) is rounded to nearest. The
    arguments are not changed.
    """
    weight = weight.detach().float()
    hessian = _damped(hessian, damping)
    scale = channel_scale(weight, group_size, hessian.diagonal())
    units = weight / scale[:, None]
    codes, s2, z = _pass(units.clone(), _inverse_root(hessian), group_size)
    step, zero = (part.repeat_interleave(group_size, 1) for part in (s2, z))
    for _ in range(sweeps):
        _sweep(units, codes, step, zero, hessian)
    scale = _refit(weight, (codes - zero) * step, hessian, scale)
    return W4A8Weight(pack_codes(codes.to(torch.uint8)), s2.to(torch.uint8), z.to(torch.uint8), scale)


def _damped(hessian: Tensor, damping: float) -> Tensor:
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if not dead.all() else torch.ones((), device=hessian.device)
    diagonal[dead] = mean  # its row and column are zero: nothing is propagated from or to it
    diagonal += damping * mean
    return hessian


def _inverse_root(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U = H^-1; in float64, as H may be nearly singular."""
    root = torch.linalg.cholesky(hessian.double())
    return torch.linalg.cholesky(torch.cholesky_inverse(root), upper=True).float()


def _pass(units: Tensor, root: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ's pass over the columns of `units`, which it uses up. Codes [N, K], s2 and z [N, G], all float."""
    columns = units.shape[1]
    codes = torch.empty_like(units)
    s2, z = (units.new_empty(len(units), columns // group_size) for _ in range(2))
    importance = root.diagonal().square().reciprocal()
    block = math.gcd(_BLOCK, group_size)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        group = start // group_size
        if start % group_size == 0:
            whole = slice(start, start + group_size)
            s2[:, group], z[:, group] = group_parameters(units[:, whole].T.contiguous(), importance[whole, None])
        step, zero = s2[:, group], z[:, group]
        errors = units.new_empty(len(units), end - start)
        for column in range(start, end):
            code = encode(units[:, column], step, zero)
            error = (units[:, column] - (code - zero) * step) / root[column, column]
            units[:, column:end].addr_(error, root[column, column:end], alpha=-1)
            codes[:, column], errors[:, column - start] = code, error
        units[:, end:].addmm_(errors, root[start:end, end:], alpha=-1)
    return codes, s2, z


def _sweep(units: Tensor, codes: Tensor, step: Tensor, zero: Tensor, hessian: Tensor) -> None:
    """Set each code, in place, to the best one while all others stay: column by column, all rows at once."""
    gradient = (units - (codes - zero) * step) @ hessian
    columns = units.shape[1]
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        moves = units.new_empty(len(units), end - start)
        for column in range(start, end):
            s2, z = step[:, column], zero[:, column]
            now = (codes[:, column] - z) * s2
            code = encode(now + gradient[:, column] / hessian[column, column], s2, z)
            move = (code - z) * s2 - now
            gradient[:, column:end].addr_(move, hessian[column, column:end], alpha=-1)
            codes[:, column], moves[:, column - start] = code, move
        gradient[:, end:].addmm_(moves, hessian[start:end, end:], alpha=-1)


def _refit(weight: Tensor, units: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    weighted = units @ hessian
    norm = (weighted * units).sum(1)
    fitted = (weighted * weight).sum(1) / norm
    return torch.where((norm > 0) & (fitted > 0), fitted, scale)
