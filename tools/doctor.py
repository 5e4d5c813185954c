"""`kvcompile doctor`: this machine and installation, what would be active, and what to do about problems."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from kvcompile.config import UsageError, describe, resolve
from kvcompile.config_environment import without, wrong_variables
from kvcompile.tools.doctor_finding import Finding
from kvcompile.tools.doctor_probes import everything

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvcompile doctor`."""
    parser.description = (
        "Check this machine and installation. Exit code 1: something would stop kvcompile from working."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the report on standard output; 1 if a finding is "fail", else 0."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    elif sys.stdout.isatty():
        _print_tables(report)
    else:
        _print_lines(report)
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """The report: "ok", "findings", "configuration", "modules".

    The configuration is that without the variables that are wrong; None if it has an error even so, a finding then.
    """
    from kvcompile.presets import availability, in_this_version, refuse_unavailable

    findings = everything(os.environ)
    environ = without(os.environ, wrong_variables(os.environ))  # those are findings; what the others come to is told
    configuration, modules = None, []
    try:
        resolved = resolve(environ=environ)
        configuration = [
            {
                "key": row.key,
                "value": _value(resolved.config, row.key),
                "allowed": row.allowed,
                "source": resolved.sources.get(row.key, "default"),
            }
            for row in describe()
            if in_this_version(row.key)
        ]
        refuse_unavailable(resolved)
    except UsageError as error:
        remedy = "correct it as the message says; KVCOMPILE_* variables and the file in KVCOMPILE_CONFIG are read"
        findings.append(Finding("Configuration", "configuration", "fail", str(error), remedy))
    for module, state, reason in availability():
        values = {row["key"]: row for row in configuration or ()}
        switch = values.get(f"{module}.enabled")
        if state == "available" and switch is not None and switch["value"] is False:
            state, reason = "off", f"{module}.enabled is false ({switch['source']})"
        modules.append({"module": module, "state": state, "reason": reason})
    return {
        "ok": all(finding.state != "fail" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "configuration": configuration,
        "modules": modules,
    }


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _print_lines(report: dict[str, Any]) -> None:
    """For pipes and logs: one line a row, aligned, no colour, nothing cut off."""
    section = ""
    for row in report["findings"]:
        if row["section"] != section:
            section = row["section"]
            print(section)
        print(f"  {row['state']:<4}  {row['name']:<14}  {row['value']}")
        if row["remedy"]:
            print(f"        {'':<14}  remedy: {row['remedy']}")
    if report["configuration"] is not None:
        print("Configuration")
        for row in report["configuration"]:
            print(f"        {row['key']:<32}  {json.dumps(row['value']):<8}  {row['source']:<10}  {row['allowed']}")
    print("Modules")
    for row in report["modules"]:
        print(f"        {row['module']:<14}  {row['state']:<10}  {row['reason']}")
    print(_verdict(report))


def _print_tables(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title="kvcompile doctor", title_justify="left")
    for heading in ("", "what", "state", "found"):
        table.add_column(heading, overflow="fold")
    section = ""
    for row in report["findings"]:
        first = row["section"] != section
        if first and section:
            table.add_section()
        section = row["section"]
        state = Text(row["state"], style=_STYLES[row["state"]])
        # Text, so that a path or a variable that holds [brackets] is not read as markup.
        found = Text(row["value"])
        if row["remedy"]:
            found.append(f"\nremedy: {row['remedy']}", style="bold")
        table.add_row(Text(section if first else ""), Text(row["name"]), state, found)
    console.print(table)
    if report["configuration"] is not None:
        table = Table("key", "value", "source", "allowed", title="configuration", title_justify="left")
        for row in report["configuration"]:
            table.add_row(Text(row["key"]), Text(json.dumps(row["value"])), Text(row["source"]), Text(row["allowed"]))
        console.print(table)
    table = Table("module", "state", "reason", title="modules", title_justify="left")
    for row in report["modules"]:
        table.add_row(Text(row["module"]), Text(row["state"]), Text(row["reason"]))
    console.print(table)
    console.print(Text(_verdict(report)))


def _verdict(report: dict[str, Any]) -> str:
    states = [row["state"] for row in report["findings"]]
    failed, warned = states.count("fail"), states.count("warn")
    warnings = f"; {warned} warning{'s' if warned != 1 else ''}" if warned else ""
    if failed:
        return f"{failed} problem{'s' if failed != 1 else ''} would stop kvcompile from working{warnings}"
    return f"kvcompile can be used here{warnings}"


if __name__ == "__main__":
    from kvcompile.cli import main

    sys.exit(main(["doctor", *sys.argv[1:]]))
