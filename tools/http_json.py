"""JSON over HTTP with the standard library: one question, one answer, and what a server says of a refusal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """The server answered with an HTTP error. `text` is the body of its answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


def ask(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = 300) -> Any:
    """What a GET of `url`, or a POST of `body` to it, answers.

    Raises `Refused`; OSError where nothing answers in time; http.client.HTTPException or ValueError for an answer that
    is no HTTP or no JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error
    except urllib.error.HTTPError as error:
        raise Refused(error.code, error.read().decode(errors="replace")) from None
