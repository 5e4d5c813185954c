"""The scores of `ops/prune` for all layers of a prompt at once, in plain torch on any device; nothing is tiled.

Equal to the operator up to the order of sums (tests); memory is [L, H, W, T] floats, several times over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.ops.prune import Method, positions
from kvcompile.ops.prune.cpu import max_pool
from kvcompile.tools.evaluate_model import Prompt


class Scorer:
    """Scores of one prompt by any method with a window of the prompt's W queries; attention is computed once."""

    def __init__(self, prompt: Prompt, scale: float, output_weights: Sequence[Tensor]) -> None:
        self._prompt, self._output_weights = prompt, output_weights
        layers, window, heads, d = prompt.query.shape
        kv_heads, length = prompt.keys.shape[1:3]
        self.window, self.length = window, length
        query = (prompt.query * scale).view(layers, window, kv_heads, -1, d).permute(0, 2, 3, 1, 4)
        logits = query.flatten(2, 3) @ prompt.keys.transpose(2, 3)
        at = torch.arange(length - window, length, device=query.device).repeat(heads // kv_heads)[:, None]
        logits.masked_fill_(torch.arange(length, device=query.device) > at, float("-inf"))
        self.weights = logits.softmax(-1)  # A, [L, G, r * W, T]

    def score(self, method: Method) -> Tensor:
        """fp32 [stages, L * G, T], as `prune_score` of each layer; 0 where tokens are always kept."""
        if method.window != self.window:
            raise ValueError(f"{method.NAME}: a window of {method.window}, the prompt's has {self.window} queries")
        stages = torch.stack(
            [stage.expand(self.weights.shape[0], self.weights.shape[1], -1) for stage in self._stages(method)]
        )
        scores = torch.zeros_like(stages)
        span = slice(method.sink, self.length - self.window)
        scores[..., span] = stages[..., span]
        return scores.flatten(1, 2)

    def _stages(self, method: Method) -> list[Tensor]:
        device = self.weights.device
        match method.NAME:
            case "streaming":
                return [positions.recency(self.length, device)]
            case "random":
                return [positions.uniform(method.seed, self.length, device)]
            case "andpro":
                return [self.anchored(method.sink, method.kernel)]
            case "tova":
                return [self.last_query()]
            case "blend":
                return [self.anchored(method.sink, method.kernel), self.last_query()]
            case "keydiff":
                return [self.key_difference()]
            case "robust":
                anchored = self.anchored(method.sink, method.kernel)
                return [anchored, self.last_query(method.kernel), self.key_difference().mean(1, keepdim=True)]
        pooled = self.window_mean(method.kernel)
        return [pooled, (pooled + method.epsilon) * self.projected_norm()] if method.NAME == "critical" else [pooled]

    def anchored(self, sink: int, kernel: int) -> Tensor:
        """[L, G, T]: AnDPro's."""
        pooled = max_pool(F.pad(self.weights, (kernel // 2, kernel // 2)), kernel)
        span = slice(sink, self.length - self.window)
        values = self._prompt.values
        anchor = pooled[..., span] @ values[:, :, span]
        return (anchor @ values.transpose(2, 3)).mul_(pooled).sum(2)

    def last_query(self, kernel: int = 1) -> Tensor:
        """[L, 1, T]: the last query's attention, pooled per head, mean over all heads of a layer."""
        last = self.weights[:, :, self.window - 1 :: self.window]
        return max_pool(F.pad(last, (kernel // 2, kernel // 2)), kernel).mean((1, 2)).unsqueeze(1)

    def key_difference(self) -> Tensor:
        """[L, G, T]: KeyDiff's."""
        units = F.normalize(self._prompt.keys, dim=-1)
        return -(units * F.normalize(units.sum(2, keepdim=True), dim=-1)).sum(-1)

    def window_mean(self, kernel: int) -> Tensor:
        """[L, G, T]: SnapKV's, of positions before the window."""
        means = self.weights.unflatten(2, (-1, self.window)).mean(3)[..., : self.length - self.window]
        pooled = max_pool(F.pad(means, (kernel // 2, kernel // 2)), kernel).mean(2)
        return F.pad(pooled, (0, self.window))

    def projected_norm(self) -> Tensor:
        """[L, G, T]: L1 norm of the values after the output projection, mean over the heads of a KV head."""
        norms = torch.empty(self._prompt.values.shape[:-1], device=self.weights.device)
        for layer, weight in enumerate(self._output_weights):
            values = self._prompt.values[layer]
            kv_heads, _, d = values.shape
            parts = weight.float().unflatten(1, (kv_heads, -1, d)).permute(1, 2, 3, 0)  # [G, r, d, hidden]
            norms[layer] = torch.stack([(values @ part).abs_().sum(-1) for part in parts.unbind(1)]).mean(0)
        return norms
