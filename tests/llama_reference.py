"""A Llama in plain torch, float32, whose keys and values are rounded as the int8 cache rounds them, and pruned.

One request at a time and no pages: what a pruned request has to give, whatever an engine does with blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kvcompile.ops import prune
from kvcompile.ops.kv8 import reference

# (queries [W, H, d], keys [T, G, d], values [T, G, d], kept) -> [G, kept], ascending
Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]


def andpro(window: int) -> Select:
    """Selection by the operators themselves, of AnDPro with that observation window."""
    method = prune.parse_method("andpro", window=window)

    def select(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int) -> torch.Tensor:
        cache, row = prune.pages_of(keys, values)
        scores = prune.prune_score(queries, cache, row, len(keys), queries.shape[-1] ** -0.5, method)
        return prune.select(scores, method, kept)

    return select


@dataclass
class Answer:
    """tokens, and by how much each one's logit is above the next best: another order of sums may turn a small lead."""

    tokens: list[int]
    leads: list[float]

    def agrees(self, tokens: list[int], least_lead: float = 0.01) -> bool:
        """Whether these tokens are its own, up to one that had no lead to speak of."""
        for ours, theirs, lead in zip(self.tokens, tokens, self.leads, strict=False):
            if ours != theirs:
                return lead < least_lead
        return len(tokens) <= len(self.tokens)


def _lead(logits: torch.Tensor) -> float:
    best, second = logits.topk(2).values.tolist()
    return best - second


class Llama:
    """weights: of a Hugging Face checkpoint of LlamaForCausalLM."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.weights = {name: x.float() for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_size = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        channels = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        self.frequencies = config["rope_theta"] ** -channels

    def generate(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        kept: int | None = None,
        window: int = 32,
        select: Select | None = None,
    ) -> Answer:
        """Greedy tokens; once the prompt is in, each KV head of each layer keeps `kept` tokens that `select` names."""
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer, keys and values [G, n, d]
        logits = self._forward(prompt, 0, cache, prefill=(kept, window, select))[-1]
        answer = Answer([int(logits.argmax())], [_lead(logits)])
        while len(answer.tokens) < new_tokens:
            logits = self._forward(answer.tokens[-1:], len(prompt) + len(answer.tokens) - 1, cache)[-1]
            answer.tokens.append(int(logits.argmax()))
            answer.leads.append(_lead(logits))
        return answer

    def score(
        self,
        prompt: list[int],
        tokens: list[int],
        *,
        kept: int | None = None,
        window: int = 32,
        select: Select | None = None,
    ) -> list[float]:
        """Log-probabilities of these tokens behind a prompt, of which the same is kept as by `generate`."""
        logits = self._follow(prompt, tokens, (kept, window, select))
        return [float(each.log_softmax(-1)[token]) for token, each in zip(tokens, logits, strict=False)]

    def regrets(
        self,
        prompt: list[int],
        tokens: list[int],
        *,
        kept: int | None = None,
        window: int = 32,
        select: Select | None = None,
    ) -> list[float]:
        """By how much each of these tokens' logit is below the best: 0 for the greedy one behind those before it.

        So every token of an answer is judged, also behind one where a small lead was turned.
        """
        logits = self._follow(prompt, tokens, (kept, window, select))
        return [float(each.max() - each[token]) for token, each in zip(tokens, logits, strict=False)]

    def _follow(self, prompt: list[int], tokens: list[int], prefill: tuple) -> torch.Tensor:
        """The logits behind the prompt, and behind each of these tokens: [len(tokens) + 1, V]."""
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = self._forward(prompt, 0, cache, prefill=prefill)
        return torch.cat([first, self._forward(tokens, len(prompt), cache)])

    def _forward(self, tokens: list[int], position: int, cache: list, prefill: tuple | None = None) -> torch.Tensor:
        """Logits [len(tokens), V] of tokens behind what `cache` holds of each layer, which they join.

        prefill: of a prompt, how it is pruned; its logits are those of the last token, [1, V].
        """
        w = self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
        positions = torch.arange(position, position + len(tokens))
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            h = self._norm(x, w[f"{name}.input_layernorm.weight"])
            q, k, v = (
                F.linear(h, w[f"{name}.self_attn.{part}_proj.weight"]).view(len(tokens), -1, self.head_size)
                for part in "qkv"
            )
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            k, v = (reference.dequantise(reference.quantise(each)).float() for each in (k, v))
            if prefill:
                attended = self._attend(q, k.transpose(0, 1), v.transpose(0, 1))
                kept, window, select = prefill
                keys, values = k.transpose(0, 1), v.transpose(0, 1)
                if kept is not None:
                    keep = select(q[-window:], k, v, kept).long()[..., None].expand(-1, -1, self.head_size)
                    keys, values = keys.gather(1, keep), values.gather(1, keep)
                cache.append((keys, values))
            else:
                keys, values = (torch.cat([c, n.transpose(0, 1)], 1) for c, n in zip(cache[layer], (k, v), strict=True))
                cache[layer] = keys, values
                attended = self._attend(q, keys, values)
            x = x + F.linear(attended, w[f"{name}.self_attn.o_proj.weight"])
            h = self._norm(x, w[f"{name}.post_attention_layernorm.weight"])
            gate, up = (F.linear(h, w[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])
        x = x[-1:] if prefill else x
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return F.linear(self._norm(x, w["model.norm.weight"]), head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [T, H, d] at the end of keys and values [G, n, d] -> [T, H * d]."""
        group = self.heads // self.kv_heads
        k, v = (each.repeat_interleave(group, 0) for each in (keys, values))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * self.head_size**-0.5
        later = torch.arange(k.shape[1]) > torch.arange(k.shape[1] - len(q), k.shape[1])[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(len(q), -1)
