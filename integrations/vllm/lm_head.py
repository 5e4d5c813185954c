"""The head of a W4A8 model in int8: logits = (x . codes^T) * scales, activations as they are (W8A16).

A decode step reads the whole head, and in int8 that is half of what it reads in bf16. It is symmetric, one scale per
row of the vocabulary; scales have the model's dtype, as vLLM's Marlin kernel takes them, and codes are made with the
rounded scale, so that its rounding adds nothing: a weight is off by half a scale at most.

On a GPU that kernel multiplies. On a CPU torch does, with the same codes and scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from kvcompile.config import UsageError

ROW_STEP = 64  # of which Marlin takes multiples; a rank's rows are padded to that
# Elements that are quantised and packed at a time: what this takes beside the head is then small.
_ELEMENTS_AT_ONCE = 1 << 23
_ROWS_AT_ONCE = 1024  # of a product on a CPU, in fp32
_VECTOR = 64  # channels, more than any CPU takes at a time
# vLLM calls `process_weights_after_loading` once more after it has done so layer by layer; it clears this on a reload.
_DONE = "_already_called_process_weights_after_loading"


class Int8HeadMethod(QuantizeMethodBase):
    """A ParallelLMHead whose checkpoint has an unquantised weight. One object per head.

    Each rank quantises the rows that it has: as every row has a scale of its own, that is the cut of the whole.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    create_weights = UnquantizedEmbeddingMethod.create_weights

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantise the head and drop its weight. Raises UsageError, naming the row, for a value that is not finite."""
        if getattr(layer, _DONE, False):
            return
        pack = _marlin if layer.weight.is_cuda else _plain
        try:
            codes, scales = pack(layer.weight.data)
        except ValueError as error:
            raise UsageError(f"layer {self.prefix}: {error}; the checkpoint is damaged, make it anew") from None
        del layer.weight
        layer.register_parameter("codes", torch.nn.Parameter(codes, requires_grad=False))
        layer.register_parameter("scales", torch.nn.Parameter(scales, requires_grad=False))
        if codes.is_cuda:
            from vllm.model_executor.layers.quantization.utils import marlin_utils

            # A buffer: it has to be zero before the kernel first runs, and vLLM's sleep mode gives buffers back.
            layer.register_buffer("workspace", marlin_utils.marlin_make_workspace_new(codes.device), persistent=False)
        setattr(layer, _DONE, True)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., K] of the model's dtype; bias: [N]. Returns [..., N] of that dtype, N the rows of this rank."""
        if layer.codes.is_cuda:
            y = _marlin_product(x, layer.codes, layer.scales, layer.workspace)
            rows = layer.num_embeddings_per_partition
            y = y if y.shape[-1] == rows else y[..., :rows].contiguous()
        else:
            y = product(x.reshape(-1, x.shape[-1]), layer.codes, layer.scales).view(*x.shape[:-1], len(layer.codes))
        return y if bias is None else y + bias


def quantise_rows(weight: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [N, K] of a float type. Returns codes, int8 [N, K] in -127 to 127, and scales, [N] of weight's dtype.

    weight is codes * scales[:, None], give or take scales / 2. A row of zeros has scale 1. Raises ValueError, naming
    the first row, where a value is not finite. first: the number of the first row.
    """
    largest = weight.abs().amax(1).float()
    if not (finite := largest.isfinite()).all():
        raise ValueError(f"weight is not finite in row {first + int((~finite).nonzero()[0])} of this rank")
    scales = (largest * (1 / 127)).to(weight.dtype)  # a division torch rounds in another way on a GPU
    # Below the normal numbers of a dtype the nearest may be so much less that 127 of it fall short: the next does not.
    bits = scales.view(torch.int16 if scales.itemsize == 2 else torch.int32)
    scales = torch.where(scales.float() * 127.5 < largest, (bits + 1).view(scales.dtype), scales)
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    codes = (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales


def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """On a CPU. x: [M, K] of the dtype of scales. Returns [M, N] of it, sums in fp32, rounded once."""
    # That operator reads whole vectors of channels, past the end of a row that does not have them. For other dtypes it
    # is there too, and slower than what is below.
    if x.dtype == torch.bfloat16 and x.shape[1] % _VECTOR == 0:
        return torch._weight_int8pack_mm(x.contiguous(), codes, scales)
    wide, y = x.float(), x.new_empty(x.shape[0], codes.shape[0])
    for start in range(0, codes.shape[0], _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        y[:, some] = F.linear(wide, codes[some].float()) * scales[some].float()
    return y


def _plain(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as `product` takes them."""
    codes, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(weight.shape[0])
    for some in _blocks(weight):
        codes[some], scales[some] = _quantised(weight, some)
    return codes, scales


def _marlin(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, int32 [K / 16, 4 N], and scales, [1, N], in Marlin's order; N is padded by rows of zeros.

    Marlin keeps 16 channels of 64 rows together, and next to them those of the next 64 rows: rows that are packed in
    blocks of such multiples lie side by side.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    rows, width = weight.shape
    padded = -(-rows // ROW_STEP) * ROW_STEP
    tiles = torch.empty(width // 16, 4 * padded, dtype=torch.int32, device=weight.device)
    scales = weight.new_ones(1, padded)
    unsorted = torch.empty(0, dtype=torch.int32, device=weight.device)
    for some in _blocks(weight):
        codes, scales[0, some] = _quantised(weight, some)
        codes = F.pad(codes, (0, 0, 0, -len(codes) % ROW_STEP))
        # GPTQ's order, which Marlin's own packing takes: unsigned, zero at 128, four channels of a row in a word.
        words = (codes.view(torch.uint8) ^ 128).view(torch.int32).t().contiguous()
        block = _custom_ops.gptq_marlin_repack(words, unsorted, width, len(codes), 8)
        tiles[:, 4 * some.start : 4 * (some.start + len(codes))] = block
    return tiles, marlin_utils.marlin_permute_scales(scales, width, padded, -1)


def _marlin_product(
    x: torch.Tensor, tiles: torch.Tensor, scales: torch.Tensor, workspace: torch.Tensor
) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    nothing = workspace.new_empty(0)  # neither zero points nor sorted channels
    return marlin_utils.apply_gptq_marlin_linear(
        input=x,
        weight=tiles,
        weight_scale=scales,
        weight_zp=nothing,
        g_idx=nothing,
        g_idx_sort_indices=nothing,
        workspace=workspace,
        wtype=scalar_types.uint8b128,
        output_size_per_partition=scales.shape[1],
        input_size_per_partition=16 * tiles.shape[0],
        is_k_full=True,
    )


def _blocks(weight: torch.Tensor) -> list[slice]:
    step = max(_ELEMENTS_AT_ONCE // weight.shape[1] // ROW_STEP, 1) * ROW_STEP
    return [slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step)]


def _quantised(weight: torch.Tensor, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_rows(weight[some], some.start)
