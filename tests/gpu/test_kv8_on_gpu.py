"""The kernels of the int8 cache against the CPU's bytes, float64 and vLLM's own, in CUDA graphs and out of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvcompile.ops.kv8 import HEAD_SIZES, cuda, kv8_decode, kv8_dequantise, kv8_store, reference
from tests.gpu.kv8_outputs import all_slots, assert_close, assert_like_reference, decode
from tests.ops.kv8.batches import POISON, make_batch, poisoned_cache

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
LENGTHS = [
    [1],
    [17, 5, 300],
    [4000],
    [544] * 64,
    [1, 16, 15, 33, 1000, 2, 129, 32],
]
GROUPS = [(32, 8), (8, 8), (9, 3), (8, 1), (32, 2), (40, 10), (16, 1), (28, 4), (32, 32)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_the_store_writes_the_bytes_of_the_cpu_and_no_others(
    head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for kv_heads, tokens in ((1, 3), (3, 70), (8, 300)):
        # Out of a wider tensor, as from a fused qkv projection.
        key, value = (torch.randn(tokens, 2 * kv_heads, head_size) * 3).to(dtype).chunk(2, 1)
        key[0], value[-1] = 0, 3e4
        key[1, 0, 5], value[1, 0, 0] = float("nan"), float("inf")
        cache = poisoned_cache(tokens // block_size + 3, block_size, kv_heads, head_size)
        slots = torch.randperm(cache.shape[0] * block_size)[: tokens - 1]
        slots[::7] = -1
        wanted = cache.clone()
        kv8_store(key, value, wanted, slots)
        found = cache.cuda()
        both = torch.cat([key, value], 1).cuda()
        kv8_store(*both.chunk(2, 1), found, slots.cuda())
        written = _vectors(wanted)
        ours = _vectors(found.cpu())
        # The scale of what is not finite is some NaN or infinity.
        finite = written[..., head_size:].contiguous().view(torch.float32).isfinite().squeeze(-1)
        poison = (written == POISON).all(-1)
        assert torch.equal(ours[finite | poison], written[finite | poison])
        odd = ours[~(finite | poison)]
        assert not odd[..., head_size:].contiguous().view(torch.float32).isfinite().any()
        assert not odd[..., :head_size].any()


def _vectors(cache: torch.Tensor) -> torch.Tensor:
    return cache.reshape(-1, cache.shape[-1])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_decode_of_every_head_size_is_that_of_float64(lengths: list[int], head_size: int, dtype: torch.dtype) -> None:
    batch = make_batch([(n - 1, 1) for n in lengths], heads=8, kv_heads=2, head_size=head_size, dtype=dtype)
    assert_like_reference(batch, decode(batch))


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_of_every_ratio_of_heads_is_that_of_float64(block_size: int, heads: int, kv_heads: int) -> None:
    rows = [(n - 1, 1) for n in (1, 16, 65, 700)]
    batch = make_batch(rows, heads=heads, kv_heads=kv_heads, head_size=128, block_size=block_size)
    assert_like_reference(batch, decode(batch, planned=True))


@pytest.fixture
def before_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The copies of architectures before compute capability 9.0, and the 99 KiB of shared memory of 8.6 and 8.9."""
    defines, shape = cuda.decode_defines, cuda.decode_shape
    monkeypatch.setattr(cuda, "decode_defines", lambda *given: {**defines(*given), "BULK_COPIES": 0})
    monkeypatch.setattr(cuda, "decode_shape", lambda *given: shape(*given[:-1], 99 << 10))
    cuda.decode_kernels.cache_clear()
    yield
    cuda.decode_kernels.cache_clear()


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(32, 8, 128), (9, 3, 80), (8, 1, 256), (32, 32, 64)])
def test_decode_by_the_copies_of_older_architectures_is_that_of_float64(
    before_hopper: None, heads: int, kv_heads: int, head_size: int, lengths: list[int]
) -> None:
    batch = make_batch([(n - 1, 1) for n in lengths], heads=heads, kv_heads=kv_heads, head_size=head_size)
    assert_like_reference(batch, decode(batch))


