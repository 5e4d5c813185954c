"""What a dump says in the terminal."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console
from tests.tools.graph_documents import document

from kvcompile.tools import graph_summary

MARKUP = "/models/llama[/v2][red]:fire:\\"


def _shown(content: dict[str, Any]) -> str:
    out = io.StringIO()
    graph_summary.show(Console(file=out, width=300), content)
    return out.getvalue()


def test_one_piece_is_one_piece_and_two_are_two() -> None:
    content = document()
    assert "\na-model, 1 piece, batches of 1 to 256 tokens\n" in _shown(content)
    content["totals"][0]["pieces"] = 2
    assert "\na-model, 2 pieces, batches of 1 to 256 tokens\n" in _shown(content)


def test_one_token_and_one_operator_are_one() -> None:
    content = document()
    content["totals"][0]["tokens"] = [1, 1]
    content["totals"][0]["before"]["bytes"]["other"] = 1
    shown = _shown(content)
    assert "1 piece, batches of 1 token alone" in shown
    assert "Not in the bytes: 1 operator with sizes" in shown


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    text = json.dumps(document(faults=[MARKUP], model=MARKUP, startup_line=MARKUP))
    for name in ("silu_mul_quant", "swiglu_quant", "an input of the graph"):
        text = text.replace(name, f"{name}{json.dumps(MARKUP)[1:-1]}")
    shown = _shown(json.loads(text))
    for line in (
        f"{MARKUP}\n\n{MARKUP}, 1 piece",
        f" swiglu_quant{MARKUP} ",
        f" kvcompile.silu_mul_quant{MARKUP} ",
        f": an input of the graph{MARKUP}\n",
        f"The server would not start: {MARKUP}\n",
    ):
        assert line in shown, line
