"""QServe's weights mean to us what they mean to QServe's kernels, byte by byte; what has no equal here is refused."""

from __future__ import annotations

import pytest
import torch
from tests.tools.qserve_layout import GROUP, as_the_kernel_reads, grouped, in_kernel_order, interleaved, per_channel

from kvcompile.ops.w4a8 import W4A8Weight, dequantize, rebuild
from kvcompile.tools.qserve import convert


def _codes(weight: W4A8Weight) -> torch.Tensor:
    pairs = [(int(byte) % 16, int(byte) // 16) for byte in weight.qweight.flatten()]
    return torch.tensor(pairs).view(weight.out_features, weight.in_features)


# --- the same values ------------------------------------------------------------------------------------------------


def test_the_order_of_the_elements_is_that_of_the_kernel():
    codes = torch.randint(0, 16, (64, 96), generator=torch.Generator().manual_seed(1))
    assert torch.equal(as_the_kernel_reads(interleaved(codes)), codes)


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (64, 256), (96, 384)])
def test_a_weight_by_groups_is_what_the_kernel_multiplies_with(rows, columns):
    tensors, codes, s2, z = grouped(rows, columns)
    weight = convert(tensors)
    assert weight.group_size == GROUP
    assert torch.equal(
        rebuild(weight).long(), as_the_kernel_reads(*(tensors[n] for n in ("qweight", "s2_scales", "s2_zeros")))
    )
    assert torch.equal(_codes(weight), codes)
    assert torch.equal(weight.group_scales.long(), s2)
    assert torch.equal(weight.channel_scales, tensors["s1_scales"].float())
    assert torch.equal((weight.group_zeros.long() * s2) % 256, (z * s2) % 256)


def test_that_comparison_reaches_both_ends_of_int8():
    values = rebuild(convert(grouped()[0]))
    assert int(values.min()) == -128
    assert int(values.max()) >= 120


def test_a_weight_by_channel_is_what_the_kernel_computes():
    tensors, codes, z = per_channel()
    weight = convert(tensors)
    assert torch.equal(rebuild(weight).long(), codes - z[:, None])
    wanted = codes * tensors["s1_scales"].double()[:, None] - tensors["s1_szeros"].double()[:, None]
    # s1_szeros is rounded to fp16, s1 and z are not.
    assert ((dequantize(weight).double() - wanted).abs() <= tensors["s1_szeros"].double()[:, None] * 2**-11).all()


@pytest.mark.parametrize(("z", "lowest", "highest"), [(2, 0, 5), (10, 6, 7)])
def test_of_two_zeros_that_are_equal_modulo_256_it_is_the_one_that_does_not_wrap(z, lowest, highest):
    tensors, *_ = grouped(32, 128)
    s2 = torch.full((32, 1), 32)
    codes = torch.arange(128).remainder(highest + 1 - lowest).add(lowest).expand(32, 128)
    tensors |= {"qweight": interleaved(codes), "s2_scales": in_kernel_order(s2), "s2_zeros": in_kernel_order(-z * s2)}
    weight = convert(tensors)
    assert weight.group_zeros.unique().tolist() == [z]
    read = as_the_kernel_reads(*(tensors[n] for n in ("qweight", "s2_scales", "s2_zeros")))
    assert torch.equal(rebuild(weight).long(), read)


def test_a_group_of_scale_zero_is_a_group_of_zeros():
    tensors, codes, s2, z = grouped(32, 256)
    s2[5, 1] = 0
    tensors |= {"s2_scales": in_kernel_order(s2), "s2_zeros": in_kernel_order(-z * s2)}
    weight = convert(tensors)
    read = as_the_kernel_reads(*(tensors[n] for n in ("qweight", "s2_scales", "s2_zeros")))
    assert torch.equal(rebuild(weight).long(), read)
    assert not rebuild(weight)[5, 128:].any()


# --- refused --------------------------------------------------------------------------------------------------------


def _refused(tensors: dict[str, torch.Tensor]) -> str:
    with pytest.raises(ValueError) as caught:
        convert(tensors)
    return str(caught.value)


def test_a_product_that_carries_into_the_next_weight_is_refused():
    tensors, codes, s2, z = grouped()
    s2[9, 1], codes[9, 200] = 18, 15
    tensors |= {"qweight": interleaved(codes), "s2_scales": in_kernel_order(s2)}
    assert _refused(tensors).startswith("row 9, group 1: its codes times s2 exceed 255")


