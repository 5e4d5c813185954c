"""An HTTP server that answers as vLLM's does, from a function of the request, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], str]


class FakeEndpoint:
    """`reply` makes the text of an answer from the request's body. Tokens are bytes.

    status: of answers to generations. nats: of every token of a prompt. hold_s: how long a generation takes.
    """

    def __init__(self, reply: Reply, *, prunes: bool, limit: int, status: int, nats: float, hold_s: float) -> None:
        self.reply, self.prunes, self.limit, self.status, self.nats = reply, prunes, limit, status, nats
        self.hold_s, self.offset, self.metrics_status = hold_s, 0, 200
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = self._at_once = 0
        self.url = ""
        self._lock = threading.Lock()

    def bodies(self) -> list[dict[str, Any]]:
        """Of the generations that were asked for."""
        return [body for path, body in self.asked if path.endswith("completions")]

    def get(self, path: str) -> tuple[int, str]:
        if path == "/metrics":
            counters = 'vllm:kvcompile_pruned_tokens_total{way="inline"} 0.0\n' if self.prunes else "\n"
            return self.metrics_status, counters
        return 200, json.dumps({"data": [{"id": "small", "max_model_len": self.limit}, {"id": "other"}]})

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        with self._lock:
            self.asked.append((path, body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if path == "/tokenize":
                return 200, json.dumps({"tokens": tokens(body["prompt"], self.offset)})
            time.sleep(self.hold_s)
            if self.status != 200:
                return self.status, json.dumps({"error": {"message": "not\nthis way", "code": self.status}})
            return 200, json.dumps({"choices": [self._choice(path, body)]})
        finally:
            with self._lock:
                self._at_once -= 1

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" in body:
            entries = [{str(token): {"logprob": -self.nats}} for token in body["prompt"]]
            return {"text": "", "prompt_logprobs": [None, *entries[1:]]}
        text = self.reply(body)
        return {"message": {"content": text}} if path == "/v1/chat/completions" else {"text": text}


def tokens(text: str, offset: int = 0) -> list[int]:
    """Of the tokenizer of `quantize_sources`: a byte is a token, numbered by its letter's place in the alphabet."""
    from tokenizers import pre_tokenizers

    places = {letter: place + offset for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [places[letter] for part, _ in letters for letter in part]


@contextmanager
def served(
    reply: Reply = lambda body: "",
    *,
    prunes: bool = False,
    limit: int = 4096,
    status: int = 200,
    nats: float = 1.0,
    hold_s: float = 0.0,
) -> Iterator[FakeEndpoint]:
    """A `FakeEndpoint` behind a free port."""
    fake = FakeEndpoint(reply, prunes=prunes, limit=limit, status=status, nats=nats, hold_s=hold_s)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*fake.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*fake.post(self.path, body))

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing: a test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
