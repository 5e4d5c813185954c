"""GPTQ (Frantar et al., ICLR 2023) on the two-level W4A8 grid, for one linear layer.

Minimises tr((W - Q) H (W - Q)^T): the error of the layer's outputs on calibration inputs whose second moments are H.
Columns are rounded one after the other, and each rounding error is made up for by the columns that follow.

Of what one text shows, the sizes of the inputs hold on another, their correlations only in part, and making up for
errors by those that do not adds error. So each diagonal element of H is damped in proportion to itself: next to a
channel hundreds of times the mean, damping that is the same for all channels does nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcompile.ops.w4a8 import W4A8Weight
from kvcompile.tools.quantize_search import channel_scale, encode, group_parameters, pack_codes

DAMPING = 1.0  # of each diagonal element of H, added to it
_FLOOR = 0.01  # of the mean diagonal of H, added to all of it
SWEEPS = 2  # rounds of coordinate descent after GPTQ's single pass
_BLOCK = 64  # columns between two updates of all the columns that follow


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
    hessian = damped(_scaled(hessian), damping)
    scale = channel_scale(weight, group_size, hessian.diagonal())
    units = (weight / scale[:, None]).T.contiguous()
    codes, s2, z = _pass(units.clone(), _inverse_root(hessian), group_size)
    step, zero = (part.repeat_interleave(group_size, 0) for part in (s2, z))
    for _ in range(sweeps):
        _sweep(units, codes, step, zero, hessian)
    scale = _refit(weight, ((codes - zero) * step).T, hessian, scale)
    codes, s2, z = (part.T.to(torch.uint8).contiguous() for part in (codes, s2, z))
    return W4A8Weight(pack_codes(codes), s2, z, scale)


def damped(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """`hessian` plus `damping` times its diagonal and a floor: positive definite, and of use beyond its text."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if not dead.all() else torch.ones((), device=hessian.device)
    diagonal[dead] = mean  # its row and column are zero: nothing is propagated from or to it
    diagonal += damping * diagonal + _FLOOR * mean
    return hessian


def _scaled(hessian: Tensor) -> Tensor:
    """`hessian` with a mean diagonal about 1, so that what it weighs stays in float32: which scale it has is free.

    A power of 4, so that neither it nor its square root rounds anything.
    """
    exponent = math.frexp(hessian.diagonal().mean().item())[1]
    return hessian * 2.0 ** -max(min(exponent // 2 * 2, 126), -126)  # a factor that float32 holds itself


def _inverse_root(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U = H^-1; in float64, as H may be nearly singular."""
    root = torch.linalg.cholesky(hessian.double())
    return torch.linalg.cholesky(torch.cholesky_inverse(root), upper=True).float()


def _pass(units: Tensor, root: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ's pass over the columns of the weight in units, [K, N]: a column is a row here, and lies in one piece.

    Uses `units` up. Codes [K, N], s2 and z [G, N], all float.
    """
    columns = len(units)
    codes = torch.empty_like(units)
    s2, z = (units.new_empty(columns // group_size, units.shape[1]) for _ in range(2))
    importance = root.diagonal().square().reciprocal()[:, None]
    block = math.gcd(_BLOCK, group_size)
    for start in range(0, columns, block):
        end, group = start + block, start // group_size
        if start % group_size == 0:
            whole = slice(start, start + group_size)
            s2[group], z[group] = group_parameters(units[whole], importance[whole])
        errors = units.new_empty(block, units.shape[1])
        for column in range(start, end):
            code = encode(units[column], s2[group], z[group])
            error = (units[column] - (code - z[group]) * s2[group]) / root[column, column]
            units[column:end].addr_(root[column, column:end], error, alpha=-1)
            codes[column], errors[column - start] = code, error
        units[end:].addmm_(root[start:end, end:].T, errors, alpha=-1)
    return codes, s2, z


def _sweep(units: Tensor, codes: Tensor, step: Tensor, zero: Tensor, hessian: Tensor) -> None:
    """Set each code, in place, to the best one while all others stay: column by column. All are [K, N]."""
    gradient = hessian @ (units - (codes - zero) * step)
    columns = len(units)
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        moves = units.new_empty(end - start, units.shape[1])
        for column in range(start, end):
            s2, z = step[column], zero[column]
            now = (codes[column] - z) * s2
            code = encode(now + gradient[column] / hessian[column, column], s2, z)
            move = (code - z) * s2 - now
            gradient[column:end].addr_(hessian[column, column:end], move, alpha=-1)
            codes[column], moves[column - start] = code, move
        gradient[end:].addmm_(hessian[start:end, end:].T, moves, alpha=-1)


def _refit(weight: Tensor, units: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    weighted = units @ hessian
    norm = (weighted * units).sum(1)
    fitted = (weighted * weight).sum(1) / norm
    return torch.where((norm > 0) & (fitted > 0), fitted, scale)
