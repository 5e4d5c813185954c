"""A served model: vLLM's OpenAI-compatible completions and chat, greedy, with a KV budget of each request's own.

Which model an endpoint serves, how many tokens it takes, and whether it prunes, it is asked once, before work starts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from kvcompile.config import UsageError
from kvcompile.prune.plan import BUDGET, SWITCH
from kvcompile.tools import evaluate_state, http_json
from kvcompile.tools.evaluate_state import Kept

_NAMED = re.compile(r"(?:([\w. -]+)=)?(https?://[^/?#\s]+(?:/.*)?)")
_PRUNED = "vllm:kvcompile_pruned_tokens_total"  # on /metrics of a server that prunes
_MOST_SAID = 300  # characters of what a server says of a refusal
_CONCURRENCY, _TIMEOUT_S, _MOST_TIMEOUT_S = 4, 600, 86400
T = TypeVar("T")


class Question(NamedTuple):
    """What is asked: `prompt` as token ids or text, which goes to completions, or with `chat` to the chat API.

    tokens: how many `prompt` has, which a budget's share is of. stop_token_ids: end the answer, behind one token.
    """

    prompt: list[int] | str
    tokens: int
    max_tokens: int
    chat: bool = False
    stop_token_ids: tuple[int, ...] = ()


class Endpoint(NamedTuple):
    """`limit`: tokens of prompt and answer together, None if it does not say. prunes: takes `kv_budget_tokens`."""

    name: str
    url: str
    model: str
    limit: int | None
    prunes: bool
    timeout_s: float

    def answer(self, question: Question, budget: int | None = None) -> str:
        """The text that follows. budget: tokens of the prompt that are kept; 0: all of it; None: as the server does.

        Raises UsageError, in one line, for whatever goes wrong.
        """
        body: dict[str, Any] = {"max_tokens": question.max_tokens, "temperature": 0}
        if question.stop_token_ids:
            body |= {"stop_token_ids": list(question.stop_token_ids), "min_tokens": 1}
        if budget is not None:
            body["vllm_xargs"] = {BUDGET: budget} if budget else {SWITCH: "false"}
        if question.chat:
            body["messages"] = [{"role": "user", "content": question.prompt}]
            return self._post("/v1/chat/completions", body, lambda choice: _text(choice["message"]["content"]))
        body["prompt"] = question.prompt
        return self._post("/v1/completions", body, lambda choice: _text(choice["text"]))

    def nats(self, tokens: Sequence[int]) -> float:
        """Mean nats of each of `tokens` but the first, behind those before it.

        Raises UsageError, in one line, for whatever goes wrong.
        """
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}

        def read(choice: dict[str, Any]) -> float:
            entries = choice["prompt_logprobs"]
            nats = [-entries[at][str(tokens[at])]["logprob"] for at in range(1, len(tokens))]
            mean = math.fsum(nats) / len(nats)
            if not math.isfinite(mean):
                raise ValueError(f"log-probabilities of mean {-mean}")
            return mean

        return self._post("/v1/completions", body, read)

    def tokenize(self, text: str) -> list[int] | None:
        """Token ids of a text by vLLM's own route, without special tokens; None if it gives none.

        Raises UsageError, in one line, for whatever goes wrong.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        found = _asked(self.url, "/tokenize", body, self.timeout_s)
        return found.get("tokens") if isinstance(found, dict) else None

    def _post(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        answer = _asked(self.url, path, {"model": self.model, **body}, self.timeout_s)
        try:
            return read(answer["choices"][0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(
                f"--endpoint {self.url}: the answer of {path} has not what vLLM's has ({error!r}); give a vLLM server"
            ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoint",
        action="append",
        metavar="[NAME=]URL",
        help="ask this vLLM server, such as http://127.0.0.1:8000; with two, they are compared on the same samples",
    )
    parser.add_argument("--served-model", metavar="NAME", help="of the endpoints (default: the first that they list)")
    parser.add_argument("--concurrency", type=int, help=f"requests under way at once (default {_CONCURRENCY})")
    parser.add_argument("--timeout", type=float, help=f"seconds that a request may take (default {_TIMEOUT_S})")


def refuse_without(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise UsageError for the first of the options that is given although no endpoint is."""
    for name in (*names, "served_model", "concurrency", "timeout"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for a served model; give --endpoint too, or leave it out")


def connect(args: argparse.Namespace) -> list[Endpoint]:
    """The endpoints that are named, asked what they serve.

    Raises UsageError for one that is down, another model than it serves, two of one name, and more than two.
    """
    if len(args.endpoint) > 2:
        raise UsageError(f"--endpoint is given {len(args.endpoint)} times; allowed are one and two, to compare")
    timeout_s = _TIMEOUT_S if args.timeout is None else args.timeout
    if not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise UsageError(f"--timeout {timeout_s}; allowed is more than 0, up to {_MOST_TIMEOUT_S}, a day")
    endpoints = [_connect(text, args.served_model, timeout_s) for text in args.endpoint]
    if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
        raise UsageError(f"--endpoint: two are called {endpoints[0].name}; give them names, such as stock=URL")
    return endpoints


def concurrency(args: argparse.Namespace) -> int:
    """How many requests are under way at once. Raises UsageError for none."""
    count = _CONCURRENCY if args.concurrency is None else args.concurrency
    if count < 1:
        raise UsageError(f"--concurrency {count}; allowed is 1 or more")
    return count


def limit(endpoints: Sequence[Endpoint]) -> int | None:
    """Tokens of prompt and answer that all of them take; None if none says."""
    return min((endpoint.limit for endpoint in endpoints if endpoint.limit is not None), default=None)


def kept(args: argparse.Namespace, endpoints: Sequence[Endpoint]) -> Kept:
    """What the same command has left of its answers, if these endpoints serve what they did. Raises UsageError."""
    return evaluate_state.opened(args, served=[endpoint._replace(timeout_s=0) for endpoint in endpoints])


def _connect(text: str, model: str | None, timeout_s: float) -> Endpoint:
    found = _NAMED.fullmatch(text)
    if found is None:
        raise UsageError(f"--endpoint {text}; allowed is a URL such as http://127.0.0.1:8000, or NAME=URL")
    url = found[2].rstrip("/").removesuffix("/v1")
    listed = _asked(url, "/v1/models", None, timeout_s)
    try:
        served = {each["id"]: each.get("max_model_len") for each in listed["data"]}
        named = next(iter(served)) if model is None else model
        limits = [limit for limit in served.values() if limit is not None]
        if not all(type(name) is str for name in served) or not all(type(limit) is int for limit in limits):
            raise TypeError("an id that is no text, or a max_model_len that is no whole number")
    except (KeyError, TypeError, StopIteration) as error:
        raise UsageError(f"--endpoint {url}: /v1/models lists no model; give a vLLM server") from error
    if named not in served:
        raise UsageError(f"--served-model {named}: {url} serves {', '.join(served)}")
    return Endpoint(found[1] or url.partition("://")[2], url, named, served[named], _prunes(url, timeout_s), timeout_s)


def _prunes(url: str, timeout_s: float) -> bool:
    """Whether /metrics has the counters of pruning, which a server has that can prune, and no other.

    A server that has no such page is none of ours. One that fails to give it could be, and would be compared unpruned.
    """
    where = f"--endpoint {url}: /metrics"
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as answer:
            return _PRUNED in answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            return False
        raise UsageError(
            f"{where} answers {error.code}, so whether it prunes is not known; allowed are 200 and 404"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error or type(error).__name__
        raise UsageError(f"{where} is not answered ({why}), so whether it prunes is not known; try again") from error


def _asked(url: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
    where = f"--endpoint {url}: {path}"
    try:
        return http_json.ask(url + path, body, timeout_s)
    except http_json.Refused as error:
        raise UsageError(f"{where} answers {error.status}: {_said(error.text)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error or type(error).__name__
        raise UsageError(f"{where} does not answer: {_one_line(str(why))}; is a vLLM server running there?") from error


def _said(text: str) -> str:
    """What an error's body says, in a line."""
    try:
        return _one_line(str(json.loads(text)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return _one_line(text)


def _text(content: object) -> str:
    """Of an answer; a chat without any has null."""
    if content is not None and not isinstance(content, str):
        raise TypeError(f"a text of type {type(content).__name__}")
    return content or ""


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SAID else f"{line[:_MOST_SAID]}..."
