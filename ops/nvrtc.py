"""Compile a .cu file to a cubin with NVRTC, without a driver or a GPU, and keep the result on disk by content hash.

    binary = nvrtc.compile(Path(__file__).with_name("act_quant.cu"), "sm_90a", {"DTYPE": 1})
    binary.cubin, binary.resources["quant_per_token"].spill_store_bytes

`#include "name.cuh"` finds the headers beside the source, then those of this folder (`numeric.cuh`), and nothing else:
no CUDA toolkit is needed, and no header of one (cuda_fp16.h, ...) can be included. Source, headers, defines,
architecture, options and NVRTC version make up the hash, so nothing stale is ever loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

COMMON_HEADERS = Path(__file__).parent
# Line information costs nothing at run time and lets compute-sanitizer and profilers name lines.
OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
# NVRTC has a cache of its own from this version on, and a program that it finds there has an empty log: no resources.
_CACHES_FROM = (12, 9)
MAGIC = b"kvcompile cubin 1\n"
REMEDY = "install it with `pip install cuda-python nvidia-cuda-nvrtc` (both come with `kvcompile[cuda]`)"


class CompileError(RuntimeError):
    """NVRTC refused a source; the message ends with its log."""


class CompilerMissing(RuntimeError):
    """cuda-python or the NVRTC library is not installed; the message says what to install."""


class Resources(NamedTuple):
    """What ptxas gave one kernel: registers and bytes per thread, static shared memory in bytes per block.

    Spills and stack include the device functions that ptxas did not inline; a kernel of a source with such functions is
    charged for all of them.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int


class Binary(NamedTuple):
    """A compiled source: the ELF image, the log of NVRTC and ptxas, and the resources of each kernel by name."""

    cubin: bytes
    log: str
    resources: dict[str, Resources]


def compile(source: Path, arch: str, defines: Mapping[str, int | str] | None = None) -> Binary:
    """The cubin of `source` for `arch` ("sm_80", "sm_90a", ...), from the disk cache or newly compiled.

    `defines` become preprocessor macros. Raises CompileError with the log, CompilerMissing, or OSError if a file cannot
    be read. Safe for any number of processes and threads at once; a cache that cannot be written costs one warning.
    """
    text = source.read_bytes()
    headers = _headers(source.parent)
    version = _version()
    options = [*OPTIONS, f"--gpu-architecture={arch}", *(["--no-cache"] if version >= _CACHES_FROM else [])]
    options += [f"--define-macro={name}={value}" for name, value in sorted((defines or {}).items())]
    key = _key("{}.{}".format(*version), source.name, text, headers, options)
    entry = f"{source.stem}-{arch}-{key.hex()[:32]}.cubin"
    found = _read(entry, key)
    if found is None:
        found = _compile(source, text, headers, options)
        _write(entry, key, *found)
    cubin, log = found
    return Binary(cubin, log, parse_resources(log))


