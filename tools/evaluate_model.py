"""A checkpoint whose prompts are pruned: one prefill for a prompt, then one short pass for many choices of kept tokens.

The model is transformers' own with an attention of ours. Keys and values are rounded as the int8 cache rounds them,
those of a prompt and those that follow; positions stay natural. What a choice keeps is gathered, not masked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.config import UsageError
from kvcompile.llama_values import MODEL_TYPES
from kvcompile.ops.kv8 import reference
from kvcompile.tools.checkpoint_config import config_file, read_json, refuse_other_values

ATTENTION = "kvcompile_pruned"


class Prompt(NamedTuple):
    """What all L layers hold of one prompt of T tokens: float, keys and values as they come out of the int8 cache."""

    query: Tensor  # [L, W, H, d], of the last W tokens, after RoPE
    keys: Tensor  # [L, G, T, d]
    values: Tensor  # [L, G, T, d]
    logits: Tensor  # [vocabulary], of the token behind it, which pruning comes too late to change

    @property
    def length(self) -> int:
        return self.keys.shape[2]


class _Prefill:
    """Causal attention over a prompt; collects what `Prompt` holds."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.layers.append((query[0, :, -self._window :].transpose(0, 1), key[0], value[0]))
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


class _Continue:
    """Attention of n new tokens to what each of M choices keeps, int64 [L, M, G, K], and to one another."""

    def __init__(self, prompt: Prompt, keep: Tensor) -> None:
        self._prompt, self._keep = prompt, keep

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        choices, heads, n, d = query.shape
        group = heads // key.shape[1]
        at = self._keep[layer][..., None].expand(-1, -1, -1, d)
        kept = [x[layer].expand(choices, -1, -1, -1).gather(2, at) for x in (self._prompt.keys, self._prompt.values)]
        keys, values = torch.cat([kept[0], key], 2), torch.cat([kept[1], value], 2)
        own = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()
        seen = F.pad(own, (keys.shape[2] - n, 0), value=True).repeat(group, 1)
        folded = query.unflatten(1, (-1, group)).flatten(2, 3)  # the r heads of a KV head share its keys
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=scale)
        return out.unflatten(2, (group, n)).flatten(1, 2)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, kv8: Any, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [M, H, n, d], key and value [M, G, n, d] -> [M, n, H, d]."""
    key, value = (reference.dequantise(reference.quantise(each)).to(each.dtype) for each in (key, value))
    return kv8.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None


class PrunedModel:
    """The model of a checkpoint folder, in float32 on `device`.

    Raises UsageError for a folder that transformers loads no causal language model from, and for an architecture whose
    attention may do more than is done here.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register(ATTENTION, _attention)
        loading = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **loading)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=ATTENTION, **loading
            )
        except Exception as error:  # whatever goes wrong in there is the checkpoint's doing
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UsageError(f"{folder}: no model and tokenizer can be loaded ({why}); give a checkpoint") from error
        file = config_file(folder)
        refuse_other_values(read_json(file), file, tuple(MODEL_TYPES))
        self.device = torch.device(device)
        self._model = model.eval().requires_grad_(False).to(self.device)
        self.vocabulary: int = model.config.vocab_size
        # Within a sliding window every token sees all before it, as it does here.
        most = model.config.max_position_embeddings, getattr(model.config, "sliding_window", None)
        self.max_tokens: int = min(tokens for tokens in most if tokens is not None)
        end = model.generation_config.eos_token_id
        self._ends: list[int] = [end] if isinstance(end, int) else end or []

    @property
    def output_weights(self) -> list[Tensor]:
        """Of each layer, the weight of its output projection, [hidden, H * d]."""
        return [layer.self_attn.o_proj.weight for layer in self._model.model.layers]

    @property
    def scale(self) -> float:
        return self._model.model.layers[0].self_attn.scaling

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], window: int) -> Prompt:
        run = _Prefill(window)
        hidden = self._hidden(torch.tensor([tokens], device=self.device), 0, run)
        layers = (torch.stack(part) for part in zip(*run.layers, strict=True))
        return Prompt(*layers, logits=self._model.lm_head(hidden[0, -1]))

    @torch.inference_mode()
    def losses(
        self, prompt: Prompt, keep: Tensor, later: Sequence[int], answer: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Of each answer token after `later`, for M choices: whether it ranks first, bool [M, n], and its nats, [M, n].

        keep: int [L, M, G, K], positions of the prompt. later: at least one token.
        """
        ids = torch.tensor([*later, *answer], device=self.device).expand(keep.shape[1], -1)
        hidden = self._hidden(ids[:, :-1], prompt.length, _Continue(prompt, keep.long()))
        logits = self._model.lm_head(hidden[:, len(later) - 1 :])
        wanted = ids[:, len(later) :]
        nats = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return logits.argmax(-1) == wanted, nats.view_as(wanted)

    @torch.inference_mode()
    def generate(self, prompt: Prompt, keep: Tensor, most: int, stop: Collection[int] = ()) -> list[list[int]]:
        """Up to `most` greedy tokens for each of M choices; the model's own end, or one of `stop`, is not among them.

        keep: int [L, M, G, K], positions of the prompt. As in a server, the first token is that of the whole prompt.
        With `stop` that one is no end.
        """
        ends = torch.tensor(sorted({*stop, *self._ends}), dtype=torch.long, device=self.device)
        logits = prompt.logits.index_fill(0, ends, float("-inf")) if stop else prompt.logits
        ids = logits.argmax().expand(keep.shape[1], 1)
        run = _Continue(prompt, keep.long())
        while ids.shape[1] < most and not torch.isin(ids, ends).any(1).all():
            following = self._model.lm_head(self._hidden(ids, prompt.length, run)[:, -1]).argmax(-1)
            ids = torch.cat([ids, following[:, None]], 1)
        stops = set(ends.tolist())
        return [list(takewhile(lambda token: token not in stops, row)) for row in ids.tolist()]

    def _hidden(self, ids: Tensor, first: int, run: _Prefill | _Continue) -> Tensor:
        positions = torch.arange(first, first + ids.shape[1], device=self.device)[None]
        return self._model.model(ids, position_ids=positions, use_cache=False, kv8=run).last_hidden_state
