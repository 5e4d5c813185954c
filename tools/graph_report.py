"""report.html: the graphs drawn, what the passes changed in them coloured, and the figures; one file, no network.

The page's scripts are in data/graph_*.js: layout, the merging of the graphs before and after, drawing, the controls.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from kvcompile.tools.graph_document import matched
from kvcompile.tools.graph_summary import MEANING, batches, change

_SCRIPTS = ("graph_layout.js", "graph_model.js", "graph_view.js", "graph_report.js")
_NEEDED = ("graphs", "totals")


def page(content: Mapping[str, Any]) -> str:
    """The whole page as text, from a document of `graph_document`."""
    settings, versions = content["settings"], content["versions"]
    sub = f"{settings.get('architecture', '')}, vLLM {versions.get('vllm')}, torch {versions.get('torch')}"
    data = json.dumps({key: content[key] for key in _NEEDED}, ensure_ascii=False, separators=(",", ":"))
    return Template(_read("graph_report.html")).substitute(
        title=escape(f"graph-dump of {content['model']}"),
        model=escape(content["model"]),
        sub=escape(f"{sub}, {settings.get('device', '')}"),
        style=_read("graph_report.css"),
        tiles=_tiles(content["totals"]),
        notices=_notices(content),
        numbers="".join(_numbers(total) for total in content["totals"]) + f"<p class='quiet'>{escape(MEANING)}</p>",
        run=_run(content),
        data=data.replace("<", "\\u003c"),
        script="\n".join(map(_read, _SCRIPTS)),
    )


def _read(name: str) -> str:
    return (files("kvcompile.tools") / "data" / name).read_text(encoding="utf-8")


def _tiles(totals: Sequence[Mapping[str, Any]]) -> str:
    if not totals:
        return ""
    total = totals[-1]
    before, after = total["before"], total["after"]
    tiles = [("sites rewritten", f"{sum(s['matched'] for s in total['sites'].values()):,}", "")]
    for name, old, new in (
        ("operators", before["operators"], after["operators"]),
        ("bytes per token", before["bytes"]["token"], after["bytes"]["token"]),
    ):
        share = f"{100 * (new - old) / old:+.0f} %" if old and old != new else ""
        tiles.append((name, f"{old:,} → {new:,}", share))
    return "".join(
        f"<div class='tile'><b>{value}{f'<em>{share}</em>' if share else ''}</b><span>{name}</span></div>"
        for name, value, share in tiles
    )


def _notices(content: Mapping[str, Any]) -> str:
    said = [f"The server would not start: {fault}" for fault in content["faults"]]
    if not matched(content):
        said.append("No site matched: the passes leave this model as it is.")
    return "".join(f"<p class='notice'>{escape(text)}</p>" for text in said)


def _numbers(total: Mapping[str, Any]) -> str:
    low, high = total["tokens"]
    before, after = total["before"], total["after"]
    sums = [("operators", before["operators"], after["operators"]), ("views", before["views"], after["views"])]
    sums.append(("bytes per token", before["bytes"]["token"], after["bytes"]["token"]))
    sums.append(("constant bytes", before["bytes"]["constant"], after["bytes"]["constant"]))
    old, new = before["histogram"], after["histogram"]
    names = sorted(old.keys() | new.keys(), key=lambda name: (old.get(name, 0) == new.get(name, 0), name))
    sites = [[name, f"{s['matched']:,}", f"{s['candidates']:,}"] for name, s in total["sites"].items()]
    return (
        f"<h2>The whole model, {batches(low, high)}</h2>{_counts('', sums)}"
        f"<h2>Sites</h2>{_table(['pass', 'rewritten', 'candidates'], sites)}"
        f"<h2>Operators by name</h2>{_counts('operator', [(n, old.get(n, 0), new.get(n, 0)) for n in names])}"
    )


def _counts(heading: str, rows: Iterable[tuple[str, int, int]]) -> str:
    lines = []
    for name, old, new in rows:
        kind = "less" if new < old else "grown" if new > old else ""
        lines.append(
            f"<tr{'' if kind else ' class=same'}><td><code>{escape(name)}</code></td><td class=n>{old:,}</td>"
            f"<td class=n>{new:,}</td><td class='n {kind}'>{change(old, new)}</td></tr>"
        )
    head = f"<tr><th>{heading}</th><th class=n>before</th><th class=n>after</th><th class=n>change</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th{' class=n' if i else ''}>{escape(head)}</th>" for i, head in enumerate(heads))
    lines = (
        "".join(f"<td{' class=n' if i else ''}>{escape(str(cell))}</td>" for i, cell in enumerate(row)) for row in rows
    )
    return f"<table><tr>{first}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _run(content: Mapping[str, Any]) -> str:
    command = f"kvcompile graph-dump {shlex.join([content['model'], *content['arguments']])}"
    return (
        f"<h2>Command</h2><pre>{escape(command)}</pre>"
        f"<h2>Start-up line</h2><pre>{escape(content['startup_line'])}</pre>"
        f"<h2>Versions</h2>{_pairs(content['versions'])}<h2>Settings</h2>{_pairs(content['settings'])}"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><td>{escape(key)}</td><td><code>"
        f"{escape(value if isinstance(value, str) else json.dumps(value))}</code></td></tr>"
        for key, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"