def parse_resources(log: str) -> dict[str, Resources]:
    """The resources of every kernel in a log of `ptxas -v`."""
    kernels: dict[str, dict[str, int]] = {}
    shared_by_all = {"stack": 0, "store": 0, "load": 0}
    kernel, function = "", ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
            kernels[kernel] = {"stack": 0, "store": 0, "load": 0, "registers": 0, "smem": 0}
        elif match := re.search(r"Function properties for (\w+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            into = kernels.get(function, shared_by_all)
            for name, value in zip(("stack", "store", "load"), match.groups(), strict=True):
                into[name] += int(value)
        elif match := re.search(r"Used (\d+) registers", line):
            kernels[kernel]["registers"] = int(match[1])
            if match := re.search(r"(\d+) bytes smem", line):
                kernels[kernel]["smem"] = int(match[1])
    return {
        name: Resources(
            registers=k["registers"],
            spill_store_bytes=k["store"] + shared_by_all["store"],
            spill_load_bytes=k["load"] + shared_by_all["load"],
            stack_bytes=k["stack"] + shared_by_all["stack"],
            shared_bytes=k["smem"],
        )
        for name, k in kernels.items()
    }


def cache_dir() -> Path:
    """Where cubins are kept: `kernels` under $KVCOMPILE_CACHE_DIR, or $XDG_CACHE_HOME/kvcompile, or ~/.cache/kvcompile.

    It need not exist, and no file in it is ever needed. Raises RuntimeError for a `~` that has no meaning.
    """
    root = os.environ.get("KVCOMPILE_CACHE_DIR")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kvcompile")
    return Path(root).expanduser() / "kernels"


def _headers(folder: Path) -> dict[str, bytes]:
    """All headers that a source in `folder` can include, by name; the folder's own win."""
    paths = [*COMMON_HEADERS.glob("*.cuh"), *folder.glob("*.cuh")]
    return {path.name: path.read_bytes() for path in paths}


def _key(version: str, name: str, text: bytes, headers: Mapping[str, bytes], options: list[str]) -> bytes:
    digest = hashlib.sha256()
    parts = [version.encode(), name.encode(), text, *(option.encode() for option in options)]
    parts += [part for name, header in sorted(headers.items()) for part in (name.encode(), header)]
    for part in parts:
        # With its length, so that moving a byte from one part to the next changes the hash.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _read(entry: str, key: bytes) -> tuple[bytes, str] | None:
    """(cubin, log) of a cache entry, or None where there is none that is whole and of this very key."""
    try:
        data = (cache_dir() / entry).read_bytes()
    except (OSError, RuntimeError):  # compiled instead; `_write` reports a directory that is of no use
        return None
    body = data[len(MAGIC) + 32 :]
    if data[: len(MAGIC) + 32] != MAGIC + hashlib.sha256(key + body).digest():
        return None
    end = 8 + int.from_bytes(body[:8], "little")
    return body[end:], body[8:end].decode()


def _write(entry: str, key: bytes, cubin: bytes, log: str) -> None:
    """Put an entry in place atomically, or log one warning per process if that cannot be done."""
    text = log.encode()
    body = len(text).to_bytes(8, "little") + text + cubin
    directory: Path | str = "the kernel cache"
    try:
        directory = cache_dir()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{entry}.", delete=False) as file:
            try:
                file.write(MAGIC + hashlib.sha256(key + body).digest() + body)
                file.close()
                os.replace(file.name, directory / entry)
            except BaseException:
                os.unlink(file.name)
                raise
    except (OSError, RuntimeError) as error:
        _warn_once(directory, error)


_warned: set[str] = set()


def _warn_once(directory: Path | str, error: Exception) -> None:
    if str(directory) not in _warned:
        _warned.add(str(directory))
        logger.warning(
            "compiled kernels cannot be kept in %s (%s), so every start compiles them again: "
            "make it writable, free some space, or name a writable directory in KVCOMPILE_CACHE_DIR",
            directory,
            error,
        )


def require() -> None:
    """Raise CompilerMissing if nothing can be compiled here, without compiling anything."""
    _version()


def _nvrtc() -> Any:
    """The cuda-python module, once the library behind it has answered."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilerMissing(f"cuda-python is needed to compile kernels ({error}): {REMEDY}") from error
    return nvrtc


def _version() -> tuple[int, int]:
    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-python loads the library at the first call
        cause = str(error).strip().partition("\n")[0]
        raise CompilerMissing(f"the NVRTC library is needed to compile kernels ({cause}): {REMEDY}") from error
    return major, minor


def _compile(source: Path, text: bytes, headers: Mapping[str, bytes], options: list[str]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    names = [name.encode() for name in headers]
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.name.encode(), len(names), [*headers.values()], names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        # Without the times, the same source gives the same bytes.
        log = "\n".join(line for line in log.splitlines() if "Compile time" not in line).strip()
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            reason = _checked(nvrtc.nvrtcGetErrorString(result)).decode()
            raise CompileError(f"{source} does not compile with {' '.join(options)}: {reason}\n{log}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(get_size: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_checked(get_size(program)))
    _checked(get(program, buffer))
    return bytes(buffer)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a (result, value) or (result,) tuple of cuda-python."""
    result, *values = answer
    if result != 0:
        raise RuntimeError(f"NVRTC failed: {result!r}")
    return values[0] if values else None
