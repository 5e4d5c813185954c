"""Activations to int8 with one scale per token, alone or fused with the norm or activation function before them."""

from kvcompile.ops.act_quant.op import fused_add_rms_norm_quant, quant_per_token, rms_norm_quant, silu_mul_quant

__all__ = ["fused_add_rms_norm_quant", "quant_per_token", "rms_norm_quant", "silu_mul_quant"]