@pytest.mark.parametrize("added", [-1, 1, 50])
def test_a_zero_that_is_no_multiple_of_the_scale_is_refused(added):
    tensors, codes, s2, z = grouped()
    s2[40, 0] = 13
    codes[40, :128] = 3
    zeros = -z * s2
    zeros[40, 0] = -39 + added
    tensors |= {"qweight": interleaved(codes), "s2_scales": in_kernel_order(s2), "s2_zeros": in_kernel_order(zeros)}
    assert _refused(tensors).startswith("row 40, group 0: its zero point is not a whole number of 0 to 15 times s2")


def test_a_weight_that_wraps_is_refused():
    tensors, codes, s2, z = grouped()
    s2[1, 1], z[1, 1] = 16, 0
    codes[1, 128:] = 8
    tensors |= {
        "qweight": interleaved(codes),
        "s2_scales": in_kernel_order(s2),
        "s2_zeros": in_kernel_order(-z * s2),
    }
    assert int(as_the_kernel_reads(*(tensors[n] for n in ("qweight", "s2_scales", "s2_zeros")))[1, 128]) == -128
    assert _refused(tensors) == "row 1, group 1: it has weights that wrap around int8"


@pytest.mark.parametrize("zero", [2.4, -1.0, 16.0, float("nan")])
def test_a_channel_zero_that_is_not_whole_is_refused(zero):
    tensors, *_ = per_channel()
    tensors["s1_szeros"][7] = zero * tensors["s1_scales"][7].float()
    assert _refused(tensors).startswith("row 7, group 0: its zero point is not a whole number of 0 to 15 times s1")


def test_a_channel_zero_that_is_whole_but_for_two_roundings_is_accepted():
    tensors, _, z = per_channel()
    exact = torch.linspace(0.0011, 0.0099, 32, dtype=torch.float64)
    tensors |= {"s1_scales": exact.half(), "s1_szeros": (z * exact).half()}
    assert torch.equal(convert(tensors).group_zeros[:, 0].long(), z)


WRONG = {
    "no qweight": (lambda t: t.pop("qweight"), "has s1_scales, s2_scales, s2_zeros; allowed are qweight and s1_scales"),
    "no zeros": (lambda t: t.pop("s2_zeros"), "has qweight, s1_scales, s2_scales; allowed are"),
    "both": (lambda t: t.update(s1_szeros=t["s1_scales"]), "allowed are qweight and s1_scales with either"),
    "rows": (lambda t: t.update(qweight=t["qweight"][:40]), "qweight is torch.int8 [40, 128]; allowed is torch.int8"),
    "columns": (lambda t: t.update(qweight=t["qweight"][:, :40]), "qweight is torch.int8 [64, 40]; allowed is"),
    "dtype": (lambda t: t.update(qweight=t["qweight"].view(torch.uint8)), "qweight is torch.uint8 [64, 128]"),
    "s1": (lambda t: t.update(s1_scales=t["s1_scales"][:32]), "s1_scales is [32]; allowed is [64], one a row"),
    "s1 zero": (lambda t: t["s1_scales"].zero_(), "channel_scales hold a value that is not finite and above 0"),
    "s2": (lambda t: t.update(s2_scales=t["s2_scales"][:, :32]), "s2_scales is torch.int8 [2, 32]; allowed is"),
    "groups": (lambda t: t.update(s2_zeros=t["s2_zeros"][:1]), "s2_scales is [2, 64], s2_zeros [1, 64]; allowed are"),
}


@pytest.mark.parametrize(("change", "says"), WRONG.values(), ids=WRONG)
def test_tensors_that_do_not_belong_together_are_refused(change, says):
    tensors, *_ = grouped()
    change(tensors)
    assert says in _refused(tensors)


def test_a_group_that_the_kernels_here_do_not_have_is_refused():
    tensors, codes, s2, z = grouped(32, 128)
    quarter = {"s2_scales": in_kernel_order(s2.expand(32, 4)), "s2_zeros": in_kernel_order((-z * s2).expand(32, 4))}
    assert "group size 32 does not fit 128 input channels" in _refused({**tensors, **quarter})


def test_the_tensors_that_are_given_are_left_alone():
    tensors, *_ = grouped()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    convert(tensors)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
