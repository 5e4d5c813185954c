"""The systems that `kvcompile bench attention` compares, on the same keys and values: ours, flash attention over a bf16
cache as vLLM calls it, and vLLM's own int8 kernels. All of them store new tokens, then attend.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from kvcompile.ops.kv8 import kv8_decode, kv8_store, kv_cache_shape, plan_decode
from kvcompile.tools.bench_attention_batch import BLOCK_SIZE, DTYPE, Batch
from kvcompile.tools.bench_w4a8_systems import Unavailable

_FA3_SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph
_SEGMENTS = 16  # of vLLM's int8 kernel, which uses them for that many rows at most


class System(Protocol):
    """One system with a cache of its own that holds the batch. bytes_per_token: of its cache, for one KV head.

    label: its name in records.
    """

    bytes_per_token: int
    label: str

    def __call__(self) -> None:
        """Store the new tokens, attend, and leave the result in the batch's output."""


class KVCompile:
    """kv8_store, then kv8_decode or flash attention on the new tokens. The step's plan is made beforehand."""

    label = "kvcompile"

    def __init__(self, batch: Batch) -> None:
        self._batch, self._cache = batch, _int8_cache(batch)
        self.bytes_per_token = 2 * self._cache.shape[-1]
        if batch.new == 1:
            self._plan = plan_decode(batch.pruned_table, batch.pruned_lens, BLOCK_SIZE)
            return
        attention_prefill = _attention_prefill(batch.query.device)
        _, kv_heads, head_size = batch.new_key.shape
        tokens = attention_prefill.workspace_tokens(kv_heads, head_size)
        self._flash = attention_prefill.Flash(head_size)
        self._prompts = attention_prefill.plan(_common(batch), 0, BLOCK_SIZE, tokens)

    def __call__(self) -> None:
        b = self._batch
        kv8_store(b.new_key, b.new_value, self._cache, b.slots)
        if b.new == 1:
            arguments = b.query, self._cache, b.pruned_table, b.pruned_lens, b.output, b.scale, self._plan
            kv8_decode(*arguments, settled=True)  # as of a batch without prompts
            return
        from kvcompile.integrations.vllm import attention_prefill

        arguments = b.query, b.new_key, b.new_value, self._cache, self._prompts, b.output, b.scale, self._flash
        attention_prefill.attend(*arguments)


class FlashBF16:
    """vLLM's flash attention, in the version that it picks, over a paged bf16 cache, planned as vLLM plans it.

    FA3's schedule is made once for all layers of a step, as `KVCompile` makes its own; the bound on splits is that of
    steps that run as CUDA graphs.
    """

    def __init__(self, batch: Batch) -> None:
        _need_extension(batch.query.device)
        from vllm.v1.attention.backends import fa_utils

        self._batch = batch
        self._keys, self._values = batch.key.clone(), batch.value.clone()
        self.bytes_per_token = 2 * 2 * batch.query.shape[2]
        self._store, self._attend = fa_utils.reshape_and_cache_flash, fa_utils.flash_attn_varlen_func
        self._version = fa_utils.get_flash_attn_version(head_size=batch.query.shape[2])
        self.label = f"fa{self._version}-bf16"
        self._one = torch.ones((), device=batch.query.device)
        self._splits = _FA3_SPLITS if self._version == 3 and batch.new == 1 else 0
        self._schedule = self._fa3_schedule() if self._version == 3 else None

    def _fa3_schedule(self) -> torch.Tensor:
        from vllm.v1.attention.backends import fa_utils

        b = self._batch
        return fa_utils.get_scheduler_metadata(
            batch_size=b.rows,
            max_seqlen_q=b.new,
            max_seqlen_k=b.context + b.new,
            num_heads_q=b.query.shape[1],
            num_heads_kv=b.new_key.shape[1],
            headdim=b.query.shape[2],
            cache_seqlens=b.seq_lens,
            qkv_dtype=DTYPE,
            cu_seqlens_q=b.starts,
            page_size=BLOCK_SIZE,
            causal=True,
            num_splits=self._splits,
        )

    def __call__(self) -> None:
        b = self._batch
        self._store(b.new_key, b.new_value, self._keys, self._values, b.slots, "auto", self._one, self._one)
        self._attend(
            b.query,
            self._keys,
            self._values,
            max_seqlen_q=b.new,
            cu_seqlens_q=b.starts,
            max_seqlen_k=b.context + b.new,
            seqused_k=b.seq_lens,
            softmax_scale=b.scale,
            causal=True,
            block_table=b.block_table,
            out=b.output,
            fa_version=self._version,
            scheduler_metadata=self._schedule,
            num_splits=self._splits,
        )


