"""`kvcompile quantize`: a W4A8 checkpoint out of a Hugging Face checkpoint of the Llama family."""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from kvcompile.config import UsageError
from kvcompile.tools import quantize_report as report
from kvcompile.tools import quantize_steps as steps
from kvcompile.tools.quantize_output import COMPLETE, Workspace, found, kept
from kvcompile.tools.quantize_paths import source_and_out
from kvcompile.tools.quantize_progress import print_result, progress, say
from kvcompile.tools.quantize_side import refuse_no_text, say_what_is_left_out
from kvcompile.tools.quantize_source import Source, TensorFiles

METHODS = {
    "rtn": "round to nearest",
    "search": "scales of the smallest squared error, without data",
    "gptq": "GPTQ on the text of --calibration",
}
GROUP_SIZES = ("128", "64", "channel")
CALIBRATION_TOKENS = 32768

Texts = dict[str, list[int] | None]


class Report(NamedTuple):
    """What is printed of a run. sizes: bytes of all tensors, before and after."""

    rows: list[report.Row]
    sizes: tuple[int, int]
    seconds: float
    calibration: str | None
    perplexity: str | None

    def text(self) -> str:
        """For standard output, which is not written yet: rich's own capture would do so."""
        place, text = Console(), io.StringIO()
        console = Console(file=text, force_terminal=place.is_terminal, width=place.width, highlight=False)
        report.show(console, self.rows, self.sizes, self.seconds)
        for line in filter(None, (self.calibration, self.perplexity)):
            console.print(line, soft_wrap=True)
        return text.getvalue()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Quantise the linears inside the decoder layers to 4 bits on an int8 grid (W4A8). A run that was stopped is "
        "continued by the same command."
    )
    parser.add_argument("src", metavar="SRC", help="folder of the checkpoint; it is not changed")
    parser.add_argument("out", metavar="OUT", help="folder to make; called OUT.part until it is complete")
    parser.add_argument("--group-size", choices=GROUP_SIZES, default="128", help="weights per scale (default 128)")
    methods = "; ".join(f"{name}: {what}" for name, what in METHODS.items())
    parser.add_argument("--method", choices=METHODS, help=f"{methods} (default: search, or gptq with --calibration)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="plain text like what will be served")
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help=f"use the first N tokens of it (default {CALIBRATION_TOKENS})",
    )
    parser.add_argument("--perplexity", type=Path, metavar="FILE", help="report perplexity before and after on it")


def run(args: argparse.Namespace) -> int:
    """0 once OUT is complete, with the report on standard output and progress on standard error.

    An interruption (Ctrl-C) is told in one line with what it leaves, and propagates.
    """
    workspace, told = None, ""
    try:
        method = _method(args)
        src, out = source_and_out(args.src, args.out)
        source = Source(src)
        wanted = None if args.group_size == "channel" else int(args.group_size)
        job = steps.Job(source, method, args.group_size, source.group_sizes(wanted))
        made_from = {"--method": method, "--group-size": args.group_size}
        if method == "gptq":
            made_from |= {
                "--calibration": _identity(args.calibration),
                "--calibration-tokens": args.calibration_tokens,
            }
        texts = _texts(args, source)
        with torch.inference_mode(), Workspace(out, {**made_from, "source": source.identity()}) as workspace:
            if (left := found(workspace)) is not None:
                say(f"quantize: {left}")
            if not workspace.done(COMPLETE):
                workspace.need(job.disk_bytes())
                with progress("checking the source", job.tensor_bytes()[0]) as advance:
                    source.check_finite(advance)
                say_what_is_left_out("quantize", src, frozenset(source.shards))
                told = _quantise(job, workspace, texts, args.calibration_tokens).text()
            workspace.publish(drop=[steps.layer_file(i) for i in range(source.layers)] if method == "gptq" else [])
    except KeyboardInterrupt:
        say(f"quantize: interrupted: {kept(workspace)}")
        raise
    except OSError as error:
        cause = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise UsageError(
            f"cannot make {args.out}: {cause}; put that right and run the same again to continue"
        ) from error
    print_result(f"{told}wrote {out}\n", out)
    return 0


