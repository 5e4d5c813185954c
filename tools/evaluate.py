"""`kvcompile evaluate WHAT`: quality of a checkpoint or of served models, and of what pruning leaves of prompts."""

from __future__ import annotations

import argparse

from kvcompile.config import UsageError
from kvcompile.tools import evaluate_longbench, evaluate_perplexity, evaluate_retrieval

_EVALUATIONS = {
    "retrieval": evaluate_retrieval,
    "perplexity": evaluate_perplexity,
    "longbench": evaluate_longbench,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluations = parser.add_subparsers(dest="what", metavar="WHAT")
    for name, module in _EVALUATIONS.items():
        evaluation = evaluations.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        module.add_arguments(evaluation)
        evaluation.set_defaults(evaluate=module.run)


def run(args: argparse.Namespace) -> int:
    """What the evaluation returns: 0 with tables on standard output."""
    if args.what is None:
        raise UsageError(
            f"no evaluation is given; allowed are {', '.join(_EVALUATIONS)}; see kvcompile evaluate --help"
        )
    return args.evaluate(args)
