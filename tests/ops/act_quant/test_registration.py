"""The operators are what torch.library asks of one: schema, fake, no hidden aliasing, usable under torch.compile."""

from __future__ import annotations

import pytest
import torch

import kvcompile.ops.act_quant  # noqa: F401
from tests.ops.act_quant.rows import EPS, OPERATORS, make_arguments


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck_finds_nothing_wrong(op: str, dtype: torch.dtype, tokens: int) -> None:
    torch.library.opcheck(getattr(torch.ops.kvcompile, op).default, make_arguments(op, tokens, 24, dtype))


def test_opcheck_finds_nothing_wrong_with_rows_of_a_wider_tensor() -> None:
    x = torch.randn(5, 40).bfloat16()[:, 3:27]
    torch.library.opcheck(torch.ops.kvcompile.quant_per_token.default, (x,))
    torch.library.opcheck(torch.ops.kvcompile.silu_mul_quant.default, (x,))
    weight = torch.ones(24).bfloat16()
    torch.library.opcheck(torch.ops.kvcompile.rms_norm_quant.default, (x, weight, EPS))
    torch.library.opcheck(torch.ops.kvcompile.fused_add_rms_norm_quant.default, (x, x, weight, EPS))


def test_all_compile_into_one_graph_with_a_dynamic_number_of_tokens() -> None:
    def step(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        ops = torch.ops.kvcompile
        outs = [*ops.quant_per_token(x * 2), *ops.rms_norm_quant(x, weight, EPS), *ops.silu_mul_quant(x)]
        return [*outs, *ops.fused_add_rms_norm_quant(x, residual, weight, EPS)]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5, 9):
        arguments = make_arguments("fused_add_rms_norm_quant", tokens, 32, torch.bfloat16)[:3]
        for ours, theirs in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(ours, theirs)


def test_a_fake_on_two_devices_is_refused_while_tracing() -> None:
    x = torch.zeros(2, 8, device="meta")
    with pytest.raises(ValueError, match="weight: given cpu, allowed the device of x: meta"):
        torch.ops.kvcompile.rms_norm_quant(x, torch.zeros(8), EPS)


def test_the_schemas() -> None:
    assert [str(getattr(torch.ops.kvcompile, op).default._schema) for op in OPERATORS] == [
        "kvcompile::quant_per_token(Tensor x) -> (Tensor, Tensor)",
        "kvcompile::rms_norm_quant(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
        "kvcompile::fused_add_rms_norm_quant(Tensor x, Tensor residual, Tensor weight, float eps) -> "
        "(Tensor, Tensor, Tensor)",
        "kvcompile::silu_mul_quant(Tensor gate_up) -> (Tensor, Tensor)",
    ]
