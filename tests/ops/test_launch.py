"""Launching kernels: what reaches the driver, a recording one here. On a GPU: tests/gpu/test_launch_on_gpu.py."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvcompile.ops import driver as driver_module
from kvcompile.ops import launch, nvrtc
from kvcompile.ops.driver import INVALID_VALUE, Driver, NoDevice

GPU = torch.device("cuda", 0)


class Launch(NamedTuple):
    """One call of cuLaunchKernelEx, decoded."""

    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: dict[int, bytes]
    parameters: list[int]  # addresses


class RecordingDriver:
    """Stands for libcuda in a process without it."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.values: list[tuple] = []
        self.results = [0]
        self.current: list[int] = []

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: None) -> int:
        *sizes, shared, stream, attributes, count = struct.unpack("@7IPPI4x", ctypes.string_at(config, 56))[:10]
        decoded = {}
        for i in range(count):
            entry = ctypes.string_at(attributes + 72 * i, 72)
            decoded[int.from_bytes(entry[:4], "little")] = entry[8:20]
        assert extra is None
        addresses = [ctypes.c_void_p.from_address(parameters + 8 * i).value for i in range(5)]
        self.launches.append(Launch(function, tuple(sizes[:3]), tuple(sizes[3:6]), shared, stream, decoded, addresses))
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_longlong)
        self.values.append(
            tuple(kind.from_address(at).value for kind, at in zip(kinds, addresses, strict=True) if at is not None)
        )
        return self.results.pop(0) if len(self.results) > 1 else self.results[0]

    def cuCtxSetCurrent(self, context: int) -> int:
        self.current.append(context)
        return 0

    def check(self, result: int, what: str) -> None:
        if result:
            raise RuntimeError(f"{what} failed: {result}")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7000 + index, raising=False)
    return RecordingDriver()


def _kernel(driver: Any, major: int = 9) -> launch.Kernel:
    resources = nvrtc.Resources(32, 0, 0, 0, 0)
    return launch.Kernel(driver, 1234, 99, 0, major, "scale", "PPifq", resources)


def test_a_launch_hands_over_grid_block_stream_and_every_argument(recording: RecordingDriver) -> None:
    x, out = torch.zeros(4), torch.zeros(4)
    _kernel(recording)((3, 4, 5), 128, (x, out, -7, 0.5, 2**40), shared_bytes=1000)
    (launched,) = recording.launches
    assert launched[:6] == (1234, (3, 4, 5), (128, 1, 1), 1000, 7000, {})
    assert recording.values == [(x.data_ptr(), out.data_ptr(), -7, 0.5, 2**40)]


def test_none_is_a_null_pointer_and_a_number_an_address(recording: RecordingDriver) -> None:
    _kernel(recording)((1, 1, 1), 32, (None, 4096, 0, 0.0, 0))
    assert recording.values == [(None, 4096, 0, 0.0, 0)]


def test_parameters_lie_where_c_puts_them() -> None:
    offsets, packer = launch._layout("PqPfiPPiqiP")
    assert offsets == [0, 8, 16, 24, 28, 32, 40, 48, 56, 64, 72]
    assert packer.size == 80


def test_cluster_and_programmatic_launch_become_attributes(recording: RecordingDriver) -> None:
    kernel = _kernel(recording)
    args = (None, None, 0, 0.0, 0)
    kernel((8, 1, 1), 32, args, cluster=4)
    kernel((8, 1, 1), 32, args, programmatic=True)
    kernel((8, 1, 1), 32, args, cluster=2, programmatic=True)
    kernel((8, 1, 1), 32, args)
    cluster, programmatic = (
        driver_module.ATTRIBUTE_CLUSTER_DIMENSION,
        driver_module.ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
    )
    allowed = struct.pack("3I", 1, 0, 0)
    assert [launched.attributes for launched in recording.launches] == [
        {cluster: struct.pack("3I", 4, 1, 1)},
        {programmatic: allowed},
        {cluster: struct.pack("3I", 2, 1, 1), programmatic: allowed},
        {},
    ]


def test_below_compute_capability_9_programmatic_is_an_ordinary_launch_and_clusters_are_refused(
    recording: RecordingDriver,
) -> None:
    kernel = _kernel(recording, major=8)
    kernel((8, 1, 1), 32, (None, None, 0, 0.0, 0), programmatic=True)
    assert recording.launches[0].attributes == {}
    with pytest.raises(ValueError, match="cluster: given 2, allowed 1 to 8, and 1 below compute capability 9.0"):
        kernel((8, 1, 1), 32, (None, None, 0, 0.0, 0), cluster=2)


