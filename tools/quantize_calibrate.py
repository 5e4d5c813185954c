"""Calibration of one decoder layer: GPTQ of its linears on what they will really see in the quantised model.

Two streams of hidden states run through the model side by side: the exact ones, and those of the model as quantised so
far, with int8 activations. A linear is fitted so that its output on the second comes close to that of the float linear
on the first (GPTAQ, Li et al., 2025): later layers make up for what earlier ones have lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcompile.ops.w4a8 import W4A8Weight, dequantize
from kvcompile.tools.quantize_gptq import damped, solve
from kvcompile.tools.quantize_model import ATTENTION, ATTENTION_OUT, MLP, MLP_OUT, LayerwiseModel, batches, replace


class NotFinite(ArithmeticError):
    """The text's hidden states, or their second moments, leave float32; the message says where."""


class Calibrated(NamedTuple):
    """A quantised linear, and the relative error of its outputs on the calibration text."""

    weight: W4A8Weight
    output_error: float


class Streams:
    """Hidden states [windows, tokens, hidden] of the calibration text: exact, and as quantised so far."""

    def __init__(self, embedded: Tensor) -> None:
        self.exact, self.quantised = embedded, embedded.clone()

    def advance(self, model: LayerwiseModel, layer: nn.Module, quantised: nn.Module) -> None:
        """Run both streams through a layer that was calibrated before."""
        for part in batches(self.exact):
            self.exact[part] = model.forward(layer, self.exact[part])
            self.quantised[part] = model.forward(quantised, self.quantised[part])


class QuantisedLinear(nn.Module):
    """y = dequantised weight times the input rounded to int8 per token: W4A8 in float32, to its rounding."""

    def __init__(self, weight: W4A8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = dequantize(weight), bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(rounded(x), self.weight, self.bias)


def rounded(x: Tensor) -> Tensor:
    """`x` as its int8 form with one scale per token (row) stands for."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x / scale).round_().mul_(scale)


def quantised_layer(layer: nn.Module, weights: dict[str, W4A8Weight]) -> nn.Module:
    """A copy of `layer` with the linears named in `weights` quantised; what stays is shared with the original."""
    result = copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()})
    for name, weight in weights.items():
        replace(result, name, QuantisedLinear(weight, layer.get_submodule(name).bias))
    return result


def calibrate(
    model: LayerwiseModel, layer: nn.Module, streams: Streams, group_size: Callable[[int], int]
) -> dict[str, Calibrated]:
    """Quantise the linears of `layer` in the order of the data, and move both streams behind the layer.

    `group_size(in_features)` gives the group of a linear. Raises NotFinite where the text makes the model overflow.
    """
    exact, quantised = streams.exact, streams.quantised
    target = quantised_layer(layer, {})
    done: dict[str, Calibrated] = {}

    def fit(names: tuple[str, ...], inputs: Tensor, exact_inputs: Tensor) -> None:
        try:
            moments = _Moments(inputs, exact_inputs)
        except NotFinite as error:
            raise NotFinite(f"{error} of {', '.join(names)}") from error
        for name in names:
            linear = layer.get_submodule(name)
            weight = solve(moments.corrected(linear.weight), moments.hessian, group_size(linear.in_features))
            replace(target, name, QuantisedLinear(weight, linear.bias))
            error = _output_error(linear, target.get_submodule(name), inputs, exact_inputs)
            done[name] = Calibrated(weight, error)

    def finish(name: str, run: Callable[[nn.Module, Tensor], Tensor], inputs: Tensor, exact_inputs: Tensor) -> None:
        """Fit the last linear of a block, which `run` computes, and add the block's output to both streams."""
        inputs, exact_inputs = _inputs_of(name, run, target, inputs), _inputs_of(name, run, layer, exact_inputs)
        fit((name,), inputs, exact_inputs)
        exact.add_(layer.get_submodule(name)(exact_inputs))
        quantised.add_(target.get_submodule(name)(inputs))

    normed = target.input_layernorm(quantised), layer.input_layernorm(exact)
    fit(ATTENTION, *normed)
    finish(ATTENTION_OUT, model.attend, *normed)
    normed = target.post_attention_layernorm(quantised), layer.post_attention_layernorm(exact)
    fit(MLP, *normed)
    finish(MLP_OUT, lambda part, x: part.mlp(x), *normed)
    if not all(bool(torch.isfinite(stream).all()) for stream in (exact, quantised)):
        raise NotFinite("the text gives hidden states beyond float32 behind it")
    return done


class _Moments:
    """Second moments of a linear's inputs, rounded to int8, and of what the exact inputs have beyond them."""

    def __init__(self, inputs: Tensor, exact: Tensor) -> None:
        width = inputs.shape[-1]
        self.hessian, self._cross = (inputs.new_zeros(width, width) for _ in range(2))
        for part in batches(inputs):
            seen = rounded(inputs[part].flatten(0, 1))
            self.hessian.addmm_(seen.T, seen)
            self._cross.addmm_(seen.T, exact[part].flatten(0, 1) - seen)
        # The damping of the rounding is the ridge that keeps the correction from fitting the text's peculiarities.
        ridged = damped(self.hessian)
        if not bool(torch.isfinite(ridged).all() and torch.isfinite(self._cross).all()):
            raise NotFinite("the text gives squares beyond float32 at the inputs")
        self._root = torch.linalg.cholesky(ridged.double())

    def corrected(self, weight: Tensor) -> Tensor:
        """The float weight whose outputs on the inputs come closest to those of `weight`, [N, K], on the exact ones."""
        missing = (self._cross @ weight.T).double()
        return weight + torch.cholesky_solve(missing, self._root).float().T


def _inputs_of(name: str, run: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module, x: Tensor) -> Tensor:
    """What the linear `name`, the last of the block that `run` computes from `x`, gets to see."""
    linear = layer.get_submodule(name)
    replace(layer, name, nn.Identity())
    inputs = torch.cat([run(layer, x[part]) for part in batches(x)])
    replace(layer, name, linear)
    return inputs


def _output_error(linear: nn.Module, quantised: nn.Module, inputs: Tensor, exact: Tensor) -> float:
    """|Y - Y'| / |Y| (Frobenius): Y of the float linear on exact inputs, Y' of the quantised one on its own inputs."""
    lost = whole = 0.0
    for part in batches(inputs):
        wanted = linear(exact[part])
        lost += _squares(quantised(inputs[part]) - wanted)
        whole += _squares(wanted)
    return (lost / whole) ** 0.5 if whole else 0.0


def _squares(values: Tensor) -> float:
    """The sum of squares, in float64: those of a float32 tensor may be beyond float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square().item()
