"""The pruning operators are what torch.library asks of one, and `prune_score` says what does not fit."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.prune import METHODS, parse_method, prune_compact, prune_score, select
from tests.ops.prune.prompts import WINDOW, make_prompt


@pytest.mark.parametrize("name", METHODS)
def test_opcheck_finds_nothing_wrong_with_the_score(name: str) -> None:
    prompt, method = make_prompt(40), parse_method(name, window=WINDOW)
    arguments = prompt.query, prompt.cache, prompt.row, 40, prompt.scale, name
    keywords = {**method.score_parameters, "output_weight": prompt.output_weight}
    torch.library.opcheck(torch.ops.kvcompile.prune_score.default, arguments, keywords)


def test_opcheck_finds_nothing_wrong_with_the_compaction() -> None:
    layers = [make_prompt(40, seed=1), make_prompt(40, seed=2)]
    keep = torch.arange(5, 29, dtype=torch.int32).expand(2, -1).contiguous()
    arguments = [layer.cache for layer in layers], layers[0].row, [keep, keep.clone()], 40, 16
    torch.library.opcheck(torch.ops.kvcompile.prune_compact.default, arguments)


def test_opcheck_finds_nothing_wrong_with_the_selection() -> None:
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    arguments = scores, 40, 4, 8, [0.5, 1.0], [4, 4], ["sum", "max"]
    torch.library.opcheck(torch.ops.kvcompile.prune_select.default, arguments)
    of_layers = [scores, scores.flip(2)], *arguments[1:]
    torch.library.opcheck(torch.ops.kvcompile.prune_select_layers.default, of_layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(4, 3, 50)}, "scores: given 4 stages, allowed 1 to 3"),
        ({"shares": [0.5]}, "shares: given 1, allowed one for each of the 2 stages of scores"),
        ({"shares": [1.5, 1.0]}, r"shares: given \[1.5, 1.0\], allowed numbers from 0 to 1"),
        (
            {"scores": torch.zeros(3, 3, 50), "shares": [0.6, 0.6, 1.0], "chunks": [1] * 3, "reduces": ["sum"] * 3},
            "shares",
        ),
        ({"chunks": [4, 0]}, r"chunks: given \[4, 0\], allowed numbers from 1"),
        ({"reduces": ["sum", "mean"]}, r"reduces: given \['sum', 'mean'\], allowed sum, max"),
        ({"sink": -1}, "sink: given -1 and a window of 8, allowed 0 or more of each"),
    ],
)
def test_the_selection_itself_says_what_a_method_cannot_be(change: dict, message: str) -> None:
    given = {"scores": torch.zeros(2, 3, 50), "keep": 40, "sink": 4, "window": 8}
    stages = {"shares": [0.5, 1.0], "chunks": [4, 4], "reduces": ["sum", "max"]}
    with pytest.raises(ValueError, match=f"^kvcompile::prune_select: {message}"):
        torch.ops.kvcompile.prune_select(**{**given, **stages, **change})


def test_the_schemas_say_what_is_written() -> None:
    assert str(torch.ops.kvcompile.prune_score.default._schema) == (
        "kvcompile::prune_score(Tensor query, Tensor kv_cache, Tensor block_table_row, SymInt length, float scale, "
        "str method, int sink, int kernel=1, float epsilon=0., int seed=0, Tensor? output_weight=None) -> Tensor"
    )
    assert str(torch.ops.kvcompile.prune_compact.default._schema) == (
        "kvcompile::prune_compact(Tensor(a!)[] kv_caches, Tensor block_table_row, Tensor[] keeps, SymInt length, "
        "SymInt first) -> ()"
    )
    assert str(torch.ops.kvcompile.prune_copy.default._schema) == (
        "kvcompile::prune_copy(Tensor source_cache, Tensor source_row, Tensor(a!) kv_cache, Tensor block_table_row, "
        "Tensor keep, SymInt first) -> ()"
    )
    assert str(torch.ops.kvcompile.prune_select.default._schema) == (
        "kvcompile::prune_select(Tensor scores, SymInt keep, int sink, int window, float[] shares, int[] chunks, "
        "str[] reduces) -> Tensor"
    )
    assert str(torch.ops.kvcompile.prune_select_layers.default._schema) == (
        "kvcompile::prune_select_layers(Tensor[] scores, SymInt keep, int sink, int window, float[] shares, "
        "int[] chunks, str[] reduces) -> Tensor[]"
    )


def test_a_whole_prune_compiles_into_one_graph() -> None:
    method = parse_method("blend", window=WINDOW)

    def prune(query: torch.Tensor, cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        keep = select(prune_score(query, cache, row, 60, 0.125, method), method, 28)
        prune_compact([cache], row, [keep], 60, 32)
        return keep

    ours, theirs = make_prompt(60), make_prompt(60)
    compiled = torch.compile(prune, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ours.query, ours.cache, ours.row), prune(theirs.query, theirs.cache, theirs.row))
    assert torch.equal(ours.cache, theirs.cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(9, 6, 64)}, "query: given 9 tokens, allowed the window of andpro: 8"),
        ({"query": torch.zeros(8, 384)}, r"query: given torch.float32 \(8, 384\) on cpu, allowed \[window, heads,"),
        (
            {"query": torch.zeros(8, 6, 64).double()},
            "query: given torch.float64 .* allowed .* of torch.bfloat16,",
        ),
        ({"query": torch.zeros(8, 5, 64)}, "query: given 5 heads, allowed a multiple of the 2 KV heads of kv_cache"),
        ({"query": torch.zeros(8, 6, 80)}, "query: given head size 80, allowed that of kv_cache: 64"),
        ({"query": torch.zeros(8, 0, 64)}, "query: given 8 tokens of 0 heads, allowed 1 or more of each"),
        ({"length": 7}, "length: given 7 tokens, allowed at least the 8 of query, the observation window"),
        ({"length": 81}, "length: given 81 tokens, allowed at most the 80 that block_table_row has room for"),
        ({"length": 60}, "block_table_row: given block 1000000, allowed 0 to 5"),
        ({"scale": 0.0}, "scale: given 0.0, allowed a finite number above 0"),
        ({"kv_cache": torch.zeros(6, 2, 16, 2, 68)}, r"kv_cache: given torch.float32 .* allowed torch.int8"),
        ({"kv_cache": torch.zeros(6, 2, 8, 2, 68, dtype=torch.int8)}, "block_size: given 8, allowed a multiple of 16"),
        ({"block_table_row": torch.zeros(3, dtype=torch.int64)}, r"block_table_row: given torch.int64 \(3,\) on cpu"),
        (
            {"block_table_row": torch.tensor([1, 1, 2], dtype=torch.int32)},
            "block_table_row: given block 1 twice, allowed each block once: a row without its released columns",
        ),
        (
            {"method": parse_method("critical", window=8)},
            "output_weight: given None, allowed the weight of the layer's output projection",
        ),
        (
            {"method": parse_method("critical", window=8), "output_weight": torch.zeros(24, 128)},
            "output_weight: given 128 columns, allowed 384: heads times head size",
        ),
        (
            {"method": parse_method("critical", window=8), "output_weight": torch.zeros(24, dtype=torch.int8)},
            r"output_weight: given torch.int8 \(24,\) on cpu, allowed \[hidden, 384\] of a floating-point dtype",
        ),
    ],
)
def test_the_score_says_what_does_not_fit(change: dict, message: str) -> None:
    prompt = make_prompt(40)
    given = {
        "query": prompt.query,
        "kv_cache": prompt.cache,
        "block_table_row": prompt.row,
        "length": 40,
        "scale": 0.125,
        "method": parse_method("andpro", window=WINDOW),
    }
    with pytest.raises(ValueError, match=f"^kvcompile::prune_score: {message}"):
        prune_score(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "h2o"}, "method: given 'h2o', allowed andpro, snapkv, tova, streaming, critical, random, blend"),
        ({"sink": -1}, "sink: given -1, allowed 0 or more"),
        ({"kernel": 6}, "kernel: given 6, allowed an odd number from 1"),
        ({"epsilon": float("inf")}, "epsilon: given inf, allowed a finite number from 0"),
        ({"seed": -1}, "seed: given -1, allowed 0 to 4294967295"),
    ],
)
def test_the_operator_itself_says_what_a_method_cannot_be(change: dict, message: str) -> None:
    prompt = make_prompt(40)
    given = {"query": prompt.query, "kv_cache": prompt.cache, "block_table_row": prompt.row, "length": 40}
    with pytest.raises(ValueError, match=f"^kvcompile::prune_score: {message}"):
        torch.ops.kvcompile.prune_score(**{**given, "scale": 0.1, "method": "andpro", "sink": 4, **change})
