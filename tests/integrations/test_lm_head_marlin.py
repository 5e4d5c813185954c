"""What vLLM's Marlin kernel is given of an int8 head, without a GPU: its order of codes and scales, its arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_test
from vllm.scalar_type import scalar_types

from kvcompile.integrations.vllm import lm_head
from tests.integrations.head_values import head_weight
from tests.integrations.w4a8_layers import inputs


@pytest.mark.parametrize("at_once", [1 << 23, 64 * 256], ids=["whole", "pieces"])
@pytest.mark.parametrize("rows", [320, 100])
def test_marlin_is_given_its_own_order_of_codes_and_scales(monkeypatch, rows, at_once):
    """By vLLM's own transcription of that order, which its tests of the kernel are written with."""
    weight = head_weight(rows, 256, torch.bfloat16)
    codes, scales = lm_head.quantise_rows(weight)
    padded = -(-rows // 64) * 64
    order = marlin_utils_test.get_weight_perm(8)

    def repack(words, perm, size_k, size_n, num_bits, is_a_8bit=False):
        assert (words.shape, words.dtype) == ((size_k // 4, size_n), torch.int32) and words.is_contiguous()
        assert (num_bits, is_a_8bit, perm.numel(), size_n % 64) == (8, False, 0, 0)
        unpacked = torch.stack([words >> 8 * i & 255 for i in range(4)], dim=1).reshape(size_k, size_n)
        return marlin_utils_test.marlin_weights(unpacked, size_k, size_n, 8, order)

    monkeypatch.setattr(_custom_ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(lm_head, "_ELEMENTS_AT_ONCE", at_once)
    tiles, given = lm_head._marlin(weight)
    unsigned = torch.full((padded, 256), 128, dtype=torch.int32)
    unsigned[:rows] = codes.int() + 128
    assert torch.equal(tiles, marlin_utils_test.marlin_weights(unsigned.t().contiguous(), 256, padded, 8, order))
    plain = torch.ones(1, padded, dtype=torch.bfloat16)
    plain[0, :rows] = scales
    assert torch.equal(given, marlin_utils.marlin_permute_scales(plain, 256, padded, -1))


def test_marlin_is_called_as_vllm_0_23_declares_it(monkeypatch):
    calls, declared = [], inspect.signature(_custom_ops.marlin_gemm)

    def gemm(*arguments, **named):
        given = declared.bind(*arguments, **named).arguments
        calls.append(given)
        return given["a"].new_zeros(given["size_m"], given["size_n"])

    monkeypatch.setattr(_custom_ops, "marlin_gemm", gemm)
    tiles, scales = torch.zeros(16, 4 * 320, dtype=torch.int32), torch.ones(1, 320).bfloat16()
    y = lm_head._marlin_product(inputs(3, 256), tiles, scales, torch.zeros(132, dtype=torch.int32))
    assert y.shape == (3, 320)
    (given,) = calls
    assert given["b_q_weight"] is tiles and given["b_scales"] is scales and given["b_q_type"] == scalar_types.uint8b128
    assert [given[name].numel() for name in ("b_zeros", "g_idx", "perm")] == [0, 0, 0]
    assert [given[name] for name in ("b_bias", "a_scales", "global_scale")] == [None, None, None]
    assert [given[name] for name in ("size_m", "size_n", "size_k", "use_fp32_reduce")] == [3, 320, 256, True]
