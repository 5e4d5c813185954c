"""`kvcompile evaluate retrieval`: answers to generated questions after the prompt was pruned, by every method.

One prefill a prompt, with keys and values as the int8 cache has them; then, for every method and budget, the answer is
teacher-forced from what is kept. No engine, no vLLM: the scores, the selection and the rounding are the server's. With
--endpoint a server is asked instead (`evaluate_retrieval_served.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from kvcompile.config import UsageError
from kvcompile.ops.prune import METHODS
from kvcompile.tools import (
    evaluate_endpoint,
    evaluate_methods,
    evaluate_report,
    evaluate_retrieval_served,
    evaluate_run,
    evaluate_state,
)
from kvcompile.tools.evaluate_pruned import FULL, budgets
from kvcompile.tools.evaluate_report import Drawing, Table
from kvcompile.tools.evaluate_retrieval_options import add_arguments, rounds
from kvcompile.tools.evaluate_run import Plan, Values
from kvcompile.tools.evaluate_statistics import row
from kvcompile.tools.evaluate_tasks import TASKS

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "generated questions over long prompts: pruning methods against budget, or served models"
_METRICS = {
    "rank1": "share of answer tokens ranked first",
    "nll": "nats per answer token",
    "difference": "share ranked first, paired difference from",
}


def run(args: argparse.Namespace) -> int:
    """0 with tables on standard output."""
    evaluate_report.check(args)
    if args.endpoint:
        return evaluate_retrieval_served.run(args)
    plan = _plan(args)
    plan = replace(plan, kept=evaluate_state.opened(args))
    against = args.against or ("andpro" if "andpro" in plan.methods else FULL)
    values = evaluate_run.measure(plan, args.processes or 1)
    rows = _rows(against, values)
    whole = [each for each in rows if each["case"].count(",") == 1]  # of all tasks together
    tables = [Table(_title(metric, against, values), whole, metric) for metric in _METRICS]
    drawing = Drawing(_title("rank1", against, values), whole, "rank1")
    evaluate_report.publish(args, "quality", rows, tables, drawing, plan.kept)
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    evaluate_endpoint.refuse_without(args, ("answer_tokens",))
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes {args.processes}; allowed is 1 or more")
    methods = evaluate_methods.methods(args.method or METHODS)
    least = max(method.always_kept for method in methods.values())
    if args.length and min(args.length) <= least:
        raise UsageError(f"--length {min(args.length)}: nothing can be pruned; allowed is {least + 1} or more")
    if args.against not in (None, *methods, FULL):
        raise UsageError(f"--against {args.against}: allowed are {', '.join(methods)} and {FULL}")
    return Plan(
        model=args.model,
        device=evaluate_methods.device(args.device),
        budgets=budgets(args.budget or ("50%", "25%", "544")),
        methods=methods,
        rounds=rounds(args, tuple(TASKS)),
    )


def _rows(against: str, values: Values) -> list[dict[str, Any]]:
    rows = []
    for (case, system), found in values.items():
        rows.append(row(case, system, "rank1", "share", [outcome.rank1 for outcome in found]))
        rows.append(row(case, system, "nll", "nats/token", [outcome.nll for outcome in found]))
        if system != against:
            pairs = zip(found, values[case, against], strict=True)
            rows.append(row(case, system, "difference", "share", [ours.rank1 - base.rank1 for ours, base in pairs]))
    return rows


def _title(metric: str, against: str, values: Values) -> str:
    what = f"{_METRICS[metric]} {against}" if metric == "difference" else _METRICS[metric]
    counts = [len(found) for (case, _), found in values.items() if case.count(",") == 1]
    return f"{what}; {min(counts)} samples a column, mean and 95 % interval"
