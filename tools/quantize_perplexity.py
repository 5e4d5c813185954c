"""Perplexity of a checkpoint folder on a text, and of a W4A8 one with the operators that serve it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvcompile.config import UsageError
from kvcompile.ops.act_quant import quant_per_token
from kvcompile.ops.w4a8 import W4A8Weight, pack, w4a8_linear
from kvcompile.tools.quantize_model import LINEARS, LayerwiseModel, batches, log_held_back, replace, windows
from kvcompile.tools.quantize_source import TensorFiles

WINDOW = 512  # tokens

Advance = Callable[[int], None]  # told 1 after each layer


class W4A8Linear(nn.Module):
    """A linear run by the operators: activations to int8 per token, exact int32 sums. Float32 in and out."""

    def __init__(self, weight: W4A8Weight, bias: Tensor | None) -> None:
        super().__init__()
        self._tiles, self._group_params = pack(weight)
        self._scales, self._bias = weight.channel_scales, bias

    def forward(self, x: Tensor) -> Tensor:
        x_q, x_scale = quant_per_token(x.flatten(0, -2))
        y = w4a8_linear(x_q, x_scale, self._tiles, self._group_params, self._scales, self._bias, torch.float32)
        return y.unflatten(0, x.shape[:-1])


class Comparison(NamedTuple):
    """Mean nats per token before and after, and their difference with its standard error over windows.

    Not finite for a model that overflows on the text; `as_json` then has null.
    """

    tokens: int
    before: float
    after: float
    difference: float
    standard_error: float | None  # None for a text of one window

    def as_json(self) -> dict[str, Any]:
        perplexities = {"perplexity_before": _exp(self.before), "perplexity_after": _exp(self.after)}
        numbers = {**self._asdict(), **perplexities, "window_tokens": WINDOW}
        # JSON knows neither NaN nor infinity.
        return {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()}


def tokens_of(file: Path, checkpoint: Path, flag: str, vocabulary: int, limit: int | None = None) -> list[int]:
    """The ids of a text file, at most `limit` of them.

    Raises UsageError, naming `flag`, for a tokenizer that does not work, too short a text, and ids that are not below
    `vocabulary`.
    """
    from transformers import AutoTokenizer

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {file} cannot be read as UTF-8 text: {error}; give a plain text file") from error
    try:
        with log_held_back():
            tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
            ids = list(tokenizer(text, verbose=False)["input_ids"][:limit])
    except Exception as error:  # whatever goes wrong in there is the tokenizer's doing
        why = " ".join(str(error).split())
        if not isinstance(error, (OSError, ValueError)):  # such as KeyError, whose text is the key alone
            why = f"{type(error).__name__}: {why}"
        raise UsageError(
            f"{flag}: the tokenizer of {checkpoint} cannot be loaded ({why}); copy the tokenizer files of the original "
            "checkpoint into it (tokenizer.json, tokenizer_config.json, ...)"
        ) from error
    if len(ids) < WINDOW:
        raise UsageError(f"{flag} {file} holds {len(ids)} tokens; at least {WINDOW} are needed; give a longer text")
    if max(ids) >= vocabulary:
        raise UsageError(
            f"{flag}: the tokenizer of {checkpoint} gives the id {max(ids)}; by vocab_size in config.json the model "
            f"has 0 to {vocabulary - 1}; the two do not belong together, get the checkpoint again"
        )
    return ids


def losses(checkpoint: Path, files: TensorFiles, tokens: list[int], advance: Advance) -> Tensor:
    """Nats of each token but a window's first, [windows, WINDOW - 1]; linears that `files` has as W4A8 run as such."""
    model = LayerwiseModel(checkpoint, files.read, files.names)
    ids = windows(tokens, WINDOW)
    hidden = model.embed(ids)
    for index in range(model.layers):
        quantised = {part: f"model.layers.{index}.{part}" for part in LINEARS}
        quantised = {part: name for part, name in quantised.items() if f"{name}.qweight" in files.names}
        layer = model.layer(index, without=frozenset(quantised))
        for part, name in quantised.items():
            weight = W4A8Weight(*(files.read(f"{name}.{field}") for field in W4A8Weight._fields))
            bias = files.read(f"{name}.bias").float() if f"{name}.bias" in files.names else None
            replace(layer, part, W4A8Linear(weight, bias))
        for some in batches(hidden):
            hidden[some] = model.forward(layer, hidden[some])
        advance(1)
    return model.losses(hidden, ids)


def compare(before: Tensor, after: Tensor) -> Comparison:
    """Of the losses of the same text, [windows, tokens]."""
    difference = (after - before).double().mean(1)
    error = (difference.std() / len(difference) ** 0.5).item() if len(difference) > 1 else None
    means = (part.double().mean().item() for part in (before, after))
    return Comparison(before.numel(), *means, difference.mean().item(), error)


def told(comparison: Comparison) -> str:
    """The comparison in a line."""
    error = "" if comparison.standard_error is None else f" +- {comparison.standard_error:.4f}"
    return (
        f"perplexity on {comparison.tokens} tokens: {_exp(comparison.before):.3f} before, "
        f"{_exp(comparison.after):.3f} after; {comparison.before:.4f} and {comparison.after:.4f} nats per token, "
        f"difference {comparison.difference:+.4f}{error}"
    )


def _exp(nats: float) -> float:
    """e^nats; infinity where a float does not hold it, NaN of NaN: a model that overflows has such a loss."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
