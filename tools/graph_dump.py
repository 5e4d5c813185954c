"""`kvcompile graph-dump`: what the FX passes do to a model's graphs, as text, as JSON and as a report to look at.

    kvcompile graph-dump MODEL [--out DIR] [flags of vllm serve ...]
    kvcompile graph-dump --diff A B

The model is compiled as `vllm serve MODEL --compilation-config kvcompile` would, cold, up to the passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvcompile.arguments import Parser
from kvcompile.config import UsageError
from kvcompile.model_path import refuse_missing_checkpoint
from kvcompile.tools import graph_diff, graph_document, graph_folder, graph_report, graph_summary, graph_text

DEFAULT_FOLDER = "kvcompile-graphs"
_TAIL_BYTES = 4096
_EAGER = ("--enforce-eager", "--no-enforce-eager")  # the last one counts


def add_arguments(parser: Parser) -> None:
    """Ours; what is left over goes to vLLM as it is."""
    parser.description = "Show what the FX passes do to the graphs of a model, or compare two such dumps."
    parser.usage = (
        "kvcompile graph-dump MODEL [--out DIR] [--open-report] [--keep-log FILE] [flags of vllm serve ...]\n"
        "       kvcompile graph-dump --diff A B"
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="checkpoint folder or hub name, before vLLM's flags")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"folder that is written (default: {DEFAULT_FOLDER}, here)"
    )
    parser.add_argument("--open-report", action="store_true", help="open the report in a browser afterwards")
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="write vLLM's log there, whatever happens")
    parser.add_argument(
        "--diff",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="compare two dumps (folders, or their graphs.json): exit code 0 if equal, 1 if not",
    )

    def with_flags(args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> Any:
        namespace, flags = parser.parse_with_rest(args, namespace)
        namespace.flags = flags
        namespace.given = list(args or [])
        return namespace, []

    parser.parse_known_args = with_flags


def run(args: argparse.Namespace) -> int:
    """0 with a dump, also of a model without a match; 1 if a strict pass or vLLM failed; of --diff 1 if they differ."""
    if broken := [word for word in args.given if "\\udc" in ascii(word)]:
        raise UsageError(f"{broken[0]!r} is no text in UTF-8, in which everything is written; use another name")
    if args.diff is not None:
        return _diff(args)
    if args.model is None:
        raise UsageError("no model is given; give a checkpoint folder or a hub name, or --diff A B")
    if not args.model:
        raise UsageError("the model is empty; give a checkpoint folder or a hub name, or --diff A B")
    if args.flags and args.given.index(args.flags[0]) < args.given.index(args.model):
        raise UsageError(f"{args.flags[0]} stands before the model; give MODEL first, then vLLM's flags")
    # Both would be refused in the end, but by then vLLM has been loaded.
    refuse_missing_checkpoint(args.model)
    eager = [flag for flag in (each.replace("_", "-") for each in args.flags) if flag in _EAGER]
    if eager[-1:] == [_EAGER[0]]:
        raise UsageError("--enforce-eager is given, with which nothing is compiled; leave it out")
    folder = args.out or Path(DEFAULT_FOLDER)
    graph_folder.refuse_foreign(folder)
    if args.keep_log is not None:
        _refuse_unwritable(args.keep_log, folder)
    console = Console(highlight=False)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, graph_folder.LOG)
        try:
            content = _compile(console, args.model, args.flags, Path(scratch), log)
        finally:
            if args.keep_log is not None and log.exists():
                _keep(log, args.keep_log)
        if content is None:
            return 1
        graph_folder.replace(folder, lambda into: _fill(into, content, log))
    graph_summary.show(console, content)
    seconds = time.monotonic() - start
    console.print(Text(f"Compiled cold, up to the passes, in {seconds:.0f} s. Written: {folder}"))
    if args.open_report and not webbrowser.open((folder.absolute() / graph_folder.REPORT).as_uri()):
        console.print(Text(f"No browser was found: open {folder / graph_folder.REPORT} yourself."))
    return 1 if content["faults"] else 0


def _refuse_unwritable(kept: Path, folder: Path) -> None:
    """Raise `UsageError` unless a log can be written to `kept`. What is there already is left for now."""
    try:
        if kept.resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"--keep-log {kept}: is in {folder}, which is written anew; name a file elsewhere")
        if kept.is_fifo():
            raise UsageError(f"--keep-log {kept}: is a pipe; name a file")
        there = kept.exists()
        with kept.open("ab"):
            pass
        if not there:
            kept.unlink()
    except OSError as error:
        raise UsageError(
            f"--keep-log {kept}: cannot be written ({error.strerror or error}); name a file in an existing folder"
        ) from None


def _keep(log: Path, kept: Path) -> None:
    """A failure is said and no more: the dump, or an error on its way, counts more than its log."""
    try:
        shutil.copyfile(log, kept)
    except OSError as error:
        why = error.strerror or error
        print(f"kvcompile graph-dump: --keep-log {kept}: the log could not be written ({why})", file=sys.stderr)


def _diff(args: argparse.Namespace) -> int:
    if args.model is not None or args.flags or args.out is not None or args.keep_log is not None or args.open_report:
        raise UsageError("--diff compares two dumps that are there; give it alone: --diff A B")
    a, b = (graph_document.read(path) for path in args.diff)
    found = graph_diff.differences(a, b)
    graph_diff.show(Console(highlight=False), (str(args.diff[0]), str(args.diff[1])), found)
    return 1 if found else 0


def _compile(console: Console, model: str, flags: list[str], scratch: Path, log: Path) -> dict[str, Any] | None:
    """The document, or None after saying why vLLM failed. Raises `UsageError`."""
    job, result = scratch / "job.json", scratch / graph_document.FILE
    job.write_text(json.dumps({"model": model, "arguments": flags, "result": str(result)}), encoding="utf-8")
    environment = dict(os.environ)
    if Path(model).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be fetched, and asking in vain takes minutes
    with log.open("wb") as out, console.status("compiling, up to the passes") as status:
        if not console.is_terminal:
            console.print("compiling, up to the passes ...")
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcompile.tools.graph_compile", str(job)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    code = process.wait(0.5)
                    break
                except subprocess.TimeoutExpired:
                    said = _last_line(log)[: max(20, console.width - 40)]
                    status.update(Text(f"compiling, up to the passes: {said}"))
        finally:
            with contextlib.suppress(ProcessLookupError):  # with it ends what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return graph_document.read(result)
    if code == 2 and result.exists():
        raise UsageError(json.loads(result.read_text(encoding="utf-8"))["error"])
    why = _last_error(log) or f"exit code {code}"
    print(f"kvcompile graph-dump: vLLM failed: {why} (--keep-log FILE keeps the whole story)", file=sys.stderr)
    return None


def _fill(into: Path, content: dict[str, Any], log: Path) -> None:
    graph_document.write(into / graph_document.FILE, content)
    for graph in content["graphs"]:
        graph_text.write(into / f"graph-{graph['number']}", graph)
    (into / graph_folder.REPORT).write_text(graph_report.page(content), encoding="utf-8")
    shutil.copyfile(log, into / graph_folder.LOG)


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else ""


def _last_error(log: Path) -> str | None:
    """The last line of a stack trace: what the error was."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if "Error: " in line or line.endswith("Error")), None)


if __name__ == "__main__":
    from kvcompile.cli import main

    sys.exit(main(["graph-dump", *sys.argv[1:]]))