def _method(args: argparse.Namespace) -> str:
    """The method, after checking that it and the calibration arguments go together."""
    method = args.method or ("gptq" if args.calibration else "search")
    if method == "gptq" and not args.calibration:
        raise UsageError("--method gptq needs text: give --calibration FILE")
    given = "--calibration" if args.calibration else "--calibration-tokens"
    if method != "gptq" and (args.calibration or args.calibration_tokens is not None):
        raise UsageError(f"{given} has no use in --method {method}; leave one of them out")
    if args.calibration_tokens is None:
        args.calibration_tokens = CALIBRATION_TOKENS
    if args.calibration_tokens < steps.WINDOW:
        raise UsageError(f"--calibration-tokens is {args.calibration_tokens}; allowed is {steps.WINDOW} or more")
    return method


def _texts(args: argparse.Namespace, source: Source) -> Texts:
    """Token ids of the texts that were given, which the model can run. transformers is imported only for these."""
    texts: Texts = {"calibration": None, "perplexity": None}
    if args.calibration or args.perplexity:
        from kvcompile.tools.quantize_model import LayerwiseModel

        LayerwiseModel(source.path, source.read, source.names).check(source.shapes())
    for name, limit in (("calibration", args.calibration_tokens), ("perplexity", None)):
        if file := getattr(args, name):
            from kvcompile.tools.quantize_perplexity import tokens_of

            texts[name] = tokens_of(file, source.path, f"--{name}", source.config["vocab_size"], limit)
    return texts


def _quantise(job: steps.Job, workspace: Workspace, texts: Texts, wanted: int) -> Report:
    """Make everything but the name OUT. `wanted`: tokens that --calibration-tokens asks for."""
    start, source = time.monotonic(), job.source
    for width, size in job.group_sizes.items():
        if job.group_size not in ("channel", str(size)):
            shown = "one group per channel" if size == width else f"groups of {size}"
            say(f"quantize: {width} input channels do not divide into groups of {job.group_size}: {shown} instead")
    if texts["calibration"]:
        with progress("calibrating layers", steps.layers_work(job, workspace)) as advance:
            steps.calibrate_layers(job, workspace, texts["calibration"], advance)
    sizes = job.tensor_bytes()
    with progress("writing shards", steps.shards_work(job, workspace)) as advance:
        steps.write_shards(job, workspace, advance)
    steps.write_rest(job, workspace)
    rows = {row["name"]: row for step in workspace.rows.values() for row in step}
    rows = [rows[name] for name in source.linears]
    seconds = time.monotonic() - start
    result: dict[str, Any] = {
        "method": job.method,
        "quantization_config": job.quantization_config(),
        "tensor_bytes": {"before": sizes[0], "after": sizes[1]},
        "seconds": seconds,
        "summary": report.summary(rows),
        "layers": rows,
    }
    calibration = perplexity = None
    if texts["calibration"]:
        used = len(texts["calibration"]) // steps.WINDOW * steps.WINDOW  # whole windows
        result["calibration"] = {"tokens": used, "tokens_asked_for": wanted}
        calibration = f"calibrated on {used} tokens"
        if len(texts["calibration"]) < wanted:
            calibration += f": the text has {len(texts['calibration'])}, fewer than --calibration-tokens {wanted}"
    if texts["perplexity"]:
        perplexity, result["perplexity"] = _perplexity(job, workspace.path, texts["perplexity"])
    workspace.write_json(report.REPORT, result)
    return Report(rows, sizes, seconds, calibration, perplexity)


def _perplexity(job: steps.Job, made: Path, tokens: list[int]) -> tuple[str, dict[str, Any]]:
    from kvcompile.tools import quantize_perplexity as perplexity

    source = job.source
    with progress("perplexity", 2 * source.layers) as advance:
        before, after = (
            perplexity.losses(source.path, files, tokens, advance)
            for files in (source, TensorFiles(made, list(source.shards)))
        )
    comparison = perplexity.compare(before, after)
    return perplexity.told(comparison), comparison.as_json()


def _identity(file: Path) -> str:
    """The text's name and what it holds."""
    refuse_no_text("--calibration", file)
    try:
        return f"{file.name} (SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"
    except OSError as error:
        raise UsageError(f"--calibration {file} cannot be read: {error.strerror}; give a plain text file") from error


if __name__ == "__main__":
    from kvcompile.cli import main

    sys.exit(main(["quantize", *sys.argv[1:]]))
