"""The HTML report: self-contained, and alive in a browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.tools.graph_documents import document

from kvcompile.tools import graph_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return document()


@pytest.fixture(scope="module")
def page(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(graph_report.page(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    return found


def _opened(browser: str, page: Path, choice: str) -> tuple[dict[str, str], str]:
    """(data attributes of the body, the whole document) after the scripts of page#choice have run."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
    command += ["--virtual-time-budget=4000", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, f"{page.as_uri()}#{choice}"], capture_output=True, text=True, timeout=90)
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body, done.stderr[-2000:]
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body[1])), done.stdout


def test_it_fetches_nothing_and_holds_the_document(page: Path, content: dict[str, Any]) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\((?!#)|fetch\(|XMLHttpRequest""", text)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data) == {"graphs": content["graphs"], "totals": content["totals"]}


def test_names_from_outside_are_text_and_no_markup(content: dict[str, Any]) -> None:
    evil = "</script><b>x"
    text = graph_report.page({**content, "model": evil, "arguments": [evil], "startup_line": evil, "faults": [evil]})
    assert evil not in text
    assert html.escape(evil) in text
    graphs = json.loads(json.dumps(content["graphs"]).replace("silu_mul_quant_default", evil))
    assert evil not in graph_report.page({**content, "graphs": graphs})


def test_in_a_browser_a_site_is_drawn_with_what_was_removed_and_added(
    browser: str, page: Path, content: dict[str, Any]
) -> None:
    state, dom = _opened(browser, page, "site=0")
    assert state["ready"] == "yes"
    assert "error" not in state
    cards = re.findall(r'class="node (\w+) (\w+)[^"]*" data-id="([^"]+)"', dom)
    (site,) = content["graphs"][0]["sites"]
    drawn = {name for kind, _, name in cards if kind == "removed"}
    nodes = {content["graphs"][0]["nodes"][i]["name"]: i for i in content["graphs"][0]["stages"][0]["nodes"]}
    elements = {n for n in site["removed"] if content["graphs"][0]["nodes"][nodes[n]]["target"] == "getitem"}
    assert drawn == set(site["removed"]) - elements
    assert [name for kind, _, name in cards if kind == "added"] == [site["node"]]
    assert ("kept", "placeholder", "gate_up_1") in cards


def test_in_a_browser_the_whole_graph_a_pass_alone_and_a_search_work(browser: str, page: Path) -> None:
    state, dom = _opened(browser, page, "scope=whole&step=1&find=quant_per&theme=dark")
    assert state["ready"] == "yes"
    assert "error" not in state
    assert 'data-theme="dark"' in dom
    # Step 1 is norm_quant, which changes nothing here: all is kept, and both quantisers are found and marked.
    kinds = re.findall(r'class="node (\w+) operator( marked)?', dom)
    assert {kind for kind, _ in kinds} == {"kept"}
    assert len([marked for _, marked in kinds if marked]) == 2
