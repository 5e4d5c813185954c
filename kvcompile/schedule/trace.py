"""A trace of requests, and a model of how long a step takes: what a replay needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    output_tokens is what the model will produce, which no scheduler can know; max_tokens is the limit that the client
    gave. The first prefix_tokens of the prompt are those of every request of the same prefix_group.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prefix_group: int = 0
    prefix_tokens: int = 0
    priority: int = 0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the worker: base + per_prefill_token + per_decode_request + per_context_token."""

    base_s: float
    per_prefill_token_s: float
    per_decode_request_s: float
    per_context_token_s: float

    def seconds(self, prefill_tokens: int, decode_requests: int, context_tokens: int) -> float:
        """context_tokens: tokens of KV that the step reads, summed over its requests."""
        if not prefill_tokens and not decode_requests:
            return 0.0
        return (
            self.base_s
            + self.per_prefill_token_s * prefill_tokens
            + self.per_decode_request_s * decode_requests
            + self.per_context_token_s * context_tokens
        )
