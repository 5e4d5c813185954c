"""A model with W4A8 linears is served only if the checkpoint had every tensor of it, and none beside.

vLLM asks that of unquantised models only, and even there neither of embeddings nor of the bias of a linear. What never
came would be whatever the memory held before. The W4A8 weights themselves are counted in `linear_loading`; here it is
everything else: norms, embeddings, lm_head, biases, and linears that the checkpoint leaves as they were. A tensor that
the model has no place for is a KeyError in vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import linear_report
from kvcompile.integrations.vllm.active import W4A8_QUANTIZATION
from kvcompile.integrations.vllm.linear_loading import Arrivals, part_rows, refuse_missing

# Those that read a checkpoint of Hugging Face. The others read whole states of a model that vLLM wrote.
_LOADERS = (DefaultModelLoader, RunaiModelStreamerLoader)
_MARK = "_kvcompile_refuses_incomplete"

LoadWeights = Callable[[Any, torch.nn.Module, ModelConfig], None]


def install() -> None:
    """Wrap vLLM's loaders in this process. Idempotent; without effect on models of another quantisation."""
    for loader in _LOADERS:
        if not hasattr(loader.load_weights, _MARK):
            loader.load_weights = refusing_incomplete(loader.load_weights)


def refusing_incomplete(load_weights: LoadWeights) -> LoadWeights:
    """`load_weights` of a loader of vLLM, which then raises UsageError naming the first tensors that did not come.

    And naming one that the model has no place for, as soon as it comes.
    """

    @functools.wraps(load_weights)
    def wrapped(self: Any, model: torch.nn.Module, model_config: ModelConfig) -> None:
        if model_config.quantization != W4A8_QUANTIZATION:
            return load_weights(self, model, model_config)
        with _watched_linears(model) as arrivals, _names_loaded(model) as loaded:
            load_weights(self, model, model_config)
        refuse_missing(_missing(model, arrivals, loaded))
        linear_report.say_what_was_quantised(model)

    setattr(wrapped, _MARK, True)
    return wrapped


@contextmanager
def _watched_linears(model: torch.nn.Module) -> Iterator[dict[str, Arrivals]]:
    """Name of a parameter -> what has come for it, for whatever of a linear its own method does not watch.

    vLLM counts a parameter as loaded as soon as one of the tensors that it is merged from has come.
    """
    arrivals: dict[str, Arrivals] = {}
    loaders = []
    for prefix, layer in model.named_modules():
        for name, parameter in _watchable(layer):
            parts = layer.quant_config.packed_modules_mapping.get(layer.prefix.rpartition(".")[2], ())
            watch = Arrivals(layer.prefix, parts, part_rows(layer))
            loaders.append((parameter, parameter.weight_loader))
            columns = layer.input_size if name == "weight" else None
            parameter.weight_loader = watch.loader(name, parameter.weight_loader, None, columns)
            arrivals[f"{prefix}.{name}"] = watch
    try:
        yield arrivals
    finally:
        for parameter, loader in loaders:
            parameter.weight_loader = loader


def _watchable(layer: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if isinstance(layer, LinearBase) and layer.quant_config is not None:
        for name, parameter in layer.named_parameters(recurse=False):
            loaded_by_layer = isinstance(getattr(parameter, "weight_loader", None), MethodType)
            if loaded_by_layer and (name == "bias" or (name == "weight" and not _is_w4a8(layer))):
                yield name, parameter


def _is_w4a8(layer: torch.nn.Module) -> bool:
    return hasattr(getattr(layer, "quant_method", None), "arrivals")


@contextmanager
def _names_loaded(model: torch.nn.Module) -> Iterator[set[str]]:
    """What `model.load_weights` returns while inside: the names of the parameters that it wrote."""
    load_weights = model.load_weights
    loaded: set[str] = set()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        last = ""

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for name, tensor in weights:
                last = name
                yield name, tensor

        try:
            names = load_weights(noted())
        except KeyError as error:
            said = _extra(model, last, str(error.args[0]))
            if said is None:
                raise
            raise UsageError(said) from None
        # A few models, none of those that the preset serves, do not say; as in vLLM itself they are believed.
        loaded.update((name for name, _ in model.named_parameters()) if names is None else names)
        return names

    model.load_weights = load
    try:
        yield loaded
    finally:
        del model.load_weights  # the class has its own


def _extra(model: torch.nn.Module, tensor: str, parameter: str) -> str | None:
    """What to say if vLLM found no `parameter` for the `tensor` of the checkpoint; None if it looked for another key.

    `parameter` has the name of a merged layer, and not what comes before the decoder.
    """
    path, _, name = parameter.rpartition(".")
    if not path or name != tensor.rpartition(".")[2]:
        return None
    layer = next((layer for prefix, layer in model.named_modules() if f".{prefix}".endswith(f".{path}")), None)
    if layer is None:
        allowed = "the model has no such layer"
    else:
        own = layer.quant_method.arrivals.names() if _is_w4a8(layer) else []
        biases = [other for other, _ in layer.named_parameters(recurse=False) if not own or other == "bias"]
        allowed = f"allowed for this layer are {', '.join([*own, *biases]) or 'none'}"
    return (
        f"the checkpoint has a tensor {tensor} that its config.json has no place for; {allowed}; remove the tensor, or "
        "quantise the model anew"
    )


def _missing(model: torch.nn.Module, arrivals: dict[str, Arrivals], loaded: set[str]) -> list[str]:
    """Names in the order of the model. Of a parameter that has two (tied embeddings), either is enough."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if name == "bias" or not _is_w4a8(layer):
                names.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    missing: list[str] = []
    for known_as in names.values():
        if known_as[0] in arrivals:
            missing += arrivals[known_as[0]].missing()
        elif loaded.isdisjoint(known_as):
            missing.append(known_as[0])
    return missing
