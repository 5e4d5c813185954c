"""`kvcompile evaluate retrieval`: answers to generated questions after the prompt was pruned, by every method.

One prefill a prompt, with keys and values as the int8 cache has them; then, for every method and budget, the answer is
teacher-forced from what is kept. No engine, no vLLM: the scores, the selection and the rounding are the server's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError
from kvcompile.ops.prune import METHODS, Method, parse_method
from kvcompile.tools import evaluate_plot, evaluate_run, evaluate_table, record
from kvcompile.tools.evaluate_pruned import FULL, parse_budget
from kvcompile.tools.evaluate_run import Plan, Values
from kvcompile.tools.evaluate_samples import POSITIONS
from kvcompile.tools.evaluate_statistics import row
from kvcompile.tools.evaluate_tasks import TASKS

SUMMARY = "generated questions over long prompts: quality of pruning methods against budget"
_METRICS = {
    "rank1": "share of answer tokens ranked first",
    "nll": "nats per answer token",
    "difference": "share ranked first, paired difference from",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--task", action="append", choices=tuple(TASKS), help="(default: all)")
    parser.add_argument(
        "--position",
        action="append",
        choices=POSITIONS,
        help="of the question: at the end of the prompt, at its start, or in a later turn of the chat (default: all)",
    )
    parser.add_argument("--length", action="append", type=int, help="tokens of a prompt (default: 1024 and 2048)")
    parser.add_argument("--budget", action="append", help="kept: a share or tokens (default: 50%%, 25%% and 544)")
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"of {', '.join(METHODS)}; such as robust:anchor=0.5 (default: all, each with its defaults)",
    )
    parser.add_argument("--samples", type=int, default=4, help="of each task, position and length (default 4)")
    parser.add_argument("--first-seed", type=int, default=0, help="samples are numbered from here (default 0)")
    parser.add_argument("--seconds", type=float, help="begin no further round of samples after this")
    parser.add_argument(
        "--text",
        action="append",
        type=Path,
        metavar="FILE",
        help="hide facts in this text; with several, in turn (default: generated sentences)",
    )
    parser.add_argument(
        "--generated", action="store_true", help="with --text: generated sentences too, in turn with the texts"
    )
    parser.add_argument("--plain", action="store_true", help="prompts without the tokenizer's chat template")
    parser.add_argument(
        "--against", help="system of paired differences (default: andpro, or full if that is not asked for)"
    )
    parser.add_argument("--device", help="such as cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--processes", type=int, default=1, help="that share the rounds and the device (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw quality against budget (SVG)")


def run(args: argparse.Namespace) -> int:
    """0 with tables on standard output."""
    for name in ("json", "markdown", "plot"):
        record.check_target(f"--{name}", getattr(args, name))
    plan = _plan(args)
    against = args.against or ("andpro" if "andpro" in plan.methods else FULL)
    values = evaluate_run.measure(plan, args.processes)
    rows = _rows(against, values)
    whole = [each for each in rows if each["case"].count(",") == 1]  # of all tasks together
    titles = {metric: _title(metric, against, values) for metric in _METRICS}
    for metric, title in titles.items():
        for position in dict.fromkeys(each["case"].partition(",")[0] for each in whole):
            shown = [each for each in whole if each["case"].startswith(f"{position},")]
            record.console().print(evaluate_table.console_table(title, shown, metric))
    if args.markdown:
        tables = [evaluate_table.markdown(title, whole, metric) for metric, title in titles.items()]
        args.markdown.write_text("\n".join(tables), encoding="utf-8")
    if args.plot:
        evaluate_plot.write(args.plot, titles["rank1"], whole, "rank1")
    if args.json:
        record.write(args.json, record.record("quality", record.command(), rows, ("transformers",)))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    import torch

    for name in ("samples", "processes"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}; allowed is 1 or more")
    if args.seconds is not None and not args.seconds >= 0:
        raise UsageError(f"--seconds {args.seconds}; allowed is 0 or more")
    if args.first_seed < 0:
        raise UsageError(f"--first-seed {args.first_seed}; allowed is 0 or more")
    methods = dict(_method(text) for text in args.method or METHODS)
    least = max(method.always_kept for method in methods.values())
    if args.length and min(args.length) <= least:
        raise UsageError(f"--length {min(args.length)}: nothing can be pruned; allowed is {least + 1} or more")
    if args.against not in (None, *methods, FULL):
        raise UsageError(f"--against {args.against}: allowed are {', '.join(methods)} and {FULL}")
    texts: list[str | None] = [_read(path) for path in args.text or ()]
    if not texts or args.generated:
        texts.append(None)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}; give cpu, or cuda on a GPU") from error
    return Plan(
        model=args.model,
        device=device,
        tasks=tuple(args.task or TASKS),
        positions=tuple(args.position or POSITIONS),
        lengths=tuple(args.length or (1024, 2048)),
        budgets=tuple(parse_budget(text) for text in args.budget or ("50%", "25%", "544")),
        methods=methods,
        texts=tuple(texts),
        chat=not args.plain,
        seeds=tuple(range(args.first_seed, args.first_seed + args.samples)),
        seconds=args.seconds,
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


def _method(text: str) -> tuple[str, Method]:
    name, _, rest = text.partition(":")
    parameters = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--method {text}: given {part!r}, allowed PARAMETER=VALUE")
        parameters[key] = _number(text, value)
    try:
        return text, parse_method(name, **parameters)
    except ValueError as error:
        raise UsageError(f"--method {text}: {error}") from error


def _number(text: str, value: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise UsageError(f"--method {text}: given {value!r}, allowed a number")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path} cannot be read as UTF-8 text: {error}; give a plain text file") from error
