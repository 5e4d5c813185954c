"""How the decode kernel is cut: it fits every GPU that it can fit, and models that are served get full blocks."""

from __future__ import annotations

import pytest

from kvcompile.ops.kv8.decode_shape import SHARED_BYTES, TAIL_BYTES, WARPS, DecodeShape, decode_shape
from kvcompile.ops.kv8.layout import HEAD_SIZES

# Shared memory of a block, by architecture.
CAPABILITIES = {"sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_120": (12, 0)}
SHARED = {arch: SHARED_BYTES[capability] for arch, capability in CAPABILITIES.items()}
# (KV heads, query heads of each): Llama 3, its parts at 2 to 8 ranks, Mistral, Qwen2 and 3, Phi-3, SmolLM2.
MODELS = [(8, 4), (4, 4), (2, 4), (1, 4), (8, 8), (1, 8), (4, 7), (2, 7), (10, 4), (3, 3), (32, 1), (2, 16), (8, 5)]


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_model_gets_a_shape_that_fits(head_size: int, arch: str) -> None:
    for kv_heads, ratio in MODELS:
        shape = decode_shape(head_size, kv_heads, ratio, SHARED[arch])
        if (head_size, kv_heads) == (256, 10) and SHARED[arch] < 166912:
            assert shape is None  # two tiles of ten heads of 256 are 166,400 bytes
            continue
        assert shape is not None
        assert shape.shared_bytes + 16 * shape.stages <= SHARED[arch] and shape.threads <= 1024
        assert kv_heads % shape.group == 0 and (shape.group == kv_heads or shape.group % 4 == 0)
        assert shape.warps == shape.group * -(-ratio // 8) * shape.sharing
        assert shape.stages >= 2
        assert shape.warps <= WARPS or (shape.sharing == 1 and shape.group % 4)


def test_shapes_of_models_that_are_served_are_these() -> None:
    bytes_of_128 = 32 * 8 * 132
    assert decode_shape(128, 8, 4, SHARED["sm_90a"]) == DecodeShape(8, 1, 8, 4, 4 * bytes_of_128 + TAIL_BYTES)
    # Half the heads to a block, two warps to each, where shared memory is short.
    merged = 4 * 32 * (8 * 4 + 4) * 4
    assert decode_shape(128, 8, 4, SHARED["sm_89"]) == DecodeShape(
        4, 2, 8, 4, 4 * bytes_of_128 // 2 + merged + TAIL_BYTES
    )
    assert decode_shape(128, 1, 8, SHARED["sm_90a"]).sharing == 8


@pytest.mark.parametrize("arch", SHARED)
def test_no_shape_is_larger_than_a_block_may_be(arch: str) -> None:
    for head_size in HEAD_SIZES:
        for kv_heads in range(1, 65):
            for ratio in (1, 4, 9, 33):
                shape = decode_shape(head_size, kv_heads, ratio, SHARED[arch])
                assert shape is None or shape.shared_bytes + 16 * shape.stages <= SHARED[arch]


def test_what_cannot_fit_has_no_shape() -> None:
    assert decode_shape(128, 8, 4, 8 << 10) is None
    assert decode_shape(64, 35, 1, SHARED["sm_90a"]) is None  # more warps than a block may have
