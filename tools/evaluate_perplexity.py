"""`kvcompile evaluate perplexity`: a checkpoint on a text, layer by layer in float32, W4A8 linears as served."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_table, record

SUMMARY = "perplexity of a checkpoint, W4A8 or not, on a text file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a Hugging Face or W4A8 checkpoint")
    parser.add_argument("text", type=Path, metavar="TEXT", help="a plain text file of 512 tokens or more")
    parser.add_argument("--limit", type=int, metavar="TOKENS", help="read only so many tokens of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output."""
    for name in ("json", "markdown"):
        record.check_target(f"--{name}", getattr(args, name))
    import torch

    from kvcompile.tools.checkpoint_config import config_file, read_json
    from kvcompile.tools.evaluate_statistics import row
    from kvcompile.tools.quantize_perplexity import WINDOW, losses, tokens_of
    from kvcompile.tools.quantize_source import TensorFiles

    if args.limit is not None and args.limit < WINDOW:
        raise UsageError(f"--limit {args.limit}; allowed is {WINDOW} or more, a window")
    file = config_file(args.model)
    vocabulary = read_json(file).get("vocab_size")
    if not isinstance(vocabulary, int):
        raise UsageError(f"{file}: vocab_size is {vocabulary!r}; allowed is a whole number; correct it")
    files = TensorFiles(args.model, sorted(file.name for file in args.model.glob("*.safetensors")))
    if not files.names:
        raise UsageError(f"{args.model} has no .safetensors file; give the folder of a checkpoint")
    tokens = tokens_of(args.text, args.model, "TEXT", vocabulary, args.limit)
    with torch.inference_mode():
        nats = losses(args.model, files, tokens, lambda layers: None).double().mean(1)
    if not nats.isfinite().all():
        raise UsageError(
            f"{args.model}: its loss on {args.text} is not finite; the checkpoint is damaged, get it again"
        )
    system = "W4A8" if any(name.endswith(".qweight") for name in files.names) else "as stored"
    rows = [row(args.text.name, system, "nll", "nats/token", nats.tolist())]
    perplexity = row(args.text.name, system, "perplexity", "", nats.exp().tolist())
    for name in ("mean", "mean_low", "mean_high"):  # of the whole text, not the mean of its windows' perplexities
        perplexity[name] = round(torch.tensor(rows[0][name], dtype=torch.float64).exp().item(), 4)
    rows.append(perplexity)
    title = f"{args.model} on {len(nats)} windows of {WINDOW} tokens, mean and 95 % interval"
    for metric in ("perplexity", "nll"):
        record.console().print(evaluate_table.console_table(f"{metric}: {title}", rows, metric))
    if args.markdown:
        tables = [evaluate_table.markdown(f"{metric}: {title}", rows, metric) for metric in ("perplexity", "nll")]
        args.markdown.write_text("\n".join(tables), encoding="utf-8")
    if args.json:
        record.write(args.json, record.record("perplexity", record.command(), rows, ("transformers",)))
    return 0
