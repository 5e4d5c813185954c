"""What `kvcompile doctor` finds of compiler, cache, memory and environment: each problem has a name and a remedy."""

import errno
import shutil
import tempfile
from collections import namedtuple

import pytest
from tests.tools.doctor_hosts import CPU_HOST, GPU_HOST, H200, clean_environment, host, only

from kvcompile.ops import nvrtc
from kvcompile.tools import doctor_probes


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    clean_environment(monkeypatch)


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
    host(monkeypatch, GPU_HOST if devices else CPU_HOST, devices=devices)
    assert only(doctor_probes.compiler(environ), "compiler") == (expected[0], expected[1].format(tmp_path))


def test_the_cpu_build_needs_the_cpp_compiler_also_where_there_is_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    host(monkeypatch, CPU_HOST, devices=[H200])
    assert only(doctor_probes.compiler({}), "compiler") == ("fail", "no g++ on the path")


def _disk(monkeypatch, free):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free))


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "ok"), ((1 << 30) - 1, "warn")])
def test_little_space_in_the_cache_is_a_warning(monkeypatch, tmp_path, free, state):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "not" / "yet"))
    _disk(monkeypatch, free)
    assert only(doctor_probes.cache_dir(), "cache") == (state, f"{tmp_path}/not/yet, 1.0 GiB free")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_the_one_that_the_kernels_use(monkeypatch, tmp_path):
    monkeypatch.delenv("KVCOMPILE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _disk(monkeypatch, 1 << 30)
    assert only(doctor_probes.cache_dir(), "cache") == ("ok", f"{tmp_path}/kvcompile, 1.0 GiB free")
    assert nvrtc.cache_dir() == tmp_path / "kvcompile" / "kernels"


def test_a_cache_below_a_file_fails(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o755)
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert only(doctor_probes.cache_dir(), "cache") == (
        "fail",
        f"{tmp_path}/file/cache cannot be written: Not a directory",
    )


def test_a_cache_that_is_not_writable_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))

    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert only(doctor_probes.cache_dir(), "cache") == ("fail", f"{tmp_path} cannot be written: Permission denied")


def test_a_cache_of_an_unknown_user_fails(monkeypatch):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~no-such-user-here")
    assert only(doctor_probes.cache_dir(), "cache")[0] == "fail"


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
    assert only(doctor_probes.memory(tmp_path, tmp_path), "memory") == expected


def test_memory_that_cannot_be_read_is_a_warning(tmp_path):
    assert only(doctor_probes.memory(tmp_path, tmp_path), "memory") == ("warn", "unknown: No such file or directory")


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
