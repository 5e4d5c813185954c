"""Running a script under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
needs_sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed"
)


def assert_nothing_to_say(tool: str, script: str) -> None:
    """`script` ends by printing done, and the tool finds nothing in its kernels."""
    # A kernel's parameters are read from the driver until it has no more, which memcheck would report; other errors of
    # the driver raise.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = ["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9", sys.executable, "-c", script]
    # Caching would hide a read past the end of a tensor in the same cached block.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"\b0 (errors|hazards)\b", done.stdout)
