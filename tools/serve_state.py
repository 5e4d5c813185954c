"""Results of `kvcompile bench serve` as they come, in a file too, so that a run can be taken up again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompile.tools.state_file import StateFile

RUNS = "runs"  # what they are called in messages


class Results:
    """Facts by system, and what each run of a case found, by (case, system) and seed. Threads may add at once.

    path: where runs are kept too, beside `identity`: what has to be the same for them to be compared.
    Raises UsageError if that file is of another identity, or is none of ours.
    """

    def __init__(self, path: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self.runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        self.told: Callable[[str], None] = lambda _: None  # called after each run with its case and system
        self._lock = threading.Lock()
        self.file = None if path is None else StateFile(path, identity or {}, RUNS, self._take)

    @property
    def kept(self) -> int:
        """Runs that were there from the start."""
        return self.file.kept if self.file else 0

    def add_facts(self, system: str, facts: dict[str, Any]) -> None:
        """They are kept with the system's runs."""
        with self._lock:
            self.facts[system] = facts

    def add_run(self, case: str, system: str, seed: int, found: dict[str, Any]) -> None:
        with self._lock:
            entry = {"run": found, "case": case, "system": system, "seed": seed, "facts": self.facts[system]}
            self._take(entry)
            if self.file:
                self.file.append(entry)
        self.told(f"{case}, {system}")

    def done(self) -> None:
        """The record has been written."""
        if self.file:
            self.file.done()

    def has(self, case: str, system: str, seed: int) -> bool:
        return seed in self.runs.get((case, system), {})

    def of(self, case: str, system: str) -> list[dict[str, Any]]:
        """Of each run, in the order of seeds."""
        runs = self.runs[case, system]
        return [runs[seed] for seed in sorted(runs)]

    def _take(self, entry: dict[str, Any]) -> None:
        self.facts[entry["system"]] = entry["facts"]
        self.runs.setdefault((entry["case"], entry["system"]), {})[entry["seed"]] = entry["run"]
