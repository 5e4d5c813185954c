"""A checkpoint's model run one decoder layer at a time, in float32: what calibration and perplexity need.

Only the hidden states of all windows and the weights of one layer are ever in memory.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcompile.config import UsageError

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION_OUT = "self_attn.o_proj"
MLP = ("mlp.gate_proj", "mlp.up_proj")
MLP_OUT = "mlp.down_proj"
LINEARS = (*ATTENTION, ATTENTION_OUT, *MLP, MLP_OUT)

_LOGITS = 1 << 25  # logits held at once: 128 MiB

Read = Callable[[str], Tensor]


class LayerwiseModel:
    """The decoder of the checkpoint folder `path`, whose tensors `read(name)` returns.

    Raises UsageError for a config.json that transformers makes no model of.
    """

    def __init__(self, path: Path, read: Read, names: frozenset[str]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        # Whatever goes wrong in there is the config's doing: no file but config.json is read.
        try:
            with log_held_back():
                config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                config.dtype = torch.float32
                with torch.device("meta"):
                    self._model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
                # Its frequencies are computed, not loaded, and are therefore of no use on the meta device.
                self._rotary = type(self._model.model.rotary_emb)(config=config)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UsageError(
                f"{path / 'config.json'}: transformers makes no model of it ({why}); correct it"
            ) from error
        self._model.eval().requires_grad_(False)
        self._path = path
        self._read = read
        own_head = "lm_head.weight" in names and not config.tie_word_embeddings
        self._head = "lm_head.weight" if own_head else "model.embed_tokens.weight"
        self.layers = len(self._model.model.layers)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError, naming the tensor, unless `shapes` (of a checkpoint, by name) fit what config.json says."""
        wanted = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        if "lm_head.weight" not in shapes:
            wanted.pop("lm_head.weight", None)  # the embedding serves as the head
        biases = {f"model.layers.{i}.{part}.bias" for i in range(self.layers) for part in LINEARS}
        for name in sorted(wanted.keys() | (biases & shapes.keys())):
            if shapes.get(name) != wanted.get(name):
                given, asked = (list(at[name]) if name in at else "none" for at in (shapes, wanted))
                raise UsageError(
                    f"{self._path}: tensor {name} has shape {given}, by config.json it has {asked}; correct config.json"
                )

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [windows, tokens, hidden] of token ids [windows, tokens]."""
        return functional.embedding(ids, self._read("model.embed_tokens.weight")).float()

    def layer(self, index: int, without: frozenset[str] = frozenset()) -> nn.Module:
        """Decoder layer `index` with its weights in float32; it is the caller's, who lets go of it.

        The linears named in `without` have no weights: the caller replaces them.
        """
        layer = copy.deepcopy(self._model.model.layers[index])
        for part in without:
            replace(layer, part, nn.Identity())
        state = {name: self._read(f"model.layers.{index}.{name}").float() for name in layer.state_dict()}
        layer.load_state_dict(state, assign=True)
        return layer.requires_grad_(False)

    def attend(self, layer: nn.Module, normed: Tensor) -> Tensor:
        """The output of the attention block for normalised hidden states [windows, tokens, hidden]."""
        positions = torch.arange(normed.shape[1])[None]
        return layer.self_attn(normed, position_embeddings=self._rotary(normed, positions), attention_mask=None)[0]

    def forward(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """`hidden` after one decoder layer, [windows, tokens, hidden]."""
        hidden = hidden + self.attend(layer, layer.input_layernorm(hidden))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def losses(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Nats of every token but the first of its window, [windows, tokens - 1]."""
        norm = self._model.model.norm
        hidden = functional.rms_norm(
            hidden[:, :-1], hidden.shape[-1:], self._read("model.norm.weight").float(), norm.variance_epsilon
        )
        head = self._read(self._head).float()
        flat, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
        step = max(1, _LOGITS // len(head))
        losses = [
            functional.cross_entropy(rows @ head.T, wanted, reduction="none")
            for rows, wanted in zip(flat.split(step), targets.split(step), strict=True)
        ]
        return torch.cat(losses).unflatten(0, (len(ids), -1))


@contextmanager
def log_held_back() -> Iterator[None]:
    """What transformers logs in here comes out at its end, unless that is an error: that is to be one line."""
    logger, held = logging.getLogger("transformers"), []
    handlers, keep = logger.handlers, logging.Handler()
    keep.emit = held.append
    logger.handlers = [keep]
    try:
        yield
    finally:
        logger.handlers = handlers
    for record in held:
        logger.handle(record)


def replace(layer: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule called `name`, such as "mlp.up_proj"."""
    parent, _, last = name.rpartition(".")
    setattr(layer.get_submodule(parent), last, module)


def windows(tokens: list[int], length: int) -> Tensor:
    """Token ids as [windows, length]; what does not fill the last window is left out, unless it is the only one."""
    length = min(length, len(tokens))
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def batches(hidden: Tensor, tokens: int = 8192) -> Iterator[slice]:
    """Slices of the windows of `hidden`, [windows, length, ...], with about `tokens` tokens each."""
    step = max(1, tokens // hidden.shape[1])
    for start in range(0, len(hidden), step):
        yield slice(start, min(start + step, len(hidden)))