class OccupancyDriver(RecordingDriver):
    """Answers a question about clusters, and records its launch configuration as if it were launched."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    @contextlib.contextmanager
    def loading(self, index: int) -> Iterator[int]:
        self.loaded.append(index)
        yield 99

    def number(self, name: str, *args: int) -> int:
        assert name == "cuOccupancyMaxActiveClusters"
        function, config = args
        no_parameters = (ctypes.c_void_p * 5)()
        self.cuLaunchKernelEx(config, function, ctypes.addressof(no_parameters), None)
        return 33


def test_resident_clusters_are_asked_for_with_the_shape_of_a_launch() -> None:
    driver = OccupancyDriver()
    assert _kernel(driver).resident_clusters(4, 256, 200_000) == 33
    (asked,) = driver.launches
    cluster = struct.pack("3I", 4, 1, 1)
    expected = (1234, (4, 1, 1), (256, 1, 1), 200_000, 0, {driver_module.ATTRIBUTE_CLUSTER_DIMENSION: cluster})
    assert asked[:6] == expected
    assert driver.loaded == [0]


def test_resident_clusters_below_compute_capability_9_are_refused() -> None:
    with pytest.raises(ValueError, match="cluster: given 2, allowed 1 to 8, and 1 below compute capability 9.0"):
        _kernel(OccupancyDriver(), major=8).resident_clusters(2, 256, 0)


@pytest.mark.parametrize("cluster", [0, 9])
def test_a_cluster_that_no_device_has_is_refused(recording: RecordingDriver, cluster: int) -> None:
    with pytest.raises(ValueError, match=f"cluster: given {cluster}, allowed 1 to 8"):
        _kernel(recording)((8, 1, 1), 32, (None, None, 0, 0.0, 0), cluster=cluster)
    assert not recording.launches


def test_an_empty_grid_launches_nothing(recording: RecordingDriver) -> None:
    _kernel(recording)((0, 1, 1), 32, (None, None, 0, 0.0, 0))
    assert not recording.launches


def test_arguments_that_do_not_fit_the_signature_are_refused(recording: RecordingDriver) -> None:
    for args in ((None,), (None, None, 0.5, 0.5, 0), (None, None, 2**31, 0.5, 0), (None, None, 0, 0.0, 0, 0)):
        with pytest.raises(struct.error):
            _kernel(recording)((1, 1, 1), 32, args)
    assert not recording.launches


def test_a_thread_without_a_context_gets_that_of_torch_and_the_launch_is_repeated(recording: RecordingDriver) -> None:
    recording.results = [driver_module.INVALID_CONTEXT, 0]
    _kernel(recording)((1, 1, 1), 32, (None, None, 0, 0.0, 0))
    assert recording.current == [99]
    assert len(recording.launches) == 2


def test_a_failed_launch_names_the_kernel_and_its_shape(recording: RecordingDriver) -> None:
    recording.results = [1]
    with pytest.raises(RuntimeError, match=r"launch of scale \(grid \(1, 2, 3\), 64 threads, 8 bytes .*\) failed: 1"):
        _kernel(recording)((1, 2, 3), 64, (None, None, 0, 0.0, 0), shared_bytes=8)


def test_threads_that_share_a_kernel_do_not_mix_their_arguments(recording: RecordingDriver) -> None:
    kernel = _kernel(recording)

    def work(number: int) -> None:
        for _ in range(300):
            kernel((number, 1, 1), 32, (number, number, number, float(number), number))

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recording.values) == 1200
    for launched, values in zip(recording.launches, recording.values, strict=True):
        assert set(values) == {launched.grid[0]}


@pytest.mark.parametrize("signature", ["PPx", "P P", "PPs", "4i", "<P"])
def test_a_signature_of_other_letters_is_refused(signature: str) -> None:
    with pytest.raises(ValueError, match="signature: given .*, allowed letters of PiIqQfd"):
        launch._layout(signature)


def test_the_numbers_are_those_of_cuda_h() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    attribute, function, device = cuda.CUlaunchAttributeID, cuda.CUfunction_attribute, cuda.CUdevice_attribute
    assert {name: value for name, value in vars(driver_module).items() if name.isupper()} == {
        "INVALID_VALUE": cuda.CUresult.CUDA_ERROR_INVALID_VALUE,
        "INVALID_CONTEXT": cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": device.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        "FUNC_SHARED_SIZE_BYTES": function.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        "FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES": function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        "ATTRIBUTE_CLUSTER_DIMENSION": attribute.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        "ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": (
            attribute.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ),
        "CAPTURE_MODE_RELAXED": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
    }


class ParameterDriver(Driver):
    """Knows of a kernel (const float*, int, float, long long)."""

    def __init__(self) -> None:
        pass

    def cuFuncGetParamInfo(self, function: int, index: int, offset: int, size: int) -> int:
        if index == 4:
            return INVALID_VALUE
        ctypes.c_size_t.from_address(offset).value, ctypes.c_size_t.from_address(size).value = [
            (0, 8),
            (8, 4),
            (12, 4),
            (16, 8),
        ][index]
        return 0


@pytest.mark.parametrize("signature", ["Pifq", "PIiQ"])
def test_a_signature_of_the_sizes_of_the_parameters_is_taken(signature: str) -> None:
    launch._check_signature(signature, ParameterDriver().parameters(1), "scale")


@pytest.mark.parametrize("signature", ["Pif", "PifqP", "Piff", "PPfq", "iPfq", ""])
def test_a_signature_that_is_not_the_kernels_is_refused(signature: str) -> None:
    with pytest.raises(ValueError, match=f"given '{signature}', but the parameters of scale take .8, 4, 4, 8. bytes"):
        launch._check_signature(signature, ParameterDriver().parameters(1), "scale")


def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(NoDevice, match="the NVIDIA driver cannot be used .*: install one for CUDA 12.4 or later"):
        Driver("libcuda-of-nowhere.so.1")
    with pytest.raises(NoDevice, match="the NVIDIA driver cannot be used"):
        Driver("libc.so.6")  # a library without the functions, as a driver that is too old


def test_without_a_gpu_one_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("Found no NVIDIA driver on your system.\nmore"), AssertionError("Torch not compiled")):

        def fail(device: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
        with pytest.raises(NoDevice, match=f"kernels need an NVIDIA GPU, its driver.*: {str(error)[:15]}"):
            launch.arch_of(GPU)
        with pytest.raises(NoDevice):
            launch.kernel(Path("none.cu"), "k", torch.device("cuda"), signature="P")


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device: given cpu, allowed a CUDA device"):
        launch.kernel(Path("none.cu"), "k", torch.device("cpu"), signature="P")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_the_architecture_of_a_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch.arch_of(GPU) == arch
