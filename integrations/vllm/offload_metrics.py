"""What offload shows among vLLM's metrics."""

from __future__ import annotations

from dataclasses import replace

from kvcompile.integrations.vllm.metrics import Counter, Tally
from kvcompile.offload.counters import Counters, Reason

COPIED_BYTES = Counter(
    "offload_bytes", "Bytes of KV cache copied, by direction.", "direction", ("to_host", "from_host")
)
HIT_TOKENS = Counter(
    "offload_hit_tokens",
    "Tokens that requests found again when they came back from a preemption, by level.",
    "level",
    ("device", "host"),
)
PREFIX_TOKENS = Counter(
    "offload_prefix_hit_tokens",
    "Tokens of requests that begin which were found in the prefix cache, by level.",
    "level",
    ("device", "host"),
)
RESTORES = Counter("offload_restores", "Preempted requests that came back with pages from the host.")
LOST_BLOCKS = Counter("offload_lost_blocks", "KV cache blocks of preempted requests that have to be computed again.")
FALLBACKS = Counter(
    "offload_fallbacks",
    "Preempted requests, and prefixes on the host, that are computed again, by reason.",
    "reason",
    tuple(reason.name.lower() for reason in Reason),
)
OFFLOADING = (COPIED_BYTES, HIT_TOKENS, PREFIX_TOKENS, RESTORES, LOST_BLOCKS, FALLBACKS)


class Sent:
    """What of some counters a tally has been told."""

    def __init__(self, counters: Counters) -> None:
        self._counters, self._before = counters, replace(counters, fallbacks=counters.fallbacks.copy())

    def to(self, tally: Tally) -> None:
        """Tell it what has come on top since the last time."""
        now, before = self._counters, self._before
        for metric, label, amount in (
            (COPIED_BYTES, "to_host", now.stored_bytes - before.stored_bytes),
            (COPIED_BYTES, "from_host", now.loaded_bytes - before.loaded_bytes),
            (HIT_TOKENS, "device", now.device_tokens - before.device_tokens),
            (HIT_TOKENS, "host", now.host_tokens - before.host_tokens),
            (PREFIX_TOKENS, "device", now.prefix_device_tokens - before.prefix_device_tokens),
            (PREFIX_TOKENS, "host", now.prefix_host_tokens - before.prefix_host_tokens),
            (RESTORES, "", now.restores - before.restores),
            (LOST_BLOCKS, "", now.lost_pages - before.lost_pages),
            *((FALLBACKS, r.name.lower(), n - before.fallbacks[r]) for r, n in now.fallbacks.items()),
        ):
            if amount:
                tally.add(metric, amount, label)
        if now != before:
            self._before = replace(now, fallbacks=now.fallbacks.copy())
