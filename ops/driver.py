"""The few functions of libcuda that kernels and the memory they share with the host take, by ctypes.

ctypes and not cuda-python: with addresses that are known beforehand a call costs about 1 us, and building a launch from
cuda-python's objects every time about 10.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

# Numbers of cuda.h, which are part of the driver's ABI.
INVALID_VALUE = 1
INVALID_CONTEXT = 201
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
FUNC_SHARED_SIZE_BYTES = 1
FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
ATTRIBUTE_CLUSTER_DIMENSION = 4
ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
CAPTURE_MODE_RELAXED = 2


class NoDevice(RuntimeError):
    """There is no GPU, or no driver, to run kernels on."""


class Driver:
    """libcuda: the few functions that are needed, with their argument types."""

    FUNCTIONS = {
        "cuCtxPopCurrent_v2": (ctypes.c_void_p,),
        "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
        "cuCtxSetCurrent": (ctypes.c_void_p,),
        "cuDeviceGet": (ctypes.c_void_p, ctypes.c_int),
        "cuDeviceGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
        "cuFuncGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
        "cuFuncGetParamInfo": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
        "cuFuncSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
        "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
        "cuGetErrorString": (ctypes.c_int, ctypes.c_void_p),
        "cuLaunchKernelEx": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        "cuMemFreeHost": (ctypes.c_void_p,),
        "cuMemHostAlloc": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
        "cuModuleGetFunction": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
        "cuModuleLoadData": (ctypes.c_void_p, ctypes.c_char_p),
        "cuOccupancyMaxActiveClusters": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        "cuThreadExchangeStreamCaptureMode": (ctypes.c_void_p,),
    }

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            loaded = ctypes.CDLL(library)
            for name, types in self.FUNCTIONS.items():
                function = getattr(loaded, name)
                function.argtypes = types
                function.restype = ctypes.c_int
                setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise NoDevice(f"the NVIDIA driver cannot be used ({error}): install one for CUDA 12.4 or later") from error

    def check(self, result: int, what: str) -> None:
        """Raise RuntimeError with the driver's name and description of `result` unless it is success."""
        if result:
            words = []
            for describe in (self.cuGetErrorName, self.cuGetErrorString):
                text = ctypes.c_char_p()
                describe(result, ctypes.addressof(text))
                words.append((text.value or b"unknown").decode())
            raise RuntimeError(f"{what} failed: {words[0]} ({result}): {words[1]}")

    def pointer(self, name: str, *args: Any) -> int:
        """Call a function that writes a pointer to where its first argument says, and return that pointer."""
        value = ctypes.c_void_p()
        self.check(getattr(self, name)(ctypes.addressof(value), *args), name)
        return value.value or 0

    def number(self, name: str, *args: Any) -> int:
        """The same for an int."""
        value = ctypes.c_int()
        self.check(getattr(self, name)(ctypes.addressof(value), *args), name)
        return value.value

    def parameters(self, function: int) -> list[tuple[int, int]]:
        """(offset, size) in bytes of each parameter of a kernel."""
        found: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        addresses = ctypes.addressof(offset), ctypes.addressof(size)
        while (result := self.cuFuncGetParamInfo(function, len(found), *addresses)) != INVALID_VALUE:
            self.check(result, "cuFuncGetParamInfo")
            found.append((offset.value, size.value))
        return found

    @contextlib.contextmanager
    def loading(self, index: int) -> Iterator[int]:
        """Make the primary context of a device, which is torch's, the current one, and yield it.

        A stream capture of this thread or another does not make loading an error meanwhile: it touches no stream.
        """
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        exchange = "cuThreadExchangeStreamCaptureMode"
        self.check(self.cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode)), exchange)
        try:
            context = self.pointer("cuDevicePrimaryCtxRetain", self.number("cuDeviceGet", index))
            self.check(self.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
            try:
                yield context
            finally:
                self.pointer("cuCtxPopCurrent_v2")
        finally:
            self.check(self.cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode)), exchange)
