"""Two-level quantisation: the formula, its protective range, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.w4a8 import (
    W4A8Weight,
    check_weight,
    dequantize,
    encode,
    group_grid,
    is_legal_group,
    legal_group,
    quantize,
    rebuild,
)
from tests.ops.w4a8.weights import make_weight, naive_rebuild


def test_a_weight_by_hand() -> None:
    # Row 0: s1 = 1; its first group spans -15..119: s2 = round(134 / 15) = 9, z = round(15 / 9) = 2.
    row = torch.zeros(1, 128)
    row[0, :4] = torch.tensor([119.0, -15.0, 40.0, 5.0])
    row[0, 64:67] = torch.tensor([3.0, -4.0, 7.0])  # spans 11: s2 = 1, z = 4, exact
    weight = quantize(row, 64)
    assert weight.channel_scales.tolist() == [1.0]
    assert weight.group_scales.tolist() == [[9, 1]] and weight.group_zeros.tolist() == [[2, 4]]
    # 119 / 9 = 13.2 -> 13 + 2 = 15; -15 / 9 = -1.67 -> -2 + 2 = 0; 40 / 9 = 4.4 -> 6; 5 / 9 = 0.56 -> 3
    assert weight.qweight[0, :2].tolist() == [15 | 0 << 4, 6 | 3 << 4]
    assert rebuild(weight)[0, :4].tolist() == [117, -18, 36, 9]
    assert rebuild(weight)[0, 64:67].tolist() == [3, -4, 7]


def test_every_range_within_119_rebuilds_within_int8() -> None:
    low = torch.arange(-119, 120)
    lows, highs = torch.meshgrid(low, low, indexing="ij")
    pairs = torch.stack((lows, highs), -1)[lows <= highs].float()
    scales, zeros = group_grid(pairs)
    ends = (torch.cat(((pairs / scales[:, None]).round() + zeros[:, None], pairs * 0, pairs * 0 + 15), 1)).clamp(0, 15)
    rebuilt = (ends[:, :2] - zeros[:, None]) * scales[:, None]
    assert rebuilt.min() >= -128 and rebuilt.max() <= 127
    assert scales.min() == 1 and scales.max() == 16
    # Half a step for the rounding of z, a step for what 16 levels leave out.
    assert ((rebuilt - pairs).abs() <= 1.5 * scales[:, None]).all()


def test_128_as_range_would_wrap() -> None:
    """Why 119: with +-128 the formula leaves int8, and the checked encoder says so."""
    level1 = torch.zeros(1, 64)
    level1[0, :2] = torch.tensor([-128.0, 127.0])
    scales, zeros = group_grid(level1.unflatten(1, (1, 64)))
    with pytest.raises(ValueError, match=r"row 0, group 0 rebuilds to -136\.\.119; allowed is -128\.\.127"):
        encode(level1, torch.ones(1), scales, zeros)


@pytest.mark.parametrize(("rows", "columns", "group"), [(3, 64, 64), (5, 128, 64), (2, 192, 192), (7, 48, 48)])
def test_rebuilt_values_are_those_of_the_definition(rows: int, columns: int, group: int) -> None:
    weight = make_weight(rows, columns, group).plain
    assert torch.equal(rebuild(weight).long(), naive_rebuild(weight))
    assert torch.equal(dequantize(weight), naive_rebuild(weight).float() * weight.channel_scales[:, None])


@pytest.mark.parametrize("group", [64, 128, 4096])
def test_the_error_is_within_the_steps_of_both_levels(group: int) -> None:
    weight = torch.randn(32, 4096, generator=torch.Generator().manual_seed(3))
    quantised = quantize(weight, group)
    step = quantised.channel_scales[:, None] * (1.5 * quantised.group_scales.repeat_interleave(group, 1).float() + 0.5)
    # Half a step of the first level, and of the second a step and a half at the ends of a group's range.
    error = (dequantize(quantised) - weight).abs()
    assert (error <= step).all() and error.mean() < step.mean() / 3


def test_rows_of_zeros_denormals_and_huge_values() -> None:
    weight = torch.zeros(4, 128)
    weight[1] = 1e-42
    weight[2, ::2], weight[2, 1::2] = 3e38, -3e38
    weight[3, 7] = -6e4
    quantised = quantize(weight, 64)
    assert torch.isfinite(quantised.channel_scales).all()
    values = dequantize(quantised)
    assert torch.isfinite(values).all() and not values[0].any()
    assert torch.allclose(values[2], weight[2], rtol=0.07) and values[3, 7].item() == pytest.approx(-6e4, rel=0.07)


def test_the_argument_is_left_alone_and_half_precision_is_taken() -> None:
    weight = torch.randn(8, 128).bfloat16()
    before = weight.clone()
    assert torch.equal(rebuild(quantize(weight, 64)), rebuild(quantize(before.float(), 64)))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_row(bad: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match="not finite in row 2"):
        quantize(weight, 64)


@pytest.mark.parametrize(
    ("columns", "group", "legal"),
    [
        (4096, 128, True),
        (4096, 64, True),
        (4096, 4096, True),
        (4096, 96, False),
        (4304, 128, False),
        (4304, 4304, True),
        (576, 128, False),
        (576, 192, True),
        (100, 100, False),
        (64, 128, False),
        (0, 0, False),
        (4096, 0, False),
        (4096, -64, False),
    ],
)
def test_which_groups_are_legal(columns: int, group: int, legal: bool) -> None:
    assert is_legal_group(columns, group) is legal


def test_a_group_that_does_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="group size 128 does not fit 576 input channels"):
        quantize(torch.randn(4, 576), 128)
    with pytest.raises(ValueError, match="at most 131008"):
        quantize(torch.zeros(1, 2**18), 128)


@pytest.mark.parametrize(
    ("columns", "wanted", "got"), [(4096, 128, 128), (576, 128, 64), (4304, 128, 4304), (48, 128, 48), (1536, 256, 256)]
)
def test_the_largest_legal_group(columns: int, wanted: int, got: int) -> None:
    assert legal_group(columns, wanted) == got


def test_no_group_makes_a_row_of_odd_length_legal() -> None:
    with pytest.raises(ValueError, match="in_features is 100; allowed are positive multiples of 16"):
        legal_group(100, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qweight": torch.zeros(4, 32)}, "qweight is torch.float32"),
        ({"group_zeros": torch.full((4, 1), 16, dtype=torch.uint8)}, "group_zeros hold 16"),
        ({"group_scales": torch.zeros(4, 1, dtype=torch.uint8)}, "group_scales hold a 0"),
        ({"group_scales": torch.ones(4, 2, dtype=torch.uint8)}, "equal shapes"),
        ({"group_scales": torch.full((4, 1), 17, dtype=torch.uint8)}, "rebuilds to"),
        ({"channel_scales": torch.full((4,), float("inf"))}, "not finite"),
        ({"channel_scales": torch.zeros(4)}, "not finite and above 0"),
        ({"channel_scales": torch.ones(3)}, "the first of 4"),
    ],
)
def test_a_malformed_weight_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    codes = torch.arange(32, dtype=torch.uint8).repeat(4, 1) * 7
    good = W4A8Weight(
        codes, torch.ones(4, 1, dtype=torch.uint8), torch.full((4, 1), 7, dtype=torch.uint8), torch.ones(4)
    )
    check_weight(good)
    with pytest.raises(ValueError, match=message):
        check_weight(good._replace(**change))


@pytest.mark.parametrize("wanted", [0, -1, -64, 64.0, "64", True, None])
def test_a_group_of_at_most_nothing_is_refused(wanted) -> None:
    with pytest.raises(ValueError) as caught:
        legal_group(128, wanted)
    assert str(caught.value) == f"wanted is {wanted!r}; allowed is a whole number from 1"


@pytest.mark.parametrize("group", [64.0, "64", True, None, [64]])
def test_a_group_that_is_no_whole_number_is_refused(group) -> None:
    with pytest.raises(ValueError) as caught:
        quantize(torch.ones(2, 128), group)
    assert str(caught.value) == f"group_size is {group!r}; allowed is a whole number from 1"
