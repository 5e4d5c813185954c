"""The process that compiles for `kvcompile graph-dump`: `python -m kvcompile.tools.graph_compile JOB`.

A process of its own since compiling leaves vLLM half started, writes to standard output from C++, and reads its
environment at import. JOB is a JSON file with "model", "arguments" and "result", the file that gets the document.
Exit code 2 with one line in the result ("error") for a user's mistake; a fault of vLLM's is a stack trace in the log.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools import graph_document


def main(job: Path) -> int:
    wanted = json.loads(job.read_text(encoding="utf-8"))
    result = Path(wanted["result"])
    try:
        with tempfile.TemporaryDirectory(dir=result.parent) as caches:
            _start_cold(Path(caches))
            graph_document.write(result, _compile(wanted["model"], wanted["arguments"]))
    except UsageError as error:
        result.write_text(json.dumps({"error": str(error)}), encoding="utf-8")
        return 2
    return 0


def _start_cold(folder: Path) -> None:
    """A cache would hide the passes from us. What vLLM knows of model classes stays: finding that out takes long."""
    import vllm.envs

    known = Path(vllm.envs.VLLM_CACHE_ROOT, "modelinfos")
    if known.is_dir():
        (folder / "modelinfos").symlink_to(known.absolute())
    os.environ.update(
        VLLM_CACHE_ROOT=str(folder),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )


def _compile(model: str, arguments: list[str]) -> graph_document.Document:
    from kvcompile.integrations.vllm.watch import compile_model
    from kvcompile.tools.graph_recorder import Recorder
    from kvcompile.tools.record import versions

    recorder = Recorder()
    compile_model(model, arguments, recorder)
    return graph_document.document(
        model,
        arguments,
        startup_line=recorder.startup_line,
        settings=recorder.settings,
        versions=versions(),
        faults=recorder.faults,
        graphs=recorder.graphs(),
    )


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's engine was left in the middle of its start: nothing of it is to be wound up.
    os._exit(code)
