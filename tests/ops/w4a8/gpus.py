"""Limits of real GPUs by their data sheets (the H200 by its driver), and shapes of a real model."""

from kvcompile.ops.w4a8.limits import Limits

HOPPER_CLUSTERS = (0, 132, 66, 0, 30, 0, 0, 0, 15)
A100 = Limits("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, (0, 108), 2.04e12, 1.41e9)
RTX_3090 = Limits("NVIDIA GeForce RTX 3090", (8, 6), 82, 102400, (0, 82), 0.936e12, 1.7e9)
L4 = Limits("NVIDIA L4", (8, 9), 58, 102400, (0, 58), 0.3e12, 2.04e9)
H100 = Limits("NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, HOPPER_CLUSTERS, 3.35e12, 1.98e9)
H200 = Limits("NVIDIA H200", (9, 0), 132, 233472, HOPPER_CLUSTERS, 4.9e12, 1.98e9)
RTX_5090 = Limits("NVIDIA GeForce RTX 5090", (12, 0), 170, 102400, (0, 170, 85, 0, 42), 1.79e12, 2.41e9)
GPUS = (A100, RTX_3090, L4, H100, H200, RTX_5090)
LLAMA_8B = ((6144, 4096, 32), (4096, 4096, 32), (28672, 4096, 32), (4096, 14336, 112))  # rows, columns, groups
