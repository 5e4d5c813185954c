"""A trace of requests, and a model of how long a step takes: what a replay needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


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


class Step(NamedTuple):
    """What a step of the worker computes: tokens of prompts, requests with one new token, tokens of KV it reads."""

    prefill_tokens: int
    decode_requests: int
    context_tokens: int

    @classmethod
    def of(cls, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> Step:
        """The step in which so many tokens of each request are computed, which its num_computed_tokens includes."""
        counts = list(scheduled.values())
        decode = counts.count(1)
        context = sum(requests[name].num_computed_tokens for name in scheduled)
        return cls(sum(counts) - decode, decode, context)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the worker: base + per_prefill_token + per_decode_request + per_context_token."""

    base_s: float
    per_prefill_token_s: float
    per_decode_request_s: float
    per_context_token_s: float

    def seconds(self, step: Step) -> float:
        """Nothing to compute takes no time."""
        if not step.prefill_tokens and not step.decode_requests:
            return 0.0
        return (
            self.base_s
            + self.per_prefill_token_s * step.prefill_tokens
            + self.per_decode_request_s * step.decode_requests
            + self.per_context_token_s * step.context_tokens
        )


# Llama-3.1-8B in bf16 on one H200, from the records in benchmarks/. The linears of 32 layers at 1, 32 and 4,096 tokens
# (w4a8.json, cuBLAS: 118.8, 125.2 and 2,308 us a layer) give what a step, a decoding request and a prompt token cost;
# reading 131,072 bytes of KV per token at the 4.2 TB/s of a copy, what a token of context does. What is then missing
# from the 1.503 s of serve-triton.json (32 requests of 1,000 + 128 tokens; 1.20 s by this), norms and lm_head and
# the rest, is spread over its 132 steps. Steps by themselves have not been timed.
H200_LLAMA_8B = StepTime(
    base_s=6.1e-3, per_prefill_token_s=17.1e-6, per_decode_request_s=6.6e-6, per_context_token_s=31e-9
)
