"""What `kvcompile doctor` says of W4A8 linears: whether kernels can run here, and who has measured their tilings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kvcompile.tools.doctor_finding import Finding, Gpu

SECTION = "W4A8"
# A linear as wide as those of an 8B model, in groups of 128: rows, columns, groups.
SHAPE = (4096, 4096, 32)
TUNE = "`kvcompile bench w4a8 --tune`"

# Instructions for int8 products, by the names that Linux has for them.
_INT8 = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "i8mm": "I8MM",
    "asimddp": "DOTPROD",
}


def on_gpu(devices: Mapping[int, Gpu]) -> list[Finding]:
    """Kernels and tilings for each kind among the devices (by torch's index). Compiles what is not cached yet."""
    kinds: dict[str, int] = {}
    for index, device in devices.items():
        kinds.setdefault(device.name, index)
    return [finding for name, index in kinds.items() for finding in (_kernels(name, index), _tilings(name))]


def on_cpu(proc: Path = Path("/proc")) -> list[Finding]:
    """The int8 products of torch, which take the place of the kernels, and what the CPU has for them."""
    how = "int8 products in torch (oneDNN), no kernels to compile"
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError as error:
        return [Finding(SECTION, "CPU", "ok", f"{how}; the CPU's instructions are unknown: {error.strerror}")]
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    if found := [shown for name, shown in _INT8.items() if name in flags]:
        return [Finding(SECTION, "CPU", "ok", f"{how}; the CPU has {' and '.join(found)}")]
    remedy = "for speed serve W4A8 on a CPU with VNNI or AMX, or an unquantised checkpoint on this one"
    return [Finding(SECTION, "CPU", "warn", f"{how}; the CPU has neither VNNI nor AMX for them", remedy)]


def _kernels(name: str, index: int) -> Finding:
    # Not at the top: this needs torch, which another probe may find missing.
    import torch

    from kvcompile.ops import nvrtc
    from kvcompile.ops.w4a8 import cuda

    before, start = _cached(), time.monotonic()
    try:
        cuda.prepare(torch.device("cuda", index), *SHAPE, torch.bfloat16)
    except nvrtc.CompilerMissing as error:
        return Finding(SECTION, "kernels", "fail", f"{name}: {error}", nvrtc.REMEDY)
    except (RuntimeError, OSError) as error:  # NVRTC's errors, and the driver's
        why = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "update the NVIDIA driver, or report this line; unquantised checkpoints can be served meanwhile"
        return Finding(SECTION, "kernels", "fail", f"{name}: cannot be compiled or loaded: {why}", remedy)
    if new := len(_cached() - before):
        seconds = time.monotonic() - start
        return Finding(SECTION, "kernels", "ok", f"{name}: {new} compiled in {seconds:.0f} s and kept in the cache")
    return Finding(SECTION, "kernels", "ok", f"{name}: load" + (" from the cache" if before else ""))


def _cached() -> set[str]:
    """The names of the compiled kernels that are kept; none where there is no such folder."""
    from kvcompile.ops import nvrtc

    try:
        return {file.name for file in nvrtc.cache_dir().glob("*.cubin")}
    except (OSError, RuntimeError):  # the probe of the cache reports what is wrong with it
        return set()


def _tilings(name: str) -> Finding:
    from kvcompile.ops.w4a8 import table

    shipped = (table.SHIPPED / f"{table.slug(name)}.json").is_file()
    path: Path | str = "the user's own table"
    try:
        path = table.user_path(name)
        table.parse(path.read_text())
    except FileNotFoundError:
        if shipped:
            return Finding(SECTION, "tilings", "ok", f"{name}: measured on this kind of GPU, part of this version")
        value = f"{name}: not measured on this GPU, so a cost model that nobody has measured chooses"
        return Finding(SECTION, "tilings", "warn", value, f"{TUNE} measures, and writes {path}")
    except (OSError, RuntimeError, ValueError) as error:
        remedy = f"measure anew with {TUNE}, or remove the file"
        return Finding(SECTION, "tilings", "warn", f"{name}: {path} is ignored: {error}", remedy)
    rest = ", and this version's for the rest" if shipped else ""
    return Finding(SECTION, "tilings", "ok", f"{name}: measured here, {path}{rest}")
