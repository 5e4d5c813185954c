"""Remembers between processes that the C++ compiler can build for this CPU's vector instructions.

Before its first CPU kernel, Inductor builds a test library for every vector ISA and loads each in a new interpreter,
which imports torch: seven interpreters, over half a minute on two cores, in every process that compiles or loads a
compiled graph. vLLM's compile cache does not save it. The answer depends on the compiler, the flags, the code and
torch's version, so a positive one is kept under that key; a negative one is asked again, for a compiler can be
installed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.kvcompile")


def remember_checks() -> None:
    """Make Inductor's check in this process look for an earlier answer first. Idempotent; does nothing on a GPU."""
    from torch._inductor.cpu_vec_isa import VecISA

    if current_platform.is_cpu() and not hasattr(VecISA.check_build, "__wrapped__"):
        VecISA.check_build = _remembering(VecISA.check_build)


def _remembering(check_build: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    from torch._inductor.cpu_vec_isa import _get_isa_dry_compile_fingerprint

    @functools.wraps(check_build)
    def remembered(isa: Any, code: str) -> bool:
        key = hashlib.sha256(f"{_get_isa_dry_compile_fingerprint(isa._arch_flags)}\0{code}".encode()).hexdigest()
        answer = Path(envs.VLLM_CACHE_ROOT, "kvcompile", "vector_isa", key)
        if answer.exists():
            return True
        if not check_build(isa, code):
            return False
        try:
            answer.parent.mkdir(parents=True, exist_ok=True)
            answer.touch()
        except OSError as error:
            logger.warning("kvcompile cannot remember the vector ISA check, the next start repeats it: %s", error)
        return True

    return remembered
