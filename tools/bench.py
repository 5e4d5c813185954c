"""`kvcompile bench WHAT`: measurements of kvcompile and of what it replaces, in one run on this machine."""

from __future__ import annotations

import argparse

from kvcompile.config import UsageError
from kvcompile.tools import (
    bench_act_quant,
    bench_attention,
    bench_decode,
    bench_host,
    bench_offload,
    bench_prune,
    bench_schedule,
    bench_serve,
    bench_w4a8,
)

_BENCHMARKS = {
    "decode": bench_decode,
    "attention": bench_attention,
    "w4a8": bench_w4a8,
    "act-quant": bench_act_quant,
    "prune": bench_prune,
    "offload": bench_offload,
    "schedule": bench_schedule,
    "serve": bench_serve,
    "host": bench_host,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="what", metavar="WHAT")
    for name, module in _BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(benchmark)
        benchmark.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    """What the benchmark returns: 0 with a table on standard output, 1 if something measured is at fault."""
    if args.what is None:
        raise UsageError(f"no benchmark is given; allowed are {', '.join(_BENCHMARKS)}; see kvcompile bench --help")
    return args.measure(args)
