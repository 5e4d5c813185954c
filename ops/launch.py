"""Load kernels that NVRTC compiled and launch them on torch's current stream, for a few microseconds of host time.

    scale = launch.kernel(SOURCE, "scale", x.device, {"THREADS": 256}, signature="PPif")
    scale((rows, 1, 1), 256, (x, out, x.shape[1], 0.5))

with, in SOURCE, `extern "C" __global__ void scale(const float* x, float* out, int n, float factor)`.

The signature gives each parameter the letter that `struct` has for its C type: P pointer, i int, I unsigned, q long
long, Q unsigned long long, f float, d double. A P takes a tensor (its data pointer), an address, or None (null
pointer). Offsets of the parameters are so known when the kernel is obtained, and a launch packs all of them in one
call. Hold on to the `Kernel` where launches are many: obtaining it again costs a look-up.

What a kernel reads is the caller's to check: no shape, dtype or device is looked at here.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvcompile.ops import nvrtc
from kvcompile.ops.driver import (
    ATTRIBUTE_CLUSTER_DIMENSION,
    ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    FUNC_SHARED_SIZE_BYTES,
    INVALID_CONTEXT,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    Driver,
    NoDevice,
)

MAX_CLUSTER = 8  # the portable limit of every architecture that has clusters
CLUSTERS_AND_PDL = 9  # major compute capability from which both exist

# CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number.
_CONFIG = struct.Struct("@7IPPI4x")
# CUlaunchAttribute: id, padding to 8, a union of 64 bytes that starts with up to three 32-bit integers.
_ATTRIBUTE = struct.Struct("@I4x3I52x")


def arch_of(device: torch.device) -> str:
    """The NVRTC architecture of a CUDA device: "sm_80", "sm_90a", ... Raises NoDevice."""
    major, minor = _capability(device)
    # The `a` unlocks wgmma and TMA multicast forms that exist on 9.0 alone.
    return f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def kernel(
    source: Path,
    name: str,
    device: torch.device,
    defines: Mapping[str, int | str] | None = None,
    *,
    signature: str,
) -> Kernel:
    """The `extern "C"` kernel `name` of `source` on `device`: compiled and loaded once per process, device and defines.

    Raises ValueError for a signature that is not the kernel's or a name that the source does not have, NoDevice, and
    what `nvrtc.compile` raises. Call it before a CUDA graph capture where possible: it works within one, but may
    compile.
    """
    key = tuple(sorted((defines or {}).items()))
    return _kernel(source, name, _index_of(device), key, signature)


class Kernel:
    """A kernel on one device. Threads may share it; the module it belongs to stays loaded until the process ends."""

    __slots__ = (
        "_attribute_arrays",
        "_config",
        "_config_address",
        "_context",
        "_current_device",
        "_current_stream",
        "_driver",
        "_function",
        "_index",
        "_lock",
        "_major",
        "_pack",
        "_parameters",
        "_pointers",
        "_pointers_address",
        "name",
        "resources",
    )

    def __init__(
        self,
        driver: Driver,
        function: int,
        context: int,
        index: int,
        major: int,
        name: str,
        signature: str,
        resources: nvrtc.Resources,
    ) -> None:
        self._driver, self._function, self._context, self._index, self._major = driver, function, context, index, major
        self.name = name
        self.resources = resources
        offsets, packer = _layout(signature)
        self._parameters = ctypes.create_string_buffer(packer.size + 8)
        base = ctypes.addressof(self._parameters)
        self._pointers = (ctypes.c_void_p * (len(offsets) + 1))(*[base + offset for offset in offsets])
        self._pointers_address = ctypes.addressof(self._pointers)
        self._pack = functools.partial(packer.pack_into, self._parameters, 0)
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._config_address = ctypes.addressof(self._config)
        self._attribute_arrays: dict[tuple[int, bool], tuple[Any, int, int]] = {}
        # The buffers above are shared by all launches of this kernel, and ctypes releases the GIL for the call.
        self._lock = threading.Lock()
        # What torch.cuda's functions of these names call, without the initialisation check in front.
        self._current_device = torch._C._cuda_getDevice
        self._current_stream = torch._C._cuda_getCurrentRawStream

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: int,
        args: tuple[torch.Tensor | int | float | None, ...],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        programmatic: bool = False,
    ) -> None:
        """Launch on torch's current stream of the device, without allocating or synchronising: graph capture works.

        grid: blocks along x, y, z; nothing is launched if one of them is 0. block: threads. args: as the signature.
        shared_bytes: dynamic shared memory, up to what the device has for one block, without further ado. cluster:
        blocks of a cluster along x, 1 to 8; above 1 needs compute capability 9.0. programmatic: the kernel may start
        while its predecessor on the stream still runs (programmatic dependent launch) and executes
        `griddepcontrol.wait` before it touches what that one writes; below 9.0, which has no such thing, it starts
        after it as any kernel does.

        Raises struct.error for arguments that do not fit the signature, RuntimeError with the driver's words.
        """
        if 0 in grid:
            return
        if self._current_device() != self._index:
            with torch.cuda.device(self._index):
                self(grid, block, args, shared_bytes=shared_bytes, cluster=cluster, programmatic=programmatic)
            return
        programmatic = programmatic and self._major >= CLUSTERS_AND_PDL
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 if arg is None else arg for arg in args]
        stream = self._current_stream(self._index)
        with self._lock:
            _, attributes, count = self._attributes(cluster, programmatic)
            self._pack(*values)
            _CONFIG.pack_into(self._config, 0, *grid, block, 1, 1, shared_bytes, stream, attributes, count)
            launch = self._driver.cuLaunchKernelEx
            result = launch(self._config_address, self._function, self._pointers_address, None)
            if result == INVALID_CONTEXT:  # a thread in which nothing has used CUDA yet
                self._driver.check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
                result = launch(self._config_address, self._function, self._pointers_address, None)
        if result:
            what = (
                f"launch of {self.name} (grid {grid}, {block} threads, {shared_bytes} bytes of dynamic shared memory, "
            )
            self._driver.check(result, f"{what}cluster of {cluster})")

    def resident_clusters(self, cluster: int, block: int, shared_bytes: int) -> int:
        """How many clusters of that many blocks can be on the device at once. Needs compute capability 9.0.

        block: threads. shared_bytes: dynamic shared memory of a block. Raises as a launch does.
        """
        with self._lock:
            _, attributes, count = self._attributes(cluster, False)
            _CONFIG.pack_into(self._config, 0, cluster, 1, 1, block, 1, 1, shared_bytes, 0, attributes, count)
            with self._driver.loading(self._index):
                return self._driver.number("cuOccupancyMaxActiveClusters", self._function, self._config_address)

    def _attributes(self, cluster: int, programmatic: bool) -> tuple[Any, int, int]:
        """(the array, its address, its length) of CUlaunchAttribute for this combination, built once."""
        key = (cluster, programmatic)
        if key not in self._attribute_arrays:
            if not 1 <= cluster <= (MAX_CLUSTER if self._major >= CLUSTERS_AND_PDL else 1):
                allowed = f"1 to {MAX_CLUSTER}, and 1 below compute capability 9.0"
                raise ValueError(f"launch of {self.name}: cluster: given {cluster}, allowed {allowed}")
            attributes = []
            if cluster > 1:
                attributes.append(_ATTRIBUTE.pack(ATTRIBUTE_CLUSTER_DIMENSION, cluster, 1, 1))
            if programmatic:
                attributes.append(_ATTRIBUTE.pack(ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0))
            array = ctypes.create_string_buffer(b"".join(attributes))
            self._attribute_arrays[key] = (array, ctypes.addressof(array) if attributes else 0, len(attributes))
        return self._attribute_arrays[key]


@functools.cache
def _driver() -> Driver:
    return Driver()


def _capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        raise ValueError(f"device: given {device}, allowed a CUDA device")
    try:
        return torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        cause = str(error).strip().partition("\n")[0]
        raise NoDevice(f"kernels need an NVIDIA GPU, its driver, and a torch built for CUDA: {cause}") from error


def _index_of(device: torch.device) -> int:
    if device.index is not None and device.type == "cuda":
        return device.index
    _capability(device)
    return torch.cuda.current_device()


@functools.cache
def _kernel(source: Path, name: str, index: int, defines: tuple[tuple[str, int | str], ...], signature: str) -> Kernel:
    _layout(signature)
    driver, module, binary = _module(source, index, defines)
    if name not in binary.resources:
        raise ValueError(
            f"name: given {name!r}, allowed the kernels of {source}: {', '.join(sorted(binary.resources))}"
        )
    major, _ = _capability(torch.device("cuda", index))
    with driver.loading(index) as context:
        function = driver.pointer("cuModuleGetFunction", module, name.encode())
        _check_signature(signature, driver.parameters(function), name)
        device = driver.number("cuDeviceGet", index)
        room = driver.number("cuDeviceGetAttribute", MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
        room -= driver.number("cuFuncGetAttribute", FUNC_SHARED_SIZE_BYTES, function)
        # A cap, not a reservation: what a launch asks for is what it gets.
        result = driver.cuFuncSetAttribute(function, FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, room)
        driver.check(result, "cuFuncSetAttribute")
    return Kernel(driver, function, context, index, major, name, signature, binary.resources[name])


def _check_signature(signature: str, parameters: list[tuple[int, int]], name: str) -> None:
    """Raise ValueError unless the letters lie where the kernel has its parameters, (offset, size) each."""
    given = [
        (offset, struct.calcsize("@" + kind)) for offset, kind in zip(_layout(signature)[0], signature, strict=True)
    ]
    if given != parameters:
        sizes = [size for _, size in parameters]
        raise ValueError(
            f"signature: given {signature!r}, but the parameters of {name} take {sizes} bytes, in this order"
        )


@functools.cache
def _module(source: Path, index: int, defines: tuple[tuple[str, int | str], ...]) -> tuple[Driver, int, nvrtc.Binary]:
    """(driver, module, binary) of a source on a device, loaded into torch's context."""
    arch = arch_of(torch.device("cuda", index))
    driver = _driver()
    binary = nvrtc.compile(source, arch, dict(defines))
    with driver.loading(index):
        return driver, driver.pointer("cuModuleLoadData", binary.cubin), binary


@functools.cache
def _layout(signature: str) -> tuple[list[int], struct.Struct]:
    """(byte offset of each parameter, packer of all) with the alignment of C, which is that of kernel parameters."""
    if not re.fullmatch("[PiIqQfd]*", signature):
        raise ValueError(f"signature: given {signature!r}, allowed letters of PiIqQfd, one per parameter")
    offsets = [
        struct.calcsize("@" + signature[: i + 1]) - struct.calcsize("@" + signature[i]) for i in range(len(signature))
    ]
    return offsets, struct.Struct("@" + signature)
