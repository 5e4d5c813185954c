"""Running code against a real vLLM engine, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SERVER_ARGUMENTS = ("--max-model-len", "6144", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(320 * 2**20))


def run_python(
    script: str, *arguments: str | Path, environment: dict[str, str] | None = None, timeout_s: float = 600
) -> str:
    """Run `script` in a new interpreter and return its output, standard error included; fails the test on an error."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
