"""The HTML report: self-contained, and alive in a browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
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


class _Tab:
    """A page in a browser that is driven as by hand, over its debugging socket."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=30))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str) -> None:
        """Returns when the page's scripts have run."""
        self.call("Page.enable")
        self.call("Page.navigate", url=address)
        while json.loads(self._socket.recv(timeout=30)).get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def middle(self, selector: str) -> dict[str, float]:
        box = self.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])($q({json.dumps(selector)}))")
        return {"x": box[0], "y": box[1]}

    def mouse(self, kind: str, at: dict[str, float], **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, **at, button="left", buttons=1, clickCount=1, **more)

    def click(self, selector: str) -> None:
        at = self.middle(selector)
        self.mouse("mousePressed", at)
        self.mouse("mouseReleased", at)


@pytest.fixture
def tab(browser: str, page: Path, tmp_path: Path) -> Iterator[_Tab]:
    client = pytest.importorskip("websockets.sync.client", reason="drives the browser")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path / 'profile'}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            found = (re.search(r"listening on ws://([^/]+)/", line) for line in process.stderr)
            address = next(filter(None, found))[1]
            new = urllib.request.Request(f"http://{address}/json/new", method="PUT")
            with urllib.request.urlopen(new, timeout=30) as answer:
                target = json.load(answer)
            with client.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
                tab = _Tab(socket)
                tab.open(page.as_uri())
                assert tab.value("document.body.dataset.ready") == "yes"
                tab.value("window.$q = s => document.querySelector(s).getBoundingClientRect(), 0")
                yield tab
                assert tab.value("document.body.dataset.error") is None
        finally:
            process.kill()


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
    everywhere = json.dumps(content)
    for name in ("silu_mul_quant", "swiglu_quant", "aten.exp", "LlamaForCausalLM", "2.11.0", "vllm", "device"):
        assert name in everywhere
        everywhere = everywhere.replace(name, f"{name}{evil}")
    text = graph_report.page(json.loads(everywhere))
    assert evil not in text
    assert text.count("</script>") == 2, "the document's and the page's own"


def test_in_a_browser_a_layer_or_operator_named_like_markup_is_text(
    browser: str, content: dict[str, Any], tmp_path: Path
) -> None:
    evil = "<script>document.body.dataset.evil=1</script><img src=x onerror=document.body.dataset.evil=1>"
    text = json.dumps(content)
    for name in ("silu_mul_quant", "swiglu_quant", "an input of the graph"):
        text = text.replace(name, f"{name}{evil}")
    changed = json.loads(text)
    for entry in (*changed["graphs"][0]["sites"], *changed["graphs"][0]["left"]):
        entry["layers"] = [evil]
    path = tmp_path / "report.html"
    path.write_text(graph_report.page(changed), encoding="utf-8")
    state, dom = _opened(browser, path, "site=0&find=silu")
    assert state["ready"] == "yes"
    assert "evil" not in state
    assert html.escape(evil, quote=False) in dom


@pytest.mark.parametrize("name", graph_report._SCRIPTS)
def test_the_page_s_scripts_have_lines_that_can_be_read(name: str) -> None:
    lines = graph_report._read(name).splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []


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


def test_by_hand_a_node_is_picked_the_picture_moved_and_zoomed_and_the_theme_changed(tab: _Tab) -> None:
    def box() -> list[float]:
        return list(map(float, tab.value("document.getElementById('canvas').getAttribute('viewBox')").split()))

    tab.click('[data-id="neg"]')
    assert "aten.neg(" in tab.value("document.getElementById('details').textContent")
    assert tab.value("document.querySelectorAll('.picked').length") == 1
    assert "node=neg" in tab.value("location.hash")

    start, middle = box(), tab.middle("#canvas")
    tab.mouse("mousePressed", middle)
    tab.mouse("mouseMoved", {"x": middle["x"] + 100, "y": middle["y"]})
    tab.mouse("mouseReleased", {"x": middle["x"] + 100, "y": middle["y"]})
    moved = box()
    assert moved[0] < start[0]
    assert moved[1:] == start[1:]
    assert tab.value("document.querySelectorAll('.picked').length") == 1, "dragging picks nothing"
    tab.call("Input.dispatchMouseEvent", type="mouseWheel", **middle, deltaX=0, deltaY=-200)
    deadline = time.monotonic() + 10
    while box()[2] >= moved[2]:
        assert time.monotonic() < deadline, "the wheel does not zoom"

    few = int(tab.value("document.body.dataset.drawn"))
    tab.click("#scope-whole")
    assert int(tab.value("document.body.dataset.drawn")) >= few
    assert tab.value("document.getElementById('scope-whole').getAttribute('aria-pressed')") == "true"
    light = tab.value("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.value("getComputedStyle(document.body).backgroundColor") != light
    tab.click("#tab-numbers")
    assert "kvcompile.silu_mul_quant" in tab.value("document.getElementById('panel-numbers').innerText")
