"""The scale search: never worse than rounding, always in range, and as good as trying everything."""

import itertools

import pytest
import torch

from kvcompile.ops.w4a8 import W4A8Weight, check_weight, dequantize, quantize, rebuild
from kvcompile.tools.quantize_search import encode, group_parameters, refit, search


def _weights(kind, rows=24, width=192):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, width, generator=generator)
    if kind == "outliers":
        weight[:, 5] *= 60
        weight[3, 100] = 6e4
    elif kind == "one-sided":
        weight = weight.abs() + 0.5
    elif kind == "zero rows":
        weight[::3] = 0
        weight[1, 64:128] = 0
    elif kind == "denormal":
        weight *= 1e-39
    elif kind == "tails":
        weight = weight**3
    return weight


KINDS = ("normal", "outliers", "one-sided", "zero rows", "denormal", "tails")


@pytest.mark.parametrize("group_size", [64, 192])
@pytest.mark.parametrize("kind", KINDS)
def test_no_channel_is_worse_than_by_rounding_and_all_are_in_range(kind, group_size):
    weight = _weights(kind)
    before = weight.clone()
    found = search(weight, group_size)
    check_weight(found)
    errors = [(dequantize(w).double() - weight.double()).square().sum(1) for w in (found, quantize(weight, group_size))]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())
    assert torch.equal(weight, before)


@pytest.mark.parametrize("group_size", [64, 192])
def test_the_error_of_ordinary_weights_falls(group_size):
    weight = _weights("normal", rows=64)
    errors = [
        (dequantize(w) - weight).square().sum() for w in (search(weight, group_size), quantize(weight, group_size))
    ]
    assert errors[0] < 0.93 * errors[1]


def test_inputs_that_matter_more_get_smaller_errors():
    weight, importance = _weights("tails"), torch.ones(192)
    importance[40:60] = 1000
    plain, weighted = (dequantize(search(weight, 64, some)) for some in (None, importance))
    errors = [((w - weight).square() * importance).sum() for w in (plain, weighted)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_searched_as_they_are(dtype):
    weight = _weights("normal").to(dtype)
    for mine, wanted in zip(search(weight, 64), search(weight.float(), 64), strict=True):
        assert torch.equal(mine, wanted)


def test_blocks_of_rows_do_not_change_the_result(monkeypatch):
    weight = _weights("tails", rows=23)
    whole = search(weight, 64)
    monkeypatch.setattr("kvcompile.tools.quantize_search._BLOCK", 5 * 192)
    for mine, wanted in zip(search(weight, 64), whole, strict=True):
        assert torch.equal(mine, wanted)


def test_group_parameters_come_close_to_the_best_of_all():
    units = torch.randn(64, 40, generator=torch.Generator().manual_seed(1)) * 35
    units.clamp_(-119, 119)

    def error(s2, z):
        return (((encode(units, s2, z) - z) * s2) - units).square().sum(0)

    everything = torch.stack(
        [error(torch.tensor(float(s2)), torch.tensor(float(z))) for s2, z in itertools.product(range(1, 30), range(16))]
    )
    found = error(*group_parameters(units))
    assert bool((found >= everything.amin(0) - 1e-2).all())
    assert found.sum() < 1.01 * everything.amin(0).sum()


def test_codes_never_rebuild_outside_int8_whatever_the_parameters():
    s2 = torch.arange(1, 256).float()[:, None, None]
    z = torch.arange(16).float()[None, :, None]
    units = torch.tensor([-400.0, -128.5, -1.0, 0.0, 0.4, 127.6, 400.0])
    codes = encode(units, s2, z)
    values = (codes - z) * s2
    assert values.min() >= -128 and values.max() <= 127
    assert codes.min() >= 0 and codes.max() <= 15
    assert bool((codes == codes.round()).all())


def test_the_refitted_scale_is_the_least_squares_one():
    units = torch.tensor([[1.0, 2.0, -3.0], [0.0, 0.0, 0.0]])
    weight = torch.tensor([[0.5, 1.5, -1.0], [0.1, 0.0, 0.0]])
    assert refit(weight, units, torch.tensor([9.0, 7.0])).tolist() == pytest.approx([6.5 / 14, 7.0])


def test_the_parts_are_those_of_a_w4a8_weight():
    found = search(_weights("normal"), 64)
    assert isinstance(found, W4A8Weight)
    assert rebuild(found).dtype == torch.int8
