"""What a pass reports about one graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph: sites rewritten, of sites looked at.

    `refused`: "node: why" for each site that was left as it was, those that are no candidates for a good reason too.
    """

    name: str
    matched: int
    candidates: int
    refused: tuple[str, ...] = ()
