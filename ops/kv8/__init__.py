"""The int8 KV cache: one fp32 scale per token and KV head, stored in the page behind the data it belongs to."""

from kvcompile.ops.kv8.layout import HEAD_SIZES, kv_cache_shape
from kvcompile.ops.kv8.op import kv8_attention, kv8_store, plan_attention
from kvcompile.ops.kv8.op_decode import kv8_decode, kv8_dequantise, plan_decode

__all__ = [
    "HEAD_SIZES",
    "kv8_attention",
    "kv8_decode",
    "kv8_dequantise",
    "kv8_store",
    "kv_cache_shape",
    "plan_attention",
    "plan_decode",
]
