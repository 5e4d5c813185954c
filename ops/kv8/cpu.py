"""The CPU implementation in plain torch: vectorised over tokens, fp32 where it matters, bounded in memory.

Decode rows (one new token) are cut into pieces of at most one tile, sorted by length and put into tiles of pieces of
similar length, padded to the longest. A tile is dequantised to fp32 (in the caches of the processor) and all its pieces
go through one matrix product for the scores, one softmax and one matrix product for the output. The pieces of a long
row are merged by their log-sum-exp, as in split-KV flash decoding.

Rows of several new tokens (prefill) run one by one through torch's flash attention, query tile by query tile: over the
tiles of what lies before it without a mask, over itself causally, merged by their log-sum-exp.
"""

from __future__ import annotations

import torch

from kvcompile.ops.kv8.layout import QUANT_MAX, SCALE_BYTES, SCALE_FLOOR, fail

# Elements of K (or V) in a decode tile: 2 MiB of fp32, which two cores keep in their second-level caches.
TILE_ELEMENTS = 512 << 10
# A piece joins a tile that is at most so much wider. The fixed part is what a tile of its own would cost instead.
MAX_PADDING = 1.25
MIN_PADDING = 64
# Elements of K (or V) that a prefill row dequantises at a time, and its queries that share them.
SPAN_ELEMENTS = 4 << 20
QUERY_TILE = 2048

# What F.scaled_dot_product_attention calls on a CPU; unlike it, this returns the log-sum-exp too.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
    """`plan_attention` after its checks: [prefills, tokens, queries, owner, then three tensors for each tile].

    prefills int64 [P, 4]: rows that run alone, as (row, first query token, new tokens, length).
    tokens int64 [D]: query token of each decode row.
    queries int64 [N]: query token of each piece, in the order of the tiles. owner int64 [N]: decode row of each piece,
    or empty where every row is one piece.
    A tile has the next n pieces and W slots for each: blocks int32 [n * W / block_size]; past bool [n, 1, 1, W]: slots
    past the end of their piece; past_slots int64: the same as indices into n * W.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    capacity = block_table.shape[1] * block_size
    tile_blocks = max(1, TILE_ELEMENTS // (kv_heads * head_size * block_size))
    prefills, tokens, pieces = [], [], []
    for row, length in enumerate(lengths):
        first, new = starts[row], starts[row + 1] - starts[row]
        if new < 0 or starts[0] != 0:
            fail("kv8_attention", "query_start_loc", starts, "numbers from 0 that do not decrease")
        if length > capacity or length < new and length != 0:
            allowed = f"0, or from its {new} new tokens to the {capacity} that block_table has room for"
            fail("kv8_attention", "seq_lens", f"{length} in row {row}", allowed)
        if new == 1 and length > 0:
            count = -(-length // block_size)
            step = -(-count // -(-count // tile_blocks))
            for column in range(0, count, step):
                end = min(length - column * block_size, step * block_size)
                pieces.append((end, row, column, len(tokens), first))
            tokens.append(first)
        elif new > 0:
            prefills.append((row, first, new, length))

    pieces.sort(reverse=True)
    ends, rows, columns, owner, queries = torch.tensor(pieces, dtype=torch.int64).view(-1, 5).unbind(1)
    if len(pieces) == len(tokens):
        owner, tokens = owner[:0], queries
    planned = [
        torch.tensor(prefills, dtype=torch.int64).view(-1, 4),
        torch.as_tensor(tokens, dtype=torch.int64),
        queries,
        owner,
    ]
    for tile in _tiles([end for end, *_ in pieces], block_size, tile_blocks * block_size):
        count = -(-pieces[tile.start][0] // block_size)
        end = ends[tile, None]
        # A shorter piece repeats its last block: columns past the end of a row hold garbage.
        column = columns[tile, None] + torch.minimum(torch.arange(count), (end - 1) // block_size)
        past = torch.arange(count * block_size) >= end
        planned += [
            block_table[rows[tile, None], column].view(-1),
            past[:, None, None],
            past.view(-1).nonzero().view(-1),
        ]
    return planned


def _tiles(ends: list[int], block_size: int, tile_tokens: int) -> list[slice]:
    """Cut pieces of descending lengths into tiles of at most `tile_tokens`, padded to the blocks of their first."""
    tiles, first = [], 0
    while first < len(ends):
        width = -(-ends[first] // block_size) * block_size
        last = first + 1
        while (
            last < len(ends)
            and (last + 1 - first) * width <= tile_tokens
            and width <= MAX_PADDING * ends[last] + MIN_PADDING
        ):
            last += 1
        tiles.append(slice(first, last))
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
    prefills, tokens, queries, owner, *tiles = plan
    if tiles:
        mixed = _decode(query.index_select(0, queries), kv_cache, owner, tiles, scale)
        output.index_copy_(0, tokens, mixed.to(output.dtype))
    for row, first, new, length in prefills.tolist():
        rows = slice(first, first + new)
        if length == 0:
            output[rows] = 0
        else:
            _prefill(query[rows], kv_cache, block_table[row], length, output[rows], scale)


def _decode(
    query: torch.Tensor, kv_cache: torch.Tensor, owner: torch.Tensor, tiles: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """fp32 [D, H, d] from the queries [N, H, d] of the pieces; the other arguments are `plan`'s."""
    pieces, heads, d = query.shape
    kv_heads = kv_cache.shape[3]
    query = (query.float() * scale).view(pieces * kv_heads, -1, d)
    mixed = torch.empty_like(query)
    lse = query.new_empty((pieces, heads if owner.shape[0] else 0))
    # One for all tiles, so that it stays in the processor's caches.
    workspace = query.new_empty(max(past.numel() for past in tiles[1::3]) * kv_heads * d)
    keys, values = kv_cache.select(1, 0), kv_cache.select(1, 1)
    first = 0
    for blocks, past, past_slots in zip(tiles[::3], tiles[1::3], tiles[2::3], strict=True):
        n, width = past.shape[0], past.shape[-1]
        matrices = slice(first * kv_heads, (first + n) * kv_heads)
        k = _gather(keys, blocks, n, workspace)
        scores = torch.bmm(query[matrices], k.transpose(1, 2)).view(n, kv_heads, -1, width)
        scores.masked_fill_(past, float("-inf"))
        if owner.shape[0]:
            lse[first : first + n] = scores.logsumexp(-1).view(n, heads)
        v = _gather(values, blocks, n, workspace, past_slots)
        torch.bmm(scores.softmax(-1).view(n * kv_heads, -1, width), v, out=mixed[matrices])
        first += n
    mixed = mixed.view(pieces, heads, d)
    return _merge(mixed, lse, owner) if owner.shape[0] else mixed


