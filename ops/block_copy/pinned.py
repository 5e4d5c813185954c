"""Pinned host memory of exactly the size that is asked for.

torch's `pin_memory` takes the next power of two, and keeps what it has once taken.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from kvcompile import host_memory
from kvcompile.ops.driver import Driver

# Of cuMemHostAlloc: pinned for every context, and found by a device where the host has it.
PORTABLE, DEVICE_MAPPED = 1, 2


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """A CPU tensor uint8 [size] that kernels on the device can address; freed with the last tensor over its memory.

    What it holds is undefined. Raises RuntimeError for more than the host has available, and with the driver's words
    where that cannot pin as much.
    """
    # Linux would end some process, perhaps this one, before it told the driver that there is no more.
    available = host_memory.read().available
    if size > available:
        raise RuntimeError(f"{size} bytes of host memory are to be pinned, and {available} are available")
    driver = Driver()
    with driver.loading(torch.cuda.current_device() if device.index is None else device.index):
        address = driver.pointer("cuMemHostAlloc", size, PORTABLE | DEVICE_MAPPED)
    memory = (ctypes.c_uint8 * size).from_address(address)
    end = weakref.finalize(memory, _free, driver, address, device)
    end.atexit = False  # the process's end frees it, and has nothing to wait for
    return torch.frombuffer(memory, dtype=torch.uint8)


def _free(driver: Driver, address: int, device: torch.device) -> None:
    """Once no kernel can use it any more."""
    torch.cuda.synchronize(device)
    driver.check(driver.cuMemFreeHost(address), "cuMemFreeHost")
