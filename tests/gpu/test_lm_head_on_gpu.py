"""The int8 head by vLLM's Marlin kernel against the product of its codes and scales, alone and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvcompile.integrations.vllm import lm_head
from kvcompile.integrations.vllm.lm_head import Int8HeadMethod, quantise_rows
from tests.integrations.head_values import assert_product, head_weight

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
TOKENS = (0, 1, 7, 32, 100, 512)
LLAMA_3 = (128256, 4096)
# Of one rank of eight of it, of a vocabulary that vLLM pads to 64, and of a rank of two of that.
ODD = ((16032, 4096), (448, 896), (224, 896))


class Head(torch.nn.Module):
    """A head as vLLM has it once its weight has been loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.num_embeddings_per_partition = weight.shape[0]
        self.quant_method = Int8HeadMethod("lm_head")

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias=bias)


def _head(weight: torch.Tensor) -> Head:
    head = Head(weight.clone())
    head.quant_method.process_weights_after_loading(head)
    return head


def _inputs(tokens: int, width: int, dtype: torch.dtype, seed: int = 9) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(tokens, width, generator=generator, device="cuda").to(dtype)


def _poison() -> None:
    """What is allocated next holds NaN."""
    spoiled = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 12, 1 << 20, 1 << 24, 1 << 26)]
    del spoiled


def _assert_logits(y: torch.Tensor, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Tensor cores add up in fp32, and not in fp32's own rounding."""
    assert y.is_contiguous()
    assert_product(y, x, codes, scales, roundings=2, sums=2**-16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [LLAMA_3, *ODD], ids=str)
def test_logits_are_those_of_codes_and_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = head_weight(*shape, dtype, device="cuda")
    codes, scales = quantise_rows(weight)
    head = _head(weight)
    for tokens in TOKENS:
        x = _inputs(tokens, shape[1], dtype)
        _poison()
        for _ in range(2):  # the second finds the workspace as the first has left it
            _assert_logits(head.logits(x), x, codes, scales)
    assert not head.workspace.any()


def test_logits_of_a_row_do_not_depend_on_how_many_are_asked_for_beyond_rounding() -> None:
    weight = head_weight(*LLAMA_3, torch.bfloat16, device="cuda")
    codes, scales = quantise_rows(weight)
    head, x = _head(weight), _inputs(512, 4096, torch.bfloat16)
    together = head.logits(x)
    for row in (0, 63, 64, 511):
        alone = head.logits(x[row : row + 1])  # rows of a larger tensor are read in place
        _assert_logits(alone, x[row : row + 1], codes, scales)
        _assert_logits(together[row : row + 1], x[row : row + 1], codes, scales)


def test_rows_of_zeros_have_logits_of_zero_and_a_bias_is_added() -> None:
    weight = head_weight(448, 896, torch.bfloat16, device="cuda")
    weight[300:] = 0  # as vLLM pads a vocabulary
    head, x = _head(weight), _inputs(7, 896, torch.bfloat16)
    y = head.logits(x)
    assert not y[:, 300:].any() and y[:, :300].isfinite().all()
    bias = torch.linspace(-3, 3, 448, device="cuda").bfloat16()
    assert torch.equal(head.logits(x, bias), y + bias)


def test_codes_and_scales_are_those_of_the_cpu() -> None:
    weight = head_weight(448, 896, torch.bfloat16)
    ours, theirs = (quantise_rows(each) for each in (weight.cuda(), weight))
    assert torch.equal(ours[1].cpu(), theirs[1])
    assert torch.equal(ours[0].cpu(), theirs[0])


def test_a_large_head_is_packed_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = head_weight(1000, 896, torch.bfloat16, device="cuda")
    whole = _head(weight)
    monkeypatch.setattr(lm_head, "_ELEMENTS_AT_ONCE", 192 * 896)
    pieces = _head(weight)
    assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.scales, whole.scales)


def test_the_weight_is_given_back_and_quantising_takes_little_beside_the_codes() -> None:
    weight = head_weight(*LLAMA_3, torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - weight.nbytes
    head = Head(weight)
    del weight
    torch.cuda.reset_peak_memory_stats()
    head.quant_method.process_weights_after_loading(head)
    rows, width = LLAMA_3
    held = rows * (width + 2)
    assert held <= torch.cuda.memory_allocated() - before <= held + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before <= 2 * rows * width + held + (256 << 20)


@pytest.mark.parametrize("tokens", [1, 32, 100])
@pytest.mark.parametrize("shape", [LLAMA_3, ODD[0]], ids=str)
def test_a_graph_replays_with_the_data_of_the_replay(shape: tuple[int, int], tokens: int) -> None:
    weight = head_weight(*shape, torch.bfloat16, device="cuda")
    codes, scales = quantise_rows(weight)
    head, static = _head(weight), _inputs(tokens, shape[1], torch.bfloat16)
    head.logits(static)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        y = head.logits(static)
    for seed in (11, 12, 13):
        x = _inputs(tokens, shape[1], torch.bfloat16, seed)
        static.copy_(x)
        y.fill_(float("nan"))
        graph.replay()
        _assert_logits(y, x, codes, scales)


def test_in_bf16_it_is_no_further_from_the_weight_than_half_a_scale_of_each() -> None:
    weight, x = head_weight(*ODD[0], torch.bfloat16, device="cuda"), _inputs(32, 4096, torch.bfloat16)
    exact = F.linear(x.double(), weight.double())
    _, scales = quantise_rows(weight)
    bound = x.double().abs().sum(1, keepdim=True) * scales.double() / 2 + 2**-7 * exact.abs() + 1e-3
    assert ((_head(weight).logits(x).double() - exact).abs() <= bound).all()
