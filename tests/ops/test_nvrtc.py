"""Compiling and caching kernels: nothing stale is loaded, nothing damaged survives, and what goes wrong is said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcompile.ops import nvrtc

SOURCE = """
#include "answer.cuh"
extern "C" __global__ void answer(int* out) { out[threadIdx.x] = ANSWER + BONUS; }
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_warned", set())
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "kernel"
    folder.mkdir()
    (folder / "answer.cuh").write_text("#define ANSWER 42\n")
    (folder / "answer.cu").write_text(SOURCE)
    return folder / "answer.cu"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sources that really went through NVRTC."""
    names: list[str] = []
    genuine = nvrtc._compile

    def noted(source: Path, *rest: Any) -> tuple[bytes, str]:
        names.append(source.name)
        return genuine(source, *rest)

    monkeypatch.setattr(nvrtc, "_compile", noted)
    return names


def _compile(source: Path, arch: str = "sm_90a", bonus: int | str = 1) -> nvrtc.Binary:
    return nvrtc.compile(source, arch, {"BONUS": bonus})


def _entry(cache: Path) -> Path:
    (entry,) = cache.iterdir()
    return entry


def test_the_second_compilation_is_read_from_the_cache(source: Path, compiled: list[str], cache: Path) -> None:
    first = _compile(source)
    assert first.cubin.startswith(b"\x7fELF")
    assert _compile(source) == first
    assert compiled == ["answer.cu"]
    assert _entry(cache).name.startswith("answer-sm_90a-")


def test_whatever_changes_the_code_is_compiled_anew(source: Path, compiled: list[str]) -> None:
    binaries = [_compile(source), _compile(source, bonus=2), _compile(source, "sm_80")]
    source.write_text(SOURCE.replace("+", "-"))
    binaries.append(_compile(source))
    source.with_name("answer.cuh").write_text("#define ANSWER 43\n")
    binaries.append(_compile(source))
    assert len({binary.cubin for binary in binaries}) == len(compiled) == 5


def test_the_hash_covers_options_and_the_version_of_nvrtc(
    source: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _compile(source)
    monkeypatch.setattr(nvrtc, "_version", lambda: (99, 9))
    _compile(source)
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=false"))
    _compile(source)
    assert len(compiled) == 3


@pytest.mark.parametrize(("version", "caches"), [((12, 8), False), ((12, 9), True), ((13, 0), True)], ids=str)
def test_the_cache_of_nvrtc_itself_which_would_give_an_empty_log_is_switched_off(
    source: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], caches: bool
) -> None:
    seen: list[list[str]] = []

    def noted(source: Path, text: bytes, headers: Any, options: list[str]) -> tuple[bytes, str]:
        seen.append(options)
        return b"", ""

    monkeypatch.setattr(nvrtc, "_version", lambda: version)
    monkeypatch.setattr(nvrtc, "_compile", noted)
    _compile(source)
    assert ("--no-cache" in seen[0]) is caches


def test_the_order_of_defines_does_not_matter(source: Path, compiled: list[str]) -> None:
    nvrtc.compile(source, "sm_80", {"BONUS": 1, "OTHER": "2"})
    nvrtc.compile(source, "sm_80", {"OTHER": "2", "BONUS": 1})
    assert len(compiled) == 1


def test_a_byte_that_moves_between_two_parts_changes_the_hash() -> None:
    parts = [
        ("13.0", "k.cu", b"text", {"a.cuh": b"xy"}, []),
        ("13.0", "k.cut", b"ext", {"a.cuh": b"xy"}, []),
        ("13.0", "k.cu", b"text", {"a.cuhx": b"y"}, []),
        ("13.0", "k.cu", b"texta.cuh", {"xy": b""}, []),
        ("13.0k", ".cu", b"text", {"a.cuh": b"xy"}, []),
        ("13.0", "k.cu", b"text", {}, ["a.cuhxy"]),
    ]
    assert len({nvrtc._key(*each) for each in parts}) == len(parts)


@pytest.mark.parametrize("kept", [0, 1, len(nvrtc.MAGIC) + 20, 200, -1])
def test_a_truncated_entry_is_compiled_again_and_replaced(
    source: Path, compiled: list[str], cache: Path, kept: int
) -> None:
    first = _compile(source)
    whole = _entry(cache).read_bytes()
    _entry(cache).write_bytes(whole[:kept])
    assert _compile(source) == first
    assert len(compiled) == 2
    assert _entry(cache).read_bytes() == whole


@pytest.mark.parametrize("position", [0, len(nvrtc.MAGIC), len(nvrtc.MAGIC) + 33, 400, -1])
def test_an_entry_with_one_wrong_byte_is_compiled_again_and_replaced(
    source: Path, compiled: list[str], cache: Path, position: int
) -> None:
    first = _compile(source)
    whole = _entry(cache).read_bytes()
    damaged = bytearray(whole)
    damaged[position] ^= 1
    _entry(cache).write_bytes(damaged)
    assert _compile(source) == first
    assert len(compiled) == 2
    assert _entry(cache).read_bytes() == whole


def test_a_whole_entry_under_the_name_of_another_is_not_used(source: Path, compiled: list[str], cache: Path) -> None:
    _compile(source)
    entry = _entry(cache)
    other = _compile(source, bonus=2)
    (second,) = set(cache.iterdir()) - {entry}
    second.write_bytes(entry.read_bytes())
    assert _compile(source, bonus=2) == other
    assert len(compiled) == 3


def test_a_directory_that_cannot_be_used_costs_one_warning_that_names_it(
    source: Path, compiled: list[str], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        assert _compile(source) == _compile(source)
        _compile(source, bonus=2)
    assert len(compiled) == 3
    (record,) = caplog.records
    assert str(cache) in record.getMessage()
    assert "name a writable directory in KVCOMPILE_CACHE_DIR" in record.getMessage()


def test_a_full_disk_leaves_no_half_written_file(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc.os, "replace", full)
    assert _compile(source).cubin
    assert "No space left on device" in caplog.text
    assert not list(cache.iterdir())


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert nvrtc.cache_dir() == tmp_path / "cache" / "kernels"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert nvrtc.cache_dir() == Path("/somewhere/kvcompile/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert nvrtc.cache_dir() == tmp_path / ".cache" / "kvcompile" / "kernels"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~/elsewhere")
    assert nvrtc.cache_dir() == tmp_path / "elsewhere" / "kernels"


def test_a_home_that_does_not_exist_is_only_a_warning(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~no-such-user-here/cache")
    assert _compile(source).cubin
    assert len(caplog.records) == 1


def test_processes_that_compile_the_same_at_once_agree_and_leave_one_entry(source: Path, cache: Path) -> None:
    program = (
        "import hashlib, sys; from pathlib import Path; from kvcompile.ops import nvrtc\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "binary = nvrtc.compile(Path(sys.argv[1]), 'sm_90a', {'BONUS': 1})\n"
        "print(hashlib.sha256(binary.cubin).hexdigest())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    answers = {process.communicate("go\n", timeout=60) for process in processes}
    ((digest, errors),) = answers
    assert len(digest) == 65 and not errors
    assert _entry(cache).suffix == ".cubin"


def test_a_compile_error_shows_the_log_and_is_not_cached(source: Path, cache: Path) -> None:
    with pytest.raises(nvrtc.CompileError) as raised:
        nvrtc.compile(source, "sm_80")
    message = str(raised.value)
    assert message.startswith(f"{source} does not compile with ")
    assert "answer.cu(3): error: identifier" in message and "BONUS" in message
    assert not cache.exists()


def test_an_architecture_that_nvrtc_does_not_know_is_a_compile_error(source: Path) -> None:
    with pytest.raises(nvrtc.CompileError, match="sm_9999.*\n.*gpu-architecture"):
        _compile(source, "sm_9999")


def test_a_toolkit_header_is_not_found_so_that_no_kernel_comes_to_need_one(source: Path) -> None:
    source.write_text("#include <cuda_fp16.h>\n")
    with pytest.raises(nvrtc.CompileError, match="cuda_fp16.h"):
        _compile(source)


def test_without_cuda_python_the_error_says_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(nvrtc.CompilerMissing, match="pip install cuda-python nvidia-cuda-nvrtc"):
        _compile(source)


def test_without_the_nvrtc_library_the_error_says_what_to_install(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvrtc as bindings
    from cuda.pathfinder import DynamicLibNotFoundError

    def missing() -> None:
        raise DynamicLibNotFoundError("no libnvrtc.so.13\nsearched: everywhere")

    monkeypatch.setattr(bindings, "nvrtcVersion", missing)
    with pytest.raises(nvrtc.CompilerMissing, match=r"\(no libnvrtc.so.13\).*pip install cuda-python"):
        _compile(source)


def test_resources_are_those_of_each_kernel(source: Path) -> None:
    source.write_text("""
        extern "C" __global__ void plain(float* x) { x[0] = 1; }
        extern "C" __global__ void shared(float* x) {
            __shared__ float kept[300];
            kept[threadIdx.x] = x[threadIdx.x];
            __syncthreads();
            x[threadIdx.x] = kept[threadIdx.x ^ 1];
        }
        extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x, int n) {
            float kept[96];
            #pragma unroll
            for (int i = 0; i < 96; ++i) kept[i] = x[i * n];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 96; ++i) x[i * n] = kept[95 - i] * kept[i];
        }
    """)
    resources = _compile(source).resources
    assert set(resources) == {"plain", "shared", "spilling"}
    assert resources["plain"][1:] == (0, 0, 0, 0)
    assert 0 < resources["plain"].registers < 20
    assert resources["shared"].shared_bytes == 1200
    assert resources["shared"].spill_store_bytes == 0
    assert resources["spilling"].registers == 32
    assert resources["spilling"].spill_store_bytes > 0
    assert resources["spilling"].spill_load_bytes > 0
    assert resources["spilling"].stack_bytes > 0
    assert _compile(source).resources == resources, "read from the cache"


def test_the_spills_of_a_function_that_is_not_inlined_are_charged_to_the_kernels() -> None:
    log = """
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 40 bytes cumulative stack size, 40 bytes smem
ptxas info    : Function properties for _Z1fPfi
    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Compiling entry function 'bare' for 'sm_90a'
ptxas info    : Function properties for bare
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 360 bytes cmem[0]
"""
    assert nvrtc.parse_resources(log) == {
        "k": nvrtc.Resources(30, 28, 36, 48, 40),
        "bare": nvrtc.Resources(8, 24, 28, 16, 0),
    }


def test_numeric_cuh_is_found_from_any_folder_and_one_of_the_folder_goes_before_it(source: Path) -> None:
    body = 'extern "C" __global__ void k(unsigned* x) {{ x[0] = {}; }}'
    source.write_text('#include "numeric.cuh"\n' + body.format("numeric::Bf16::pack(1.0f, 2.0f) + numeric::own"))
    with pytest.raises(nvrtc.CompileError, match="own"):
        _compile(source)
    source.with_name("numeric.cuh").write_text(
        "namespace numeric { constexpr int own = 1; struct Bf16 { static __device__ unsigned pack(float, float) "
        "{ return 0; } }; }"
    )
    assert "k" in _compile(source).resources
