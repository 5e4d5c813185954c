"""`kvcompile::prune_compact`: what it moves, what it leaves alone, and that attention does not notice."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.kv8 import kv8_decode
from kvcompile.ops.kv8 import reference as kv8_reference
from kvcompile.ops.prune import parse_method, prune_compact, select
from tests.ops.prune.prompts import WINDOW, Prompt, draw_keep, make_prompt


def _vector(prompt: Prompt, cache: torch.Tensor, position: int, head: int) -> torch.Tensor:
    """The key and the value of a head at a position, as bytes [2, d + 4]."""
    block_size = cache.shape[2]
    return cache[int(prompt.row[position // block_size]), :, position % block_size, head]


def _compacted(prompt: Prompt, keep: torch.Tensor) -> torch.Tensor:
    """The cache as it has to be, vector by vector from a copy."""
    expected = prompt.cache.clone()
    first = prompt.length - keep.shape[1]
    for head, tokens in enumerate(keep.tolist()):
        for j, position in enumerate(tokens):
            _vector(prompt, expected, first + j, head).copy_(_vector(prompt, prompt.cache, position, head))
    return expected


@pytest.mark.parametrize(("length", "first"), [(101, 48), (101, 16), (96, 80), (64, 48), (33, 16), (37, 32)])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_every_kept_vector_arrives_and_no_other_byte_changes(length: int, first: int, head_size: int) -> None:
    prompt = make_prompt(length, kv_heads=3, head_size=head_size, seed=length)
    keep = draw_keep(length, length - first, 3)
    expected = _compacted(prompt, keep)
    prune_compact([prompt.cache], prompt.row, [keep], length, first)
    assert torch.equal(prompt.cache, expected)


@pytest.mark.parametrize("kept", ["first", "last", "every other"])
def test_source_and_destination_may_overlap(kept: str) -> None:
    prompt = make_prompt(96, block_size=32)
    chosen = {"first": range(64), "last": range(32, 96), "every other": [*range(0, 64, 2), *range(64, 96)]}[kept]
    keep = torch.tensor([list(chosen)] * 2, dtype=torch.int32)
    expected = _compacted(prompt, keep)
    prune_compact([prompt.cache], prompt.row, [keep], 96, 32)
    assert torch.equal(prompt.cache, expected)


def test_to_keep_every_token_changes_no_byte() -> None:
    prompt = make_prompt(50)
    before = prompt.cache.clone()
    method = parse_method("andpro", window=WINDOW)
    prune_compact([prompt.cache], prompt.row, [select(prompt.score(method), method, 50)], 50, 0)
    assert torch.equal(prompt.cache, before)


def test_bytes_move_whatever_they_mean() -> None:
    prompt = make_prompt(40)
    prompt.cache.random_(-128, 128, generator=torch.Generator().manual_seed(1))  # NaN and infinite scales among them
    keep = draw_keep(40, 24, 2)
    expected = _compacted(prompt, keep)
    prune_compact([prompt.cache], prompt.row, [keep], 40, 16)
    assert torch.equal(prompt.cache, expected)


def test_layers_of_different_heads_and_pages_apart_are_compacted_in_one_call() -> None:
    layers = [make_prompt(70, kv_heads=2, seed=1), make_prompt(70, heads=8, kv_heads=4, head_size=128, seed=2)]
    keeps = [draw_keep(70, 38, 2, 1), draw_keep(70, 38, 4, 2)]
    expected = [_compacted(layer, keep) for layer, keep in zip(layers, keeps, strict=True)]
    apart = torch.full((layers[0].cache.shape[0], 2, *layers[0].cache.shape[1:]), 3, dtype=torch.int8)
    apart[:, 1] = layers[0].cache
    prune_compact([apart[:, 1], layers[1].cache], layers[0].row, keeps, 70, 32)
    assert torch.equal(apart[:, 1], expected[0])
    assert torch.equal(layers[1].cache, expected[1])
    assert (apart[:, 0] == 3).all()


def _masked_attention(prompt: Prompt, query: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """float64 [H, d] of one query over the whole cache, where each head sees its kept tokens alone."""
    keys, values = prompt.keys_and_values()
    group = query.shape[0] // keys.shape[1]
    output = torch.empty(query.shape, dtype=torch.float64)
    for head in range(query.shape[0]):
        masked = torch.full((prompt.length,), float("-inf"), dtype=torch.float64)
        masked[keep[head // group].long()] = 0
        logits = keys[:, head // group] @ query[head].double() * prompt.scale
        output[head] = (logits + masked).softmax(0) @ values[:, head // group]
    return output


@pytest.mark.parametrize("name", ["andpro", "blend", "tova", "critical"])
@pytest.mark.parametrize(("length", "first"), [(101, 48), (64, 32), (51, 16)])
def test_attention_over_the_compact_layout_is_attention_over_the_kept_tokens_alone(
    name: str, length: int, first: int
) -> None:
    prompt, method = make_prompt(length, heads=6, kv_heads=2, seed=first), parse_method(name, window=WINDOW)
    keep = select(prompt.score(method), method, length - first)
    query = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(7))
    expected = _masked_attention(prompt, query[0], keep)
    prune_compact([prompt.cache], prompt.row, [keep], length, first)

    kept = torch.tensor([length - first], dtype=torch.int32)
    one = torch.tensor([0, 1], dtype=torch.int32)
    table = prompt.row[None, first // 16 :]
    found = kv8_reference.attention(query, prompt.cache, table, kept, one, prompt.scale)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    natural = prompt.row[None].clone()
    natural[0, : first // 16] = 0  # released: the null block
    output = torch.empty_like(query)
    length_of_row = torch.tensor([length], dtype=torch.int32)
    kv8_decode(query, prompt.cache, natural, length_of_row, output, prompt.scale)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-4, atol=1e-5)


def _arguments() -> dict:
    prompt = make_prompt(64)
    keep = draw_keep(64, 32, 2)
    return {"kv_caches": [prompt.cache], "block_table_row": prompt.row, "keeps": [keep], "length": 64, "first": 32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keeps": []}, "keeps: given 0 for 1 caches, allowed one for each cache, and 1 or more"),
        ({"kv_caches": [], "keeps": []}, "keeps: given 0 for 0 caches, allowed one for each cache"),
        ({"first": 40}, "first: given 40, allowed a multiple of the block size 16, from 0"),
        ({"first": -16}, "first: given -16, allowed a multiple of the block size 16, from 0"),
        ({"first": 64}, "first: given 64, allowed less than length, 64"),
        ({"first": 16}, r"keeps\[0\]: given shape \(2, 32\), allowed \(2, 48\): KV heads, length - first"),
        ({"length": 97}, "length: given 97 tokens, allowed at most the 96 that block_table_row has room for"),
        ({"block_table_row": torch.zeros(1, 4, dtype=torch.int32)}, r"block_table_row: given torch.int32 \(1, 4\)"),
        ({"block_table_row": torch.zeros(4)}, "block_table_row: given torch.float32 .* allowed torch.int32 of one"),
        (
            {"block_table_row": torch.tensor([1, 2, 3, 99], dtype=torch.int32)},
            "block_table_row: given block 99, allowed 0 to 6",
        ),
        (
            {"block_table_row": torch.tensor([1, -2, 3, 4], dtype=torch.int32)},
            "block_table_row: given block -2, allowed 0 to 6",
        ),
        (
            {"block_table_row": torch.tensor([0, 0, 3, 4], dtype=torch.int32)},
            "block_table_row: given block 0 twice, allowed each block once: a row without its released columns",
        ),
        ({"keeps": [torch.arange(32).expand(2, -1)]}, r"keeps\[0\]: given torch.int64 \(2, 32\) on cpu, allowed"),
        ({"keeps": [torch.arange(32, dtype=torch.int32)]}, r"keeps\[0\]: given torch.int32 \(32,\) on cpu, allowed"),
        (
            {"keeps": [torch.arange(33, 65, dtype=torch.int32).expand(2, -1)]},
            r"keeps\[0\]: given positions from 33 to 64, allowed positions that ascend, each once, from 0 to 63",
        ),
        (
            {"keeps": [torch.arange(32, dtype=torch.int32).flip(0).expand(2, -1)]},
            r"keeps\[0\]: given positions from 0 to 31, allowed positions that ascend, each once",
        ),
        ({"keeps": [torch.zeros(2, 32, dtype=torch.int32)]}, r"keeps\[0\]: given positions from 0 to 0"),
        (
            {"kv_caches": [torch.zeros(7, 2, 16, 2, 68)]},
            r"kv_caches\[0\]: given torch.float32 \(7, 2, 16, 2, 68\) on cpu, allowed torch.int8",
        ),
        (
            {"kv_caches": [torch.zeros(7, 2, 16, 2, 70, dtype=torch.int8)]},
            r"kv_caches\[0\]: given head size 66, allowed 64, 80, 96, 128, 256",
        ),
        (
            {"kv_caches": [torch.zeros(7, 2, 2, 16, 68, dtype=torch.int8).transpose(2, 3)]},
            r"kv_caches\[0\]: given strides .* blocks packed as",
        ),
        ({"kv_caches": [torch.zeros(7, 2, 8, 2, 68, dtype=torch.int8)]}, "block_size: given 8, allowed a multiple"),
    ],
)
def test_it_says_what_does_not_fit_and_writes_nothing(change: dict, message: str) -> None:
    arguments = {**_arguments(), **change}
    before = [cache.clone() for cache in arguments["kv_caches"]]
    with pytest.raises(ValueError, match=f"^kvcompile::prune_compact: {message}"):
        prune_compact(**arguments)
    for cache, untouched in zip(arguments["kv_caches"], before, strict=True):
        assert torch.equal(cache, untouched)


def test_a_second_layer_that_does_not_fit_leaves_the_first_as_it_is() -> None:
    arguments = _arguments()
    cache, keep = arguments["kv_caches"][0], arguments["keeps"][0]
    before = cache.clone()
    wrong = keep.clone()
    wrong[1, 5] = wrong[1, 4]
    with pytest.raises(ValueError, match=r"^kvcompile::prune_compact: keeps\[1\]: given positions"):
        prune_compact([cache, cache.clone()], arguments["block_table_row"], [keep, wrong], 64, 32)
    other = torch.zeros(7, 2, 32, 2, 68, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"kv_caches\[1\]: given a block size of 32, allowed that of the first cache"):
        prune_compact([cache, other], arguments["block_table_row"], [keep, keep], 64, 32)
    assert torch.equal(cache, before)
