"""`kvcompile bench serve`: a served model, stock vLLM beside kvcompile and its parts, at equal GPU memory.

Every system serves the same requests, all sent at once: one system after the other, or with --together each case round
the systems, run by run. Equal is the sum of weights and KV cache, so that smaller weights are more cache; or the KV
cache alone.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvcompile.config import LM_HEAD_INT8_ROWS, UsageError
from kvcompile.llama_values import MODEL_TYPES
from kvcompile.tools import (
    engine_process,
    model_shapes,
    record,
    serve_gpus,
    serve_memory,
    serve_options,
    serve_plot,
    serve_report,
    serve_state,
    serve_systems,
    state_file,
)
from kvcompile.tools.checkpoint_config import quantised_by, read_json, refuse_other_values
from kvcompile.tools.serve_run import Case, Serving
from kvcompile.tools.serve_state import Results
from kvcompile.tools.serve_systems import SYSTEMS

SUMMARY = "output tokens a second of a served model: stock vLLM and kvcompile at equal GPU memory"
_CASE = r"[1-9]\d{0,6}:[1-9]\d{0,6}(:[1-9]\d{0,6})?"

add_arguments = serve_options.add_arguments


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output. Raises UsageError if a system did not start as it should."""
    serve_options.complete(args)
    cases = grid(args.grid, args.requests)
    gpus = serve_gpus.chosen(args.gpus)
    names = serve_systems.chosen(args.systems, min(gpu.capability for gpu in gpus))
    shares = {gpu: names[place :: len(gpus)] for place, gpu in enumerate(gpus)}
    with engine_process.scratch("serve", args.json.parent if args.json else None) as scratch:
        serving = _serving(args, cases, names, scratch)
        for gpu, own in shares.items():
            held = {
                n: serve_memory.weight_bytes(serving.config, SYSTEMS[n].weights, serving.int8_head) + serving.kv[n]
                for n in own
            }
            serve_memory.check_fit(held, args.together, gpu)
        serving.results = results = _results(args, serving.config)
        with _progress(len(cases) * len(names) * args.runs, results.kept) as results.told:
            serving.serve({gpu: own for gpu, own in shares.items() if own})
    _report(args, cases, names, results)
    return 0


def grid(text: str, requests: int) -> list[Case]:
    """The cases of --grid. requests: of those that do not say. Raises UsageError."""
    if not re.fullmatch(f"{_CASE}(,{_CASE})*", text):
        raise UsageError(
            f"--grid is {text!r}; allowed are PROMPT:OUTPUT pairs of tokens, or PROMPT:OUTPUT:REQUESTS, as in "
            "512:512:8,4096:128"
        )
    cases = []
    for each in text.split(","):
        prompt, output, *own = map(int, each.split(":"))
        name = f"{prompt}->{output}" + (f" x{own[0]}" if own else "")
        cases.append(Case(prompt, output, own[0] if own else requests, name))
    if len(set(cases)) < len(cases):
        raise UsageError(f"--grid is {text!r}; a case is there twice; leave one out")
    return cases


def _serving(args: argparse.Namespace, cases: list[Case], names: list[str], scratch: Path) -> Serving:
    """Raises UsageError for a model that is quantised by itself or not of a known kind, and for too little memory."""
    model = model_shapes.folder_of(args.model, scratch)
    config = read_json(file := model / "config.json")
    if config.get("quantization_config") is not None:
        by = quantised_by(config["quantization_config"])
        raise UsageError(
            f"model {args.model}: quantised by {by} already, and systems quantise for themselves; give a checkpoint "
            "that is not"
        )
    refuse_other_values(config, file, tuple(MODEL_TYPES))
    tokens = max(case.prompt + case.output for case in cases)
    int8_head = args.max_num_seqs <= LM_HEAD_INT8_ROWS  # as a server of these options has it by itself
    kv = {name: serve_memory.kv_bytes(name, config, args.total_gib, args.kv_gib, tokens, int8_head) for name in names}
    common = {
        **engine_process.model_arguments(model),
        "gpu_memory_utilization": 0.05,  # of the GPU has to be free at the start, where other engines may be
        "dtype": "bfloat16",
        "max_model_len": tokens,
        "max_num_seqs": args.max_num_seqs,
        "enable_prefix_caching": False,
    }
    arguments = {
        name: {
            **common,
            "kv_cache_memory_bytes": kv[name],
            **serve_systems.arguments_of(name, args.host_gib, int8_head),
        }
        for name in names
    }
    return Serving(model, config, cases, args.runs, args.together, arguments, kv, scratch, int8_head)


def _results(args: argparse.Namespace, config: Mapping[str, Any]) -> Results:
    """Empty, or with what the same command has left beside --json. Raises UsageError if another one has.

    config: the model's config.json.
    """
    if not args.json:
        return Results()
    identity = serve_options.deciding(args) | {
        "config.json": config,
        "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
        **state_file.installation(),
    }
    results = Results(state_file.beside(args.json), identity)
    state_file.tell("bench serve", results.file, serve_state.RUNS)
    return results


@contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[str], None]]:
    """Runs done, of all, on standard error if that is a terminal."""
    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total, completed=done)
        yield lambda what: bar.update(task, advance=1, description=f"last: {what}")


def _report(args: argparse.Namespace, cases: list[Case], names: list[str], results: Results) -> None:
    each = f"{args.kv_gib:g} GiB of KV" if args.kv_gib is not None else f"{args.total_gib:g} GiB of weights and KV"
    title = f"{record.gpu()}: {args.model}, {args.requests} requests at once (or as xN says), {each} each"
    rows = serve_report.rows_of(cases, names, results)
    table = serve_report.cells(cases, names, rows), serve_report.notes(cases, names, rows)
    serve_report.show(title, *table)
    if args.markdown:
        record.write_text(args.markdown, serve_report.markdown(title, *table))
    if args.plot:
        record.write_text(args.plot, serve_plot.draw(title, rows))
    if args.json:
        made = record.record("serve", record.command(), rows)
        record.write(
            args.json, {**made, "taken_up_runs": results.kept, "systems": {n: results.facts[n] for n in names}}
        )
        results.done()
