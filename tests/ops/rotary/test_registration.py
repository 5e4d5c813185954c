"""The operator is what torch.library asks of one: schema, fake, no hidden aliasing, usable under torch.compile."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.rotary import rotary
from tests.ops.rotary.heads import make_heads


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_opcheck_finds_nothing_wrong_with_parts_of_a_wider_tensor(dtype: torch.dtype, tokens: int) -> None:
    torch.library.opcheck(torch.ops.kvcompile.rotary.default, make_heads(tokens, 4, 2, 8, dtype, around=3))


def test_opcheck_finds_nothing_wrong_without_tokens() -> None:
    heads = make_heads(0, 4, 2, 8, torch.bfloat16)
    torch.library.opcheck(
        torch.ops.kvcompile.rotary.default, tuple(x.clone(memory_format=torch.contiguous_format) for x in heads)
    )


def test_it_compiles_into_one_graph_with_a_dynamic_number_of_tokens() -> None:
    compiled = torch.compile(lambda *heads: rotary(*heads), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5, 9):
        heads = make_heads(tokens, 4, 2, 8, torch.bfloat16)
        assert all(torch.equal(x, y) for x, y in zip(compiled(*heads), rotary(*heads), strict=True))


def test_a_fake_on_two_devices_is_refused_while_tracing() -> None:
    query, key, positions, table = make_heads(2, 4, 2, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="key: given cpu, allowed the device of query: meta"):
        torch.ops.kvcompile.rotary(query.to("meta"), key, positions, table)


def test_the_schema() -> None:
    assert str(torch.ops.kvcompile.rotary.default._schema) == (
        "kvcompile::rotary(Tensor query, Tensor key, Tensor positions, Tensor cos_sin_cache, bool settled=False) -> "
        "(Tensor, Tensor)"
    )