def test_rows_without_tokens_give_zeros_wherever_they_stand() -> None:
    batch = make_batch([(-1, 1), (20, 1), (-1, 1), (-1, 1), (299, 1), (-1, 1)], heads=8)
    output = decode(batch)
    assert_like_reference(batch, output)
    assert not output[[0, 2, 3, 5]].any()


def test_more_rows_than_the_plan_has_threads_are_all_right() -> None:
    batch = make_batch([(n % 37, 1) for n in range(2100)], heads=4, kv_heads=2)
    assert_like_reference(batch, decode(batch))


@pytest.mark.parametrize("released", [[1, 0, 3], [2, 2, 4], [0, 1, 0]])
def test_released_pages_are_neither_read_nor_attended_to(released: list[int]) -> None:
    batch = make_batch([(47, 1), (40, 1), (99, 1)], heads=8, head_size=128)
    held = make_batch([(47, 1), (40, 1), (99, 1)], heads=8, head_size=128)
    for row, pages in enumerate(released):
        batch.block_table[row, :pages] = 0
        held.block_table[row] = held.block_table[row].roll(-pages)
        held.seq_lens[row] -= 16 * pages
    assert (batch.cache[0] == POISON).all()
    output = decode(batch)
    expected = reference.attention(held.query, held.cache, *held.tensors, held.scale)
    assert_close(output, expected)


def test_a_row_of_released_pages_alone_gives_zeros() -> None:
    batch = make_batch([(31, 1), (40, 1)], heads=8)
    batch.block_table[0, :2] = 0
    assert not decode(batch)[0].any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_huge_tiny_and_zero_vectors_are_those_of_float64(dtype: torch.dtype) -> None:
    batch = make_batch([(70, 1), (200, 1), (15, 1)], heads=8, dtype=dtype)
    factors = torch.tensor([3e4, 1e-4, 0.0, 1.0])[torch.arange(batch.value.shape[0]) % 4]
    value = (torch.randn(batch.value.shape) * factors[:, None, None]).clamp(-6e4, 6e4).to(dtype)
    slots = all_slots(batch)
    kv8_store(torch.zeros_like(batch.key), value, batch.cache, slots)
    output = decode(batch)
    assert_like_reference(batch, output)
    tiny = batch.query * (1e-6 if dtype == torch.float16 else 1e-30)
    batch.query = tiny
    assert_like_reference(batch, decode(batch))
    # Scores of hundreds: one token takes all the weight.
    batch.query = torch.full_like(tiny, 50.0)
    kv8_store((batch.key * 20).to(dtype), value, batch.cache, slots)
    assert_like_reference(batch, decode(batch))


def test_a_query_out_of_a_wider_tensor_is_that_of_a_copy() -> None:
    batch = make_batch([(70, 1), (200, 1)], heads=8, head_size=128)
    wide = torch.full((2, 20, 128), float("nan"), dtype=batch.query.dtype, device="cuda")
    wide[:, :8] = batch.query.cuda()
    cache, table, lengths = batch.cache.cuda(), batch.block_table.cuda(), batch.seq_lens.cuda()
    output = torch.empty_like(batch.query, device="cuda")
    kv8_decode(wide[:, :8], cache, table, lengths, output, batch.scale)
    assert torch.equal(output.cpu(), decode(batch))


