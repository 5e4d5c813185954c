"""The CPU implementation in plain torch: vectorised over tokens, fp32 where it matters, bounded in memory.

Decode rows (one new token) are sorted by length and cut into tiles of rows of similar lengths, padded to the longest.
A tile is dequantised to fp32 while it fits the processor's second-level caches, and all its rows go through one
matrix product for the scores, one softmax and one matrix product for the output.

Rows of several new tokens (prefill), and decode rows too long for that, run one by one through torch's flash attention,
query tile by query tile: over the tiles of what lies before it without a mask, over itself causally, merged by their
log-sum-exp.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import QUANT_MAX, SCALE_BYTES, SCALE_FLOOR, fail

# Elements of K (or V) in a decode tile: 2 MiB of fp32, what two cores keep in their second-level caches.
TILE_ELEMENTS = 512 << 10
# A row joins a tile if padding at most doubles ... of it.
MAX_PADDING = 1.25
SMALL_WIDTH = 64
# Elements of K (or V) dequantised at a time for a row that runs alone.
LONG_ELEMENTS = 4 << 20
QUERY_TILE = 2048


def store(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`kv8_store` after its checks."""
    num_blocks, _, block_size, heads, width = kv_cache.shape
    if slot_mapping.numel() == 0:
        return
    key, value = key[: slot_mapping.shape[0]], value[: slot_mapping.shape[0]]
    lowest, highest = (int(x) for x in torch.aminmax(slot_mapping))
    if highest >= num_blocks * block_size:
        allowed = f"below {num_blocks * block_size}: {num_blocks} blocks of {block_size}"
        fail("kv8_store", "slot_mapping", f"slot {highest}", allowed)
    if lowest < 0:
        kept = (slot_mapping >= 0).nonzero().view(-1)
        key, value, slot_mapping = (x.index_select(0, kept) for x in (key, value, slot_mapping))

    x = torch.stack((key, value), 1).float()
    scale = x.abs().amax(-1, keepdim=True).div_(QUANT_MAX).clamp_min_(SCALE_FLOOR)
    rows = torch.empty((*x.shape[:3], width), dtype=torch.int8)
    # The only quotients that are not finite are NaN: x / NaN and inf / inf.
    rows[..., :-SCALE_BYTES] = x.div_(scale).round_().nan_to_num_(nan=0.0)
    rows.view(torch.float32)[..., -1:] = scale
    # As int32: a quarter of the elements to scatter.
    slots = kv_cache.view(torch.int32).transpose(1, 2)
    block = slot_mapping.div(block_size, rounding_mode="floor")
    slots.index_put_((block, slot_mapping - block * block_size), rows.view(torch.int32))


