"""What `kvcompile doctor` finds of GPUs, their driver, and the build of vLLM that must fit them."""

import sys
from types import SimpleNamespace

import pytest
from tests.tools.doctor_hosts import CPU_HOST, GPU_HOST, H200, T4, clean_environment, host, only

from kvcompile.tools import doctor_probes


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    clean_environment(monkeypatch)


@pytest.mark.parametrize(
    ("packages", "devices", "drivers", "name", "expected"),
    [
        (CPU_HOST, [], [], "GPU", ("ok", "none: CPU")),
        (CPU_HOST, [], ["580.1"], "GPU", ("ok", "none: CPU")),
        (GPU_HOST, [], [], "GPU", ("fail", "none, and vLLM is its GPU build")),
        (GPU_HOST, [], ["470.2"], "GPU", ("fail", "driver 470.2 sees a GPU but torch does not")),
        (GPU_HOST, [H200], ["580.1"], "GPU 0", ("ok", "NVIDIA H200, compute 9.0, 139.0 GiB, driver 580.1")),
        (GPU_HOST, [H200], [], "GPU 0", ("ok", "NVIDIA H200, compute 9.0, 139.0 GiB, driver unknown")),
        (GPU_HOST, [H200, T4], ["5"], "GPU 1", ("fail", "Tesla T4, compute 7.5, 15.0 GiB, driver 5")),
        (
            CPU_HOST,
            [H200],
            ["580.1"],
            "GPU 0",
            ("warn", "NVIDIA H200, compute 9.0, 139.0 GiB, driver 580.1; unused by vLLM's CPU build"),
        ),
        ({"torch": "2.11.0"}, [], [], "triton", ("ok", "not installed, and not needed on the CPU")),
        ({"vllm": "0.23.0"}, [H200], ["5"], "triton", ("fail", "not installed")),
        ({"vllm": "0.23.0"}, [H200], ["5"], "cuda-python", ("fail", "not installed")),
        (GPU_HOST, [H200], ["5"], "cuda-python", ("ok", "13.4.4")),
    ],
)
def test_the_gpu_and_the_build_of_vllm_must_match(monkeypatch, packages, devices, drivers, name, expected):
    host(monkeypatch, packages, devices=devices, drivers=drivers)
    assert only(doctor_probes.gpu(), name) == expected


def test_devices_are_those_of_torch(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 << 30)
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: properties
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert doctor_probes._devices() == [H200, H200]
    cuda.is_available = lambda: False
    assert doctor_probes._devices() == []


def test_a_torch_that_cannot_be_imported_has_no_devices(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor_probes._devices() == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 580.1; echo 580.1", ["580.1", "580.1"]), ("echo no devices were found; exit 9", []), (None, [])],
)
def test_the_driver_is_what_nvidia_smi_says(monkeypatch, tmp_path, script, expected):
    if script is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_probes._nvidia_smi() == expected
