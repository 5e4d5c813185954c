"""Preventive backup: which pages are copied ahead of need in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvcompile.offload.books import Books


@dataclass(frozen=True)
class Candidate:
    """A request that may be preempted soon, whose shape books know. pages: those that are full and will not change."""

    request_id: str
    pages: range


def plan(candidates: Iterable[Candidate], books: Books, most_requests: int, most_pages: int) -> list[tuple[str, int]]:
    """(request, page) to copy now: of the likeliest victims, which come first, the coldest pages, which do.

    Requests whose pages all have a copy cost nothing and do not count among most_requests. A host pool that is full
    takes nothing but the slots of requests that have ended: what else it holds is worth as much.
    """
    chosen: list[tuple[str, int]] = []
    most_pages = min(most_pages, books.room)
    for candidate in candidates:
        if most_requests == 0 or len(chosen) >= most_pages:
            break
        if books.copied(candidate.request_id) >= len(candidate.pages):
            continue
        most_requests -= 1
        uncopied = books.uncopied_pages(candidate.request_id, candidate.pages)
        chosen += ((candidate.request_id, page) for page in islice(uncopied, most_pages - len(chosen)))
    return chosen