def plan(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    kv_heads: int,
    head_size: int,
) -> list[torch.Tensor]:
    """`plan_attention` after its checks: [alone, tokens, then three tensors for each tile].

    alone int64 [P, 4]: the rows that `_attend_alone` takes, as (row, first query token, new tokens, length).
    tokens int64 [D]: query token of each decode row, in the order of the tiles; a tile has the next n of them, and W
    slots for each: blocks int32 [n * W / block_size]; past bool [n, 1, 1, W]: slots past the end of their row; the same
    as indices into n * W, int64.
    """
    lengths, starts = seq_lens.tolist(), query_start_loc.tolist()
    capacity = block_table.shape[1] * block_size
    fits_alone = LONG_ELEMENTS // (kv_heads * head_size)
    alone, decode = [], []
    for row, length in enumerate(lengths):
        first, new = starts[row], starts[row + 1] - starts[row]
        if new < 0 or starts[0] != 0:
            fail("kv8_attention", "query_start_loc", starts, "numbers from 0 that do not decrease")
        if length > capacity or length < new and length != 0:
            given = f"{length} in row {row}"
            allowed = f"0, or from its {new} new tokens to the {capacity} that block_table has room for"
            fail("kv8_attention", "seq_lens", given, allowed)
        if new == 1 and 0 < length <= fits_alone:
            decode.append((length, row))
        elif new > 0:
            alone.append((row, first, new, length))

    decode.sort(reverse=True)
    rows = torch.tensor([row for _, row in decode], dtype=torch.int64)
    planned = [torch.tensor(alone, dtype=torch.int64).view(-1, 4), query_start_loc[rows].long()]
    tile_tokens = TILE_ELEMENTS // (kv_heads * head_size)
    for first, last in _tiles([length for length, _ in decode], block_size, tile_tokens):
        members = rows[first:last]
        columns = -(-decode[first][0] // block_size)
        ends = seq_lens[members][:, None]
        # A shorter row repeats its last block; columns past a row's end hold garbage.
        column = torch.minimum(torch.arange(columns), (ends - 1) // block_size)
        past = torch.arange(columns * block_size) >= ends
        blocks = block_table[members[:, None], column].view(-1)
        planned += [blocks, past[:, None, None], past.view(-1).nonzero().view(-1)]
    return planned


def _tiles(lengths: list[int], block_size: int, tile_tokens: int) -> list[tuple[int, int]]:
    """Cut rows of descending lengths into runs [first, last) to be padded to their first row's blocks."""
    tiles, first = [], 0
    while first < len(lengths):
        width = -(-lengths[first] // block_size) * block_size
        last, used = first + 1, width
        while (
            last < len(lengths) and used + width <= tile_tokens and width <= MAX_PADDING * lengths[last] + SMALL_WIDTH
        ):
            last, used = last + 1, used + width
        tiles.append((first, last))
        first = last
    return tiles


def attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    plan: list[torch.Tensor],
) -> None:
    """`kv8_attention` after its checks."""
    alone, tokens, *tiles = plan
    if tiles:
        mixed = _decode(query.index_select(0, tokens), kv_cache, tiles, scale)
        output.index_copy_(0, tokens, mixed.to(output.dtype))
    for row, first, new, length in alone.tolist():
        rows = slice(first, first + new)
        if length == 0:
            output[rows] = 0
        else:
            _attend_alone(query[rows], kv_cache, block_table[row], length, output[rows], scale)


def _decode(query: torch.Tensor, kv_cache: torch.Tensor, tiles: list[torch.Tensor], scale: float) -> torch.Tensor:
    """fp32 [D, H, d] for the D queries of the tiles."""
    heads, d = query.shape[1:]
    kv_heads = kv_cache.shape[3]
    query = (query.float() * scale).view(-1, heads // kv_heads, d)
    mixed = torch.empty_like(query)
    keys, values = kv_cache.select(1, 0), kv_cache.select(1, 1)
    first = 0
    for blocks, past, past_slots in zip(tiles[::3], tiles[1::3], tiles[2::3], strict=True):
        n, width = past.shape[0], past.shape[-1]
        matrices = slice(first, first + n * kv_heads)
        k = _gather(keys, blocks, n)
        scores = torch.bmm(query[matrices], k.transpose(1, 2)).view(n, kv_heads, -1, width)
        weights = scores.masked_fill_(past, float("-inf")).softmax(-1).view(n * kv_heads, -1, width)
        v = _gather(values, blocks, n, past_slots, out=k)
        torch.bmm(weights, v, out=mixed[matrices])
        first += n * kv_heads
    return mixed.view(-1, heads, d)


def _gather(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    rows: int,
    dropped: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [rows * G, W, d]: keys or values of `blocks`, dequantised; zeros in the `dropped` slots of the rows * W."""
    raw = cache.index_select(0, blocks)
    count, block_size, kv_heads, width = raw.shape
    if dropped is not None:  # A NaN scale would survive a weight of 0.
        raw.view(count * block_size, -1).index_fill_(0, dropped, 0)
    raw = raw.view(rows, count // rows, block_size, kv_heads, width).permute(0, 3, 1, 2, 4)
    out = torch.empty((*raw.shape[:-1], width - SCALE_BYTES)) if out is None else out.view(*raw.shape[:-1], -1)
    out.copy_(raw[..., :-SCALE_BYTES]).mul_(raw.view(torch.float32)[..., -1:])
    return out.view(rows * kv_heads, -1, width - SCALE_BYTES)


def _attend_alone(
    query: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int, output: torch.Tensor, scale: float
) -> None:
    """query, output [q_len, H, d] of one row; blocks [columns]: its block table."""
    new = query.shape[0]
    _, _, block_size, kv_heads, width = kv_cache.shape
    dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    step = max(1, LONG_ELEMENTS // (kv_heads * (width - SCALE_BYTES) * block_size)) * block_size
    for first in range(0, new, QUERY_TILE):
        last = min(new, first + QUERY_TILE)
        # [G, r, tokens, d]: KV heads as the batch, so that one K serves all r query heads without a copy.
        q = query[first:last].to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        start = length - new + first
        spans = [(i, min(i + step, start), False) for i in range(0, start, step)] + [
            (start, start + last - first, True)
        ]
        mixed = lse = None
        for begin, end, causal in spans:
            k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in _dequantise(kv_cache, blocks, begin, end, dtype))
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, scale=scale
            )
            if mixed is None:
                mixed, lse = part, part_lse
            else:
                mixed = mixed.float().lerp_(part.float(), torch.sigmoid(part_lse - lse)[..., None])
                lse = torch.logaddexp(lse, part_lse)
        output[first:last].unflatten(1, (kv_heads, -1)).copy_(mixed.permute(2, 0, 1, 3))


def _dequantise(
    kv_cache: torch.Tensor, blocks: torch.Tensor, begin: int, end: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """K and V of positions [begin, end) of one row, each [G, end - begin, d]."""
    block_size = kv_cache.shape[2]
    first = begin // block_size
    raw = kv_cache.index_select(0, blocks[first : -(-end // block_size)])
    halves = []
    for half in (raw[:, 0], raw[:, 1]):
        x = half[..., :-SCALE_BYTES].float().mul_(half.view(torch.float32)[..., -1:]).flatten(0, 1)
        halves.append(x[begin - first * block_size : end - first * block_size].to(dtype).transpose(0, 1))
    return halves
