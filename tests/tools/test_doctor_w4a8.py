"""What `kvcompile doctor` says of W4A8 linears: kernels and tilings on a GPU, instructions on a CPU."""

import json

import pytest
from tests.tools.doctor_hosts import CPU_HOST, GPU_HOST, H200, T4, clean_environment, host

from kvcompile.ops import nvrtc
from kvcompile.ops.driver import NoDevice
from kvcompile.ops.w4a8 import cuda, table
from kvcompile.tools import doctor_probes, doctor_w4a8
from kvcompile.tools.doctor_finding import Finding, Gpu

RTX = Gpu("NVIDIA RTX 4090", (8, 9), 24 << 30)
TABLE = {"format": 1, "shapes": [{"rows": 64, "columns": 128, "entries": [{"tokens": 8, "tiling": None, "us": 1.0}]}]}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The cache of this host, empty."""
    clean_environment(monkeypatch)
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def prepared(monkeypatch):
    """The arguments of each preparation of kernels, which does nothing."""
    calls = []
    monkeypatch.setattr(cuda, "prepare", lambda device, *rest: calls.append((device.index, *rest[:3])))
    return calls


def _states(findings):
    assert [f.name for f in findings if (f.state == "ok") == bool(f.remedy)] == []
    return [(f.name, f.state, f.value) for f in findings]


def test_each_kind_of_gpu_that_can_run_them_is_prepared_once_by_its_own_index(monkeypatch, prepared):
    host(monkeypatch, GPU_HOST, devices=[T4, H200, H200, RTX])
    names = [(f.name, f.value.partition(":")[0]) for f in doctor_probes.w4a8()]
    assert names == [(what, gpu.name) for gpu in (H200, RTX) for what in ("kernels", "tilings")]
    assert prepared == [(1, 4096, 4096, 32), (3, 4096, 4096, 32)]


def test_kernels_that_are_compiled_now_are_counted(monkeypatch, cache):
    (cache / "kernels").mkdir()
    (cache / "kernels" / "old.cubin").touch()
    monkeypatch.setattr(cuda, "prepare", lambda *_: [(cache / "kernels" / f"{i}.cubin").touch() for i in range(3)])
    assert _states(doctor_w4a8.on_gpu({0: H200}))[0] == (
        "kernels",
        "ok",
        "NVIDIA H200: 3 compiled in 0 s and kept in the cache",
    )


@pytest.mark.parametrize(("present", "said"), [(True, "load from the cache"), (False, "load")])
def test_kernels_that_were_compiled_before_are_said_to_be_cached(prepared, cache, present, said):
    (cache / "kernels").mkdir()
    if present:
        (cache / "kernels" / "a.cubin").touch()
    assert _states(doctor_w4a8.on_gpu({0: H200}))[0] == ("kernels", "ok", f"NVIDIA H200: {said}")


@pytest.mark.parametrize(
    ("error", "value"),
    [
        (nvrtc.CompilerMissing("NVRTC is needed"), "NVIDIA H200: NVRTC is needed"),
        (
            nvrtc.CompileError("a.cu does not compile\nlog"),
            "NVIDIA H200: cannot be compiled or loaded: a.cu does",
        ),
        (NoDevice("the driver cannot be used"), "NVIDIA H200: cannot be compiled or loaded: the driver cannot be used"),
    ],
)
def test_kernels_that_cannot_be_had_are_a_failure(monkeypatch, error, value):
    def fail(*_):
        raise error

    monkeypatch.setattr(cuda, "prepare", fail)
    name, state, found = _states(doctor_w4a8.on_gpu({0: H200}))[0]
    assert (name, state) == ("kernels", "fail")
    assert found.startswith(value) and "\n" not in found


def _tilings(gpu):
    return next(f for f in doctor_w4a8.on_gpu({0: gpu}) if f.name == "tilings")


def _own_table(gpu, text):
    path = table.user_path(gpu.name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_tilings_of_this_version_are_named_as_such(prepared):
    value = "NVIDIA H200: measured on this kind of GPU, part of this version"
    assert _tilings(H200) == Finding("W4A8", "tilings", "ok", value)


def test_a_gpu_that_nobody_has_measured_is_a_warning_with_the_command_and_the_file_that_it_writes(prepared, cache):
    assert _tilings(RTX) == Finding(
        "W4A8",
        "tilings",
        "warn",
        "NVIDIA RTX 4090: not measured on this GPU, so a cost model that nobody has measured chooses",
        f"`kvcompile bench w4a8 --tune` measures, and writes {cache}/tables/nvidia-rtx-4090.json",
    )


@pytest.mark.parametrize(("gpu", "rest"), [(RTX, ""), (H200, ", and this version's for the rest")])
def test_tilings_that_the_user_has_measured_are_named_with_their_file(prepared, gpu, rest):
    path = _own_table(gpu, json.dumps(TABLE))
    assert _tilings(gpu) == Finding("W4A8", "tilings", "ok", f"{gpu.name}: measured here, {path}{rest}")


def test_a_table_that_cannot_be_used_is_a_warning(prepared):
    path = _own_table(H200, '{"format": 7}')
    finding = _tilings(H200)
    assert finding.state == "warn"
    assert finding.value == f"NVIDIA H200: {path} is ignored: format is 7; this version reads 1"
    assert finding.remedy == "measure anew with `kvcompile bench w4a8 --tune`, or remove the file"


@pytest.mark.parametrize(
    ("text", "state", "says"),
    [
        ("processor: 0\nflags\t\t: fpu avx512_vnni sse\n", "ok", "; the CPU has AVX-512 VNNI"),
        (
            "flags : amx_int8 avx_vnni\nflags : fpu\n",
            "ok",
            "; the CPU has AMX and AVX-VNNI",
        ),
        ("Features : fp asimddp i8mm\n", "ok", "; the CPU has I8MM and DOTPROD"),
        ("flags : fpu avx2\n", "warn", "; the CPU has neither VNNI nor AMX for them"),
        ("", "warn", "; the CPU has neither VNNI nor AMX for them"),
        (None, "ok", "; the CPU's instructions are unknown: No such file or directory"),
    ],
)
def test_the_cpu_is_named_with_its_instructions_for_int8(tmp_path, text, state, says):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert _states(doctor_w4a8.on_cpu(tmp_path)) == [
        ("CPU", state, f"int8 products in torch (oneDNN), no kernels to compile{says}")
    ]


@pytest.mark.parametrize(
    ("packages", "devices", "names"),
    [(CPU_HOST, [], ["CPU"]), (CPU_HOST, [H200], ["CPU"]), (GPU_HOST, [], []), (GPU_HOST, [T4], [])],
)
def test_what_vllm_will_run_on_is_what_is_looked_at(monkeypatch, prepared, packages, devices, names):
    host(monkeypatch, packages, devices=devices)
    assert [f.name for f in doctor_probes.w4a8()] == names
