"""The rotary embedding kernel against the CPU operator and vLLM's compiled forward, alone, in graphs and in chains."""

from __future__ import annotations

import pytest
import torch

from kvcompile.ops.act_quant import quant_per_token
from kvcompile.ops.kv8 import kv8_decode, kv8_store, plan_decode
from kvcompile.ops.rotary import cuda, rotary
from tests.ops.kv8.batches import make_batch
from tests.ops.rotary.heads import Heads, make_heads

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
# Eight pairs a thread, and one where half a head is no multiple of eight.
SHAPES = [
    (1, 1, 1, 2),
    (5, 9, 3, 64),
    (33, 32, 8, 128),
    (7, 8, 1, 96),
    (6, 10, 2, 72),
    (3, 64, 8, 256),
    (700, 32, 8, 128),
]


def _on_gpu(heads: Heads) -> Heads:
    """With the same strides; NaN around query and key, where they are parts of a wider tensor."""
    wide = heads.query._base.cuda()
    offsets = (x.storage_offset() for x in heads[:2])
    query, key = (wide[:, at : at + x.shape[1]] for at, x in zip(offsets, heads[:2], strict=True))
    return Heads(query, key, heads.positions.cuda(), heads.cos_sin_cache.cuda())


def _assert_same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.cpu(), y.cpu())


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_is_bit_for_bit_that_of_the_cpu(
    shape: tuple[int, int, int, int], dtype: torch.dtype, settled: bool
) -> None:
    heads = make_heads(*shape, dtype)
    on_gpu = _on_gpu(heads)
    torch.cuda.synchronize()
    _assert_same(rotary(*on_gpu, settled), rotary(*heads))


@pytest.mark.parametrize("around", [1, 4, 8, 13])
def test_parts_of_a_wider_tensor_are_turned_wherever_they_begin(around: int) -> None:
    heads = make_heads(9, 9, 3, 64, torch.bfloat16, around=around)
    _assert_same(rotary(*_on_gpu(heads)), rotary(*heads))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_vllms_forward_compiled_gives_the_same_bits(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    compiled = torch.compile(RotaryEmbedding.forward_static, fullgraph=True, dynamic=True)
    for tokens in (3, 32, 700):
        query, key, positions, table = _on_gpu(make_heads(tokens, 32, 8, 128, dtype, seed=tokens))
        _assert_same(rotary(query, key, positions, table), compiled(positions, query, key, 128, 128, table, True))


def test_nothing_is_written_but_the_results() -> None:
    heads = _on_gpu(make_heads(17, 9, 3, 64, torch.bfloat16, around=8))
    before = [x.clone() for x in heads]
    ours = rotary(*heads)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(heads, before, strict=True))
    assert all(x.isfinite().all() for x in ours)


def test_no_tokens_launch_nothing() -> None:
    query, key = rotary(*(x.cuda() for x in make_heads(0, 4, 2, 64, torch.bfloat16)))
    assert (query.shape, key.shape) == ((0, 256), (0, 128)) and query.is_cuda
    torch.cuda.synchronize()


def test_fp32_is_refused_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="query: given torch.float32 on cuda:0, allowed torch.bfloat16, torch.float16"):
        rotary(*(x.cuda() for x in make_heads(2, 4, 2, 64, torch.float32)))


def test_heads_are_read_with_eight_pairs_a_thread_only_where_all_of_them_are_aligned() -> None:
    assert (
        cuda.split(64, 12, True).width == 8 and cuda.split(72, 12, True).width == cuda.split(64, 12, False).width == 1
    )


@pytest.mark.parametrize("tokens", [32, 700])
def test_a_graph_captured_on_a_side_stream_turns_the_data_of_the_replay(tokens: int) -> None:
    static = _on_gpu(make_heads(tokens, 32, 8, 128, torch.bfloat16))
    rotary(*static)  # compiles and loads
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        outputs = rotary(*static)
    for seed in (11, 12):
        heads = make_heads(tokens, 32, 8, 128, torch.bfloat16, seed=seed)
        for ours, new in zip(static, heads, strict=True):
            ours.copy_(new)
        for each in outputs:
            each.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        _assert_same(outputs, rotary(*heads))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("tokens", [1, 32, 700])
def test_a_kernel_sees_all_that_the_one_before_it_wrote(tokens: int, settled: bool) -> None:
    """Early start is not early reading: each turns what the last one produced, in a chain of programmatic launches."""
    heads = make_heads(tokens, 32, 8, 128, torch.bfloat16)
    query, key, positions, table = _on_gpu(heads)
    torch.cuda.synchronize()
    theirs = heads[:2]
    for _ in range(20):
        query, key = rotary(query, key, positions, table, settled)
        theirs = rotary(*theirs, *heads[2:])
    _assert_same((query, key), theirs)


def test_a_decode_layer_of_programmatic_launches_in_a_graph_is_that_of_separate_launches() -> None:
    """Quantiser, rotary embedding, store, decode and quantiser, each of which may start before the last has ended."""
    batch = make_batch([(559, 1)] * 32, heads=32, kv_heads=8, head_size=128)
    cache, table, lengths = (x.cuda() for x in (batch.cache, batch.block_table, batch.seq_lens))
    last = lengths - 1
    slots = table[torch.arange(32, device="cuda"), last // 16].long() * 16 + last % 16
    positions, angles = last.long(), make_heads(1, 1, 1, 128, torch.bfloat16, rows=600).cos_sin_cache.cuda()
    qkv = torch.randn(32, 48 * 128, device="cuda").bfloat16()
    output, plan = torch.zeros(32, 32, 128, device="cuda").bfloat16(), plan_decode(table, lengths, 16)

    def layer(wait) -> tuple[torch.Tensor, ...]:
        quant_per_token(qkv), wait()
        query, key = rotary(qkv[:, :4096], qkv[:, 4096:5120], positions, angles, True)
        wait()
        kv8_store(key.view(32, 8, 128), qkv[:, 5120:].view(32, 8, 128), cache, slots), wait()
        kv8_decode(query.view(32, 32, 128), cache, table, lengths, output, batch.scale, plan, settled=True), wait()
        return *quant_per_token(output.view(32, 4096)), query, key

    layer(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = layer(lambda: None)
    for seed in range(5):
        torch.manual_seed(seed)
        qkv.normal_()
        wanted = [x.clone() for x in layer(torch.cuda.synchronize)]
        stored = cache.clone()
        cache[slots // 16, :, slots % 16] = 0
        for each in (output, *ours[2:]):
            each.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        _assert_same(ours, tuple(wanted))
        assert torch.equal(cache, stored)


def test_opcheck_finds_nothing_wrong_on_a_gpu() -> None:
    torch.library.opcheck(torch.ops.kvcompile.rotary.default, tuple(_on_gpu(make_heads(5, 4, 2, 64, torch.bfloat16))))