def _merge(mixed: torch.Tensor, lse: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """fp32 [D, H, d]: the pieces [N, H, d] of each row weighted by the exponential of their log-sum-exp [N, H]."""
    rows = int(owner.max()) + 1
    index = owner[:, None].expand_as(lse)
    peak = lse.new_full((rows, lse.shape[1]), float("-inf")).scatter_reduce_(0, index, lse, "amax")
    weight = (lse - peak.index_select(0, owner)).exp_()
    total = torch.zeros_like(peak).index_add_(0, owner, weight)
    merged = mixed.new_zeros((rows, *mixed.shape[1:])).index_add_(0, owner, mixed.mul_(weight[..., None]))
    return merged.div_(total[..., None])


def _gather(
    cache: torch.Tensor, blocks: torch.Tensor, rows: int, workspace: torch.Tensor, dropped: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [rows * G, W, d] in `workspace`: keys or values of `blocks`, zeros in `dropped` of the rows * W slots."""
    raw = cache.index_select(0, blocks)
    count, block_size, kv_heads, width = raw.shape
    if dropped is not None:  # A NaN scale would survive a weight of 0.
        raw.view(count * block_size, -1).index_fill_(0, dropped, 0)
    raw = raw.view(rows, count // rows, block_size, kv_heads, width).permute(0, 3, 1, 2, 4)
    d = width - SCALE_BYTES
    x = workspace[: count * block_size * kv_heads * d].view(*raw.shape[:-1], d)
    x.copy_(raw[..., :d]).mul_(raw.view(torch.float32)[..., -1:])
    return x.view(rows * kv_heads, -1, d)


def _prefill(
    query: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, length: int, output: torch.Tensor, scale: float
) -> None:
    """query, output [q_len, H, d] of one row; blocks [columns]: its block table."""
    new = query.shape[0]
    _, _, block_size, kv_heads, width = kv_cache.shape
    dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    step = max(1, SPAN_ELEMENTS // (kv_heads * (width - SCALE_BYTES) * block_size)) * block_size
    for first in range(0, new, QUERY_TILE):
        last = min(new, first + QUERY_TILE)
        # [G, r, tokens, d]: KV heads as the batch, so that one K serves all r query heads without a copy.
        q = query[first:last].to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        start = length - new + first
        spans = [(begin, min(begin + step, start), False) for begin in range(0, start, step)]
        spans.append((start, start + last - first, True))
        mixed = lse = None
        for begin, end, causal in spans:
            k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in _dequantise(kv_cache, blocks, begin, end, dtype))
            part, part_lse = _flash(q, k, v, 0.0, causal, scale=scale)
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
