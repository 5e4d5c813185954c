"""What offload has done: counted from the start of a scheduler."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


class Reason(enum.Enum):
    """Why a preempted request, or a prefix that is on the host, is computed again."""

    HOST_FULL = "the host pool is full of other preempted requests"
    PRUNE_PENDING = "its prompt was about to be pruned"
    UNSUPPORTED = "it asks for log-probabilities of a prompt in progress, or its prompt is fed in parts"
    COPY_LOST = "a page could not be copied to the host"
    LOAD_FAILED = "it could not be copied back from the host"
    NO_ANSWER = "a worker has not answered for too long"
    NO_POOL = "a worker has no host pool"
    SWITCHED_OFF = "nothing is restored since a worker has not answered"
    RESET = "the prefix cache was reset"
    PREFIX_NOT_LOADED = "what another request had left on the host could not be copied back"


@dataclass
class Counters:
    """page_bytes: of all layers. lost_pages: given up by a preemption with no copy, and computed again.

    device_tokens, host_tokens: of preempted requests that come back. prefix_*: of those that begin.
    """

    page_bytes: int
    stored_pages: int = 0
    loaded_pages: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    prefix_device_tokens: int = 0
    prefix_host_tokens: int = 0
    restores: int = 0
    lost_pages: int = 0
    fallbacks: Counter[Reason] = field(default_factory=Counter)

    @property
    def stored_bytes(self) -> int:
        return self.stored_pages * self.page_bytes

    @property
    def loaded_bytes(self) -> int:
        return self.loaded_pages * self.page_bytes

    def hit(self, *, device: int, host: int) -> None:
        """A preempted request has found so many of its tokens on each level."""
        self.device_tokens += device
        self.host_tokens += host

    def prefix_hit(self, *, device: int, host: int) -> None:
        """A request that begins has found so many of its tokens on each level."""
        self.prefix_device_tokens += device
        self.prefix_host_tokens += host

    def fell_back(self, reason: Reason, pages: int) -> None:
        """Something is computed again: of a preempted request, which gave them up, all these pages."""
        self.fallbacks[reason] += 1
        self.lost_pages += pages