class Triton:
    """vLLM's `int8_per_token_head` kernels over the same cache as ours."""

    def __init__(self, query: torch.Tensor, kv_cache: torch.Tensor) -> None:
        _need_cuda(query.device)
        try:
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention
            from vllm.v1.kv_cache_interface import KVQuantMode
        except ImportError as error:
            raise Unavailable(f"vLLM is not installed ({error})") from None
        self._attend, self._mode = unified_attention, KVQuantMode.INT8_PER_TOKEN_HEAD
        self.keys, self.values = kv_cache.unbind(1)
        self.scales = [half[..., -1] for half in kv_cache.view(torch.float32).unbind(1)]
        padded = 1 << (query.shape[2] - 1).bit_length()
        sizes = (_SEGMENTS, query.shape[1], _SEGMENTS, padded), *[(_SEGMENTS, query.shape[1], _SEGMENTS)] * 2
        self._segments = [torch.empty(size, dtype=torch.float32, device=query.device) for size in sizes]

    def __call__(
        self,
        query: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        longest: int,
        output: torch.Tensor,
        scale: float,
        new: int = 1,
    ) -> None:
        """As `op.kv8_attention` for `new` tokens of every row; longest: of seq_lens."""
        rows = seq_lens.shape[0]
        self._attend(
            query,
            self.keys,
            self.values,
            output,
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=query.device) * new,
            max_seqlen_q=new,
            seqused_k=seq_lens,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1),
            block_table=block_table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=_SEGMENTS,
            num_par_softmax_segments=_SEGMENTS,
            softmax_segm_output=self._segments[0],
            softmax_segm_max=self._segments[1],
            softmax_segm_expsum=self._segments[2],
            kv_quant_mode=self._mode,
            k_scale_cache=self.scales[0],
            v_scale_cache=self.scales[1],
        )


class TritonInt8:
    """`Triton` behind vLLM's own store."""

    label = "triton-int8"

    def __init__(self, batch: Batch) -> None:
        cache = _int8_cache(batch)
        self._batch, self._triton = batch, Triton(batch.query, cache)
        self.bytes_per_token = 2 * cache.shape[-1]
        from vllm.v1.attention.ops import triton_reshape_and_cache_flash as stores

        self._store: Any = stores.triton_reshape_and_cache_flash_per_token_head_quant

    def __call__(self) -> None:
        b, t = self._batch, self._triton
        self._store(b.new_key, b.new_value, t.keys, t.values, *t.scales, b.slots)
        t(b.query, b.block_table, b.seq_lens, b.context + b.new, b.output, b.scale, b.new)


SYSTEMS: dict[str, type[Any]] = {"kvcompile": KVCompile, "fa-bf16": FlashBF16, "triton-int8": TritonInt8}


def _int8_cache(batch: Batch) -> torch.Tensor:
    pages, block_size, kv_heads, head_size = batch.key.shape
    shape = kv_cache_shape(pages, block_size, kv_heads, head_size)
    cache = torch.empty(shape, dtype=torch.int8, device=batch.key.device)
    slots = torch.arange(pages * block_size, device=batch.key.device)
    kv8_store(batch.key.flatten(0, 1), batch.value.flatten(0, 1), cache, slots)
    return cache


def _common(batch: Batch) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    return CommonAttentionMetadata(
        query_start_loc=batch.starts,
        query_start_loc_cpu=batch.starts.cpu(),
        seq_lens=batch.seq_lens,
        num_reqs=batch.rows,
        num_actual_tokens=batch.query.shape[0],
        max_query_len=batch.new,
        max_seq_len=batch.context + batch.new,
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slots,
        seq_lens_cpu_upper_bound=batch.seq_lens.cpu(),
    )


def _attention_prefill(device: torch.device) -> Any:
    """The module, with what vLLM's worker would have set up for it."""
    _need_extension(device)
    from vllm.v1.worker import workspace

    from kvcompile.integrations.vllm import attention_prefill

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(device)
    return attention_prefill


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("it needs a CUDA device")


def _need_extension(device: torch.device) -> None:
    _need_cuda(device)
    for name in ("vllm._C", "vllm.vllm_flash_attn"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Unavailable(f"vLLM's CUDA extension is not installed ({error})") from None
