"""The GPUs of `kvcompile bench serve`, and which cores of the host their engines may use."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import torch

from kvcompile.config import UsageError
from kvcompile.tools import bench_cuda


class Gpu(NamedTuple):
    """One of --gpus. visible: its name in CUDA_VISIBLE_DEVICES; cores: for its engines, None for all of the process."""

    index: int
    visible: str
    cores: tuple[int, ...] | None
    capability: tuple[int, int]
    bytes: int


def found() -> list[tuple[tuple[int, int], int]]:
    """Compute capability and bytes of memory of each GPU that this process sees. Raises UsageError if there is none."""
    bench_cuda.device()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [((each.major, each.minor), each.total_memory) for each in properties]


def chosen(text: str) -> list[Gpu]:
    """The GPUs of --gpus; the cores of this process are shared out among them. Raises UsageError."""
    there, names = found(), text.split(",")
    numbers = [int(name) for name in names if re.fullmatch("[0-9]{1,4}", name)]
    if len(set(numbers)) < len(names) or max(numbers) >= len(there):
        allowed = f"different numbers from 0 to {len(there) - 1}, as in 0,1" if len(there) > 1 else "0, the only one"
        raise UsageError(f"--gpus is {text!r}; allowed are {allowed}")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(index) for index in range(len(there))]
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(numbers)
    if not each:
        raise UsageError(f"--gpus has {len(numbers)} GPUs, and this process {len(cores)} cores; give fewer")
    shares = [tuple(cores[place * each : (place + 1) * each]) for place in range(len(numbers))]
    return [
        Gpu(number, visible[number], share if len(numbers) > 1 else None, *there[number])
        for number, share in zip(numbers, shares, strict=True)
    ]
