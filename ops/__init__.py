"""Operators of kvcompile, under `torch.ops.kvcompile`. They know torch alone: not vLLM, not the rest of kvcompile."""