def test_blocks_that_lie_further_apart_than_they_are_long_are_read_where_they_are() -> None:
    batch = make_batch([(70, 1), (200, 1)], heads=8, head_size=128)
    cache = batch.cache
    page = cache[0].numel()
    spread = torch.full((cache.shape[0], page + 256), POISON, dtype=torch.int8)
    view = spread.as_strided(cache.shape, (page + 256, *cache.stride()[1:]))
    view.copy_(cache)
    device = torch.empty_like(spread, device="cuda")
    device.copy_(spread)
    batch_output = decode(batch)
    output = torch.empty_like(batch.query, device="cuda")
    there = device.as_strided(cache.shape, view.stride())
    kv8_decode(batch.query.cuda(), there, batch.block_table.cuda(), batch.seq_lens.cuda(), output, batch.scale)
    assert torch.equal(output.cpu(), batch_output)


@pytest.mark.parametrize("planned", [False, True], ids=["plan in the graph", "plan before each replay"])
def test_a_graph_captured_with_empty_rows_replays_batches_longer_than_any_before(planned: bool) -> None:
    rows, heads, kv_heads, head_size = 8, 8, 2, 128
    batches = [
        make_batch([(n - 1, 1) for n in lengths], heads=heads, kv_heads=kv_heads, head_size=head_size, seed=seed)
        for seed, lengths in enumerate([[5, 1, 30, 17, 16, 64, 3, 2], [3000, 1, 0, 700, 0, 16, 15, 0], [0] * 8])
    ]
    blocks = max(batch.cache.shape[0] for batch in batches)
    columns = max(batch.block_table.shape[1] for batch in batches)
    cache = poisoned_cache(blocks, 16, kv_heads, head_size).cuda()
    query = torch.zeros(rows, heads, head_size, dtype=torch.bfloat16, device="cuda")
    output = torch.empty_like(query)
    table = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    plan = [torch.zeros(rows + 1, dtype=torch.int32, device="cuda"), torch.zeros_like(lengths)] if planned else None

    def step() -> None:
        kv8_decode(query, cache, table, lengths, output, head_size**-0.5, plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        cache.fill_(POISON)
        cache[: batch.cache.shape[0]] = batch.cache.cuda()
        table.fill_(10**6)
        table[:, : batch.block_table.shape[1]] = batch.block_table.cuda()
        query.copy_(batch.query)
        lengths.copy_(batch.seq_lens)
        output.fill_(float("nan"))
        if plan:
            cuda.plan_into(table, lengths, 16, *plan)
        graph.replay()
        assert_like_reference(batch, output.cpu())


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_layers_that_follow_each_other_at_once_do_not_disturb_each_other(captured: bool) -> None:
    """Programmatic launches: a layer's store and decode begin while the layer before ends."""
    batches = [make_batch([(600, 1), (33, 1), (1500, 1)], heads=8, head_size=128, seed=seed) for seed in range(12)]
    alone = [decode(batch) for batch in batches]
    on_gpu = [tuple(x.cuda() for x in (b.query, b.cache, b.block_table, b.seq_lens)) for b in batches]
    outputs = [torch.full_like(query, float("nan")) for query, *_ in on_gpu]
    stored = [(b.key.cuda(), b.value.cuda(), all_slots(b).cuda()) for b in batches]

    def layers() -> None:
        for (query, cache, table, lengths), output, (key, value, slots), batch in zip(
            on_gpu, outputs, stored, batches, strict=True
        ):
            kv8_store(key, value, cache, slots)
            kv8_decode(query, cache, table, lengths, output, batch.scale)

    run = layers
    if captured:
        layers()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        run = graph.replay
    for (_, cache, *_), output in zip(on_gpu, outputs, strict=True):
        cache.fill_(POISON)
        output.fill_(float("nan"))
    torch.cuda.synchronize()
    run()
    for output, expected in zip(outputs, alone, strict=True):
        assert torch.equal(output.cpu(), expected)


def test_blocks_further_than_2_gib_into_the_cache_are_found() -> None:
    batch = make_batch([(70, 1), (500, 1)], heads=32, kv_heads=8, head_size=128)
    expected = decode(batch)
    small, blocks = batch.cache.cuda(), 70_000
    cache = torch.full((blocks, *small.shape[1:]), POISON, dtype=torch.int8, device="cuda")
    base = blocks - small.shape[0]
    assert base * cache.stride(0) > 1 << 31
    table = torch.where(batch.block_table < blocks, batch.block_table + base, batch.block_table).cuda()
    kv8_store(batch.key.cuda(), batch.value.cuda(), cache, all_slots(batch).cuda() + base * 16)
    assert torch.equal(cache[base + 1], small[1])
    output = torch.empty_like(batch.query, device="cuda")
    kv8_decode(batch.query.cuda(), cache, table, batch.seq_lens.cuda(), output, batch.scale)
    assert torch.equal(output.cpu(), expected)
    starts, begins = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 60, 100], [3, 400]))
    found = [torch.zeros(100, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    kv8_dequantise(cache, table, starts, begins, *found[:2])
    kv8_dequantise(small, batch.block_table.cuda(), starts, begins, *found[2:])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_dequantised_spans_are_those_of_the_cpu(head_size: int, dtype: torch.dtype) -> None:
    batch = make_batch([(100, 1), (40, 1), (5, 1), (300, 1)], head_size=head_size, kv_heads=3, heads=3)
    starts = torch.tensor([0, 60, 60, 64, 300], dtype=torch.int32)
    begins = torch.tensor([16, 3, 1, 64], dtype=torch.int32)
    # 310 tokens of 3 heads are no whole number of thread blocks; what lies behind them is somebody else's.
    made = [torch.full((320, 3, head_size), 7.0, dtype=dtype) for _ in range(2)]
    on_gpu = [x.cuda() for x in made]
    kv8_dequantise(batch.cache, batch.block_table, starts, begins, *(x[:310] for x in made))
    given = (x.cuda() for x in (batch.cache, batch.block_table, starts, begins))
    kv8_dequantise(*given, *(x[:310] for x in on_gpu))
    for ours, theirs in zip(on_gpu, made, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert (made[0][300:] == 7).all() and not made[1][300:310].any() and (made[1][310:] == 7).all()


def test_what_the_kernels_cannot_take_is_refused() -> None:
    batch = make_batch([(20, 1)])
    on_gpu = [x.cuda() for x in (batch.query, batch.cache, batch.block_table, batch.seq_lens)]
    with pytest.raises(ValueError, match=r"kv8_decode: query: given torch.float32 on cuda:0, allowed torch.bfloat16"):
        query = on_gpu[0].float()
        kv8_decode(query, *on_gpu[1:], torch.empty_like(query), 0.1)
    with pytest.raises(ValueError, match="kv8_decode: output: given strides .* allowed a contiguous tensor"):
        output = torch.empty(1, 8, 64, dtype=torch.bfloat16, device="cuda")[:, ::2]
        kv8_decode(*on_gpu, output, 0.1)
    with pytest.raises(ValueError, match="kv8_decode: kv_cache: given a block stride of .* multiples of 16 bytes"):
        cache = on_gpu[1]
        page = cache[0].numel() + 4
        odd = torch.zeros(cache.shape[0] * page, dtype=torch.int8, device="cuda")
        odd = odd.as_strided(cache.shape, (page, *cache.stride()[1:]))
        kv8_decode(on_gpu[0], odd, *on_gpu[2:], torch.empty_like(on_gpu[0]), 0.1)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_it_computes_what_vllms_int8_kernels_compute(head_size: int) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from tests.gpu.vllm_int8 import triton_decode

    batch = make_batch([(n - 1, 1) for n in (1, 17, 300, 2000)], heads=16, kv_heads=4, head_size=head_size)
    query, cache, table, lengths = (x.cuda() for x in (batch.query, batch.cache, batch.block_table, batch.seq_lens))
    theirs = torch.empty_like(query)
    triton_decode(query, cache, table, lengths, theirs, batch.scale)
    assert_close(theirs.cpu(), decode(batch).double())
