"""What the two halves of the offload connector say to each other, once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

NO_POOL = "no_host_pool"  # why a worker can make no copy, now and later


class Move(NamedTuple):
    """One page, between a block of the device's cache and a slot of the host pool. tag: what the slot holds then."""

    block: int
    slot: int
    tag: int


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):
    """To the worker. Stores first: they are of what was there before the step. loads: all of one request, by number."""

    stores: tuple[Move, ...] = ()
    loads: Mapping[int, tuple[Move, ...]] = field(default_factory=dict)


class Answer(NamedTuple):
    """Which ranks have answered, one bit each, and why one could not do it; "" if all of these could.

    A worker says 1, as if it were rank 0; on its way out its bit is put in place (`Word.of_rank`). So an answer that
    comes twice counts once.
    """

    ranks: int
    why_not: str = ""

    def and_also(self, other: Answer) -> Answer:
        return Answer(self.ranks | other.ranks, self.why_not or other.why_not)


@dataclass(frozen=True)
class Word(KVConnectorWorkerMetadata):
    """From the workers. stores: by tag; loads: by number; what has ended since the word before."""

    stores: Mapping[int, Answer] = field(default_factory=dict)
    loads: Mapping[int, Answer] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Word:
        """A worker's own word, as that of this rank."""
        return Word(
            *({key: Answer(1 << rank, a.why_not) for key, a in said.items()} for said in (self.stores, self.loads))
        )

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Word:
        """The words of more ranks."""
        if not isinstance(other, Word):
            raise TypeError(f"a word of {type(other).__name__} is none of the offload connector's")
        return Word(_both(self.stores, other.stores), _both(self.loads, other.loads))


def _both(ours: Mapping[int, Answer], theirs: Mapping[int, Answer]) -> dict[int, Answer]:
    sums: dict[int, Answer] = dict(ours)
    for key, answer in theirs.items():
        sums[key] = sums[key].and_also(answer) if key in sums else answer
    return sums


def word_of(output: Any) -> Word:
    """In vLLM's KVConnectorOutput; an empty one if there is none."""
    word = output.kv_connector_worker_meta
    return word if isinstance(word, Word) else Word()
