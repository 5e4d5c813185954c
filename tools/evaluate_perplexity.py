"""`kvcompile evaluate perplexity`: a checkpoint on a text, layer by layer in float32, W4A8 linears as served.

With --endpoint served models give the log-probabilities of the same windows instead. A server prunes no prompt whose
log-probabilities are asked for, and on a GPU a prompt attends to its own keys and values before they are quantised:
such a figure is about weights, not about the KV cache.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_endpoint, evaluate_report, evaluate_state
from kvcompile.tools.evaluate_endpoint import Endpoint
from kvcompile.tools.evaluate_report import Table
from kvcompile.tools.evaluate_state import Kept
from kvcompile.tools.evaluate_statistics import compared, row

_TOGETHER = 32  # windows that go through a layer once it is loaded; an interrupted run goes on behind them
SUMMARY = "perplexity on a text file: of a checkpoint, W4A8 or not, or of served models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of a Hugging Face or W4A8 checkpoint; with --endpoint its tokenizer",
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="a plain text file of 512 tokens or more")
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="read only so many tokens of it")
    evaluate_endpoint.add_arguments(parser)
    evaluate_report.add_arguments(parser, plot=False)


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output."""
    evaluate_report.check(args)
    from kvcompile.tools.quantize_perplexity import WINDOW

    if args.limit is not None and args.limit < WINDOW:
        raise UsageError(f"--limit {args.limit}; allowed is {WINDOW} or more, a window")
    if args.endpoint:
        values, kept = _served(args)
        of = "served models"
    else:
        evaluate_endpoint.refuse_without(args, ())
        values, kept = _stored(args)
        of = str(args.model)
    rows = _rows(args.text.name, values)
    count = min(map(len, values.values()))
    title = f"{of} on {count} windows of {WINDOW} tokens, mean and 95 % interval"
    tables = [Table(f"{metric}: {title}", rows, metric) for metric in ("perplexity", "nll")]
    if len(values) > 1:
        tables.append(Table(f"nll, paired difference from {next(iter(values))}: {title}", rows, "difference"))
    evaluate_report.publish(args, "perplexity", rows, tables, kept=kept)
    return 0


def _stored(args: argparse.Namespace) -> tuple[dict[str, list[float]], Kept]:
    """Nats per token of each window, by the system "W4A8" or "as stored"."""
    from kvcompile.tools.quantize_perplexity import WINDOW, losses, tokens_of
    from kvcompile.tools.quantize_source import TensorFiles

    vocabulary = _vocabulary(args.model)
    files = TensorFiles(args.model, sorted(file.name for file in args.model.glob("*.safetensors")))
    if not files.names:
        raise UsageError(f"{args.model} has no .safetensors file; give the folder of a checkpoint")
    tokens = tokens_of(args.text, args.model, "TEXT", vocabulary, args.limit)

    def nats(some: list[int]) -> list[float]:
        with torch.inference_mode():
            found = losses(args.model, files, some, lambda layers: None).double().mean(1)
        if not found.isfinite().all():
            raise UsageError(
                f"{args.model}: its loss on {args.text} is not finite; the checkpoint is damaged, get it again"
            )
        return found.tolist()

    kept, found = evaluate_state.opened(args), []
    step = _TOGETHER * WINDOW if args.json else len(tokens)  # the layers are made once for each step
    for begin in range(0, len(tokens) - WINDOW + 1, step):
        some = tokens[begin : begin + step]
        found += kept.of(some, partial(nats, some))
    system = "W4A8" if any(name.endswith(".qweight") for name in files.names) else "as stored"
    return {system: found}, kept


def _served(args: argparse.Namespace) -> tuple[dict[str, list[float]], Kept]:
    """Nats per token of each window, by endpoint."""
    from kvcompile.tools import evaluate_tokenizer
    from kvcompile.tools.evaluate_served import in_parallel
    from kvcompile.tools.quantize_model import windows
    from kvcompile.tools.quantize_perplexity import WINDOW, tokens_of

    concurrency, vocabulary = evaluate_endpoint.concurrency(args), _vocabulary(args.model)
    endpoints = evaluate_endpoint.connect(args)
    limit = evaluate_endpoint.limit(endpoints)
    if limit is not None and limit <= WINDOW:
        raise UsageError(
            f"--endpoint: --max-model-len {limit} is served; needed are {WINDOW + 1}, a window and a token"
        )
    evaluate_tokenizer.load(args.model, endpoints)
    tokens = windows(tokens_of(args.text, args.model, "TEXT", vocabulary, args.limit), WINDOW).tolist()
    kept = evaluate_endpoint.kept(args, endpoints)

    def nats(endpoint: Endpoint, window: list[int]) -> float:
        return kept.of([endpoint.name, window], partial(endpoint.nats, window))

    values = {each.name: in_parallel(partial(nats, each), tokens, concurrency) for each in endpoints}
    return values, kept


def _vocabulary(model: Path) -> int:
    from kvcompile.tools.checkpoint_config import config_file, read_json

    file = config_file(model)
    vocabulary = read_json(file).get("vocab_size")
    if not isinstance(vocabulary, int):
        raise UsageError(f"{file}: vocab_size is {vocabulary!r}; allowed is a whole number; correct it")
    return vocabulary


def _rows(case: str, values: dict[str, list[float]]) -> list[dict[str, Any]]:
    by_case = {(case, system): nats for system, nats in values.items()}
    rows = compared(by_case, "nll", "nats/token", next(iter(values)))
    for mean in [each for each in rows if each["metric"] == "nll"]:
        nats = torch.tensor(values[mean["system"]], dtype=torch.float64)
        perplexity = row(case, mean["system"], "perplexity", "", nats.exp().tolist())
        for name in ("mean", "mean_low", "mean_high"):  # of the whole text, not the mean of its windows' perplexities
            perplexity[name] = round(torch.tensor(mean[name], dtype=torch.float64).exp().item(), 4)
        rows.append(perplexity)
    return rows
