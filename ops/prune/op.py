"""The operator `kvcompile::prune_score`: its schema, fake, checks and Python name.

T = length tokens of one request, W observation queries, H query heads, G KV heads with H a multiple of G, d head size;
`kv8/layout.py` has the cache. A request is pruned when the last token of its prompt is in the cache: score every layer,
`select`, and only when all layers have their kept tokens compact them all, as a rewrite in place cannot be undone.

A prompt of T <= budget tokens is not pruned: nothing is called. Were it called with keep = T, `select` would give
0 to T - 1 and `prune_compact` leave every byte as it is.

A request whose leading blocks were released already passes its row without them and its length less their tokens.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import check_one_device, fail
from kvcompile.ops.library import register
from kvcompile.ops.prune import checks, cpu, cuda
from kvcompile.ops.prune.methods import METHODS, Method, stages_of


def prune_score(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    scale: float,
    method: Method,
    output_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [stages, G, T]: the scores by which `method` ranks the tokens of one request in one layer.

    query: [W, H, d] bf16, fp16 or fp32, after RoPE; the last W = method.window queries of the prompt, the i-th at
        position T - W + i. May be a view with strides.
    kv_cache: int8 (num_blocks, 2, block_size, G, d + 4) that holds keys and values of all T tokens; for tensors that
        are in no cache, `pages_of` makes one.
    block_table_row: int32 [columns]; columns past the length are not read.
    length: T, at least W. scale: factor on the logits, above 0, usually d ** -0.5.
    output_weight: [hidden, H * d], the weight of the layer's output projection (a rank's columns of it). `critical`
        cannot do without; others do not read it.

    Tokens that are always kept (the first method.sink, the last W) score 0 and are not looked at by `select`.
    Arithmetic in fp32; memory beyond inputs and result is bounded, whatever T. Slots that no position below T maps to
    are never read into a score. Under tensor parallelism "all heads of the layer" are those of the rank.

    On CUDA (cuda.py): bf16 and fp16 queries; products in fp16 with fp32 sums; a kernel of at most 33 for `andpro`,
    `blend` and `robust`; fp32 [H, T] of memory; nothing waits for the device, and no tensor's contents are checked.

    Raises ValueError naming the argument that does not fit.
    """
    if query.dim() == 3 and query.shape[0] != method.window:
        fail("prune_score", "query", f"{query.shape[0]} tokens", f"the window of {method.NAME}: {method.window}")
    return torch.ops.kvcompile.prune_score(
        query,
        kv_cache,
        block_table_row,
        length,
        scale,
        method.NAME,
        output_weight=output_weight,
        **method.score_parameters,
    )


def _score_cpu(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    scale: float,
    method: str,
    sink: int,
    kernel: int = 1,
    epsilon: float = 0.0,
    seed: int = 0,
    output_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    checks.check_score(query, kv_cache, block_table_row, length, scale, method, output_weight)
    checks.check_parameters(sink, kernel, epsilon, seed)
    checks.check_blocks("prune_score", block_table_row, length, kv_cache)
    return cpu.score(
        query, kv_cache, block_table_row, length, scale, method, sink, kernel, epsilon, seed, output_weight
    )


def _score_cuda(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    scale: float,
    method: str,
    sink: int,
    kernel: int = 1,
    epsilon: float = 0.0,
    seed: int = 0,
    output_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    checks.check_score(query, kv_cache, block_table_row, length, scale, method, output_weight)
    checks.check_parameters(sink, kernel, epsilon, seed)
    return cuda.score(
        query, kv_cache, block_table_row, length, scale, method, sink, kernel, epsilon, seed, output_weight
    )


def _score_fake(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table_row: torch.Tensor,
    length: int,
    scale: float,
    method: str,
    sink: int,
    kernel: int = 1,
    epsilon: float = 0.0,
    seed: int = 0,
    output_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    check_one_device("prune_score", query=query, kv_cache=kv_cache, block_table_row=block_table_row)
    if method not in METHODS:
        fail("prune_score", "method", repr(method), ", ".join(METHODS))
    return query.new_empty((stages_of(method), kv_cache.shape[3], length), dtype=torch.float32)


register(
    "prune_score(Tensor query, Tensor kv_cache, Tensor block_table_row, SymInt length, float scale, str method, "
    "int sink, int kernel=1, float epsilon=0., int seed=0, Tensor? output_weight=None) -> Tensor",
    fake=_score_fake,
    CPU=_score_cpu,
    CUDA=_score_cuda,
)
