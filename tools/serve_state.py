"""Results of `kvcompile bench serve` as they come, in a file of JSON lines too, so that a run can be taken up again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcompile.config import UsageError


class Results:
    """Facts by system, and what each run of a case found, by (case, system) and seed. Threads may add at once.

    path: where they are kept too, one line each, beside `identity`: what has to be the same for them to be compared.
    Raises UsageError if that file is of another identity, or is none of ours.
    """

    def __init__(self, path: Path | None = None, identity: dict[str, Any] | None = None) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self.runs: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        self.kept = 0  # runs that were there from the start
        self.told: Callable[[str], None] = lambda _: None  # called after each run with its case and system
        self._path, self._lock = path, threading.Lock()
        if path is None:
            return
        if path.exists():
            self._read(path, identity or {})
        if not self.kept:  # of a command that came to no run, nothing is held against another
            self.facts.clear()
            path.write_text(json.dumps({"identity": identity}) + "\n")

    def add_facts(self, system: str, facts: dict[str, Any]) -> None:
        with self._lock:
            self.facts[system] = facts
            self._append({"facts": facts, "system": system})

    def add_run(self, case: str, system: str, seed: int, found: dict[str, Any]) -> None:
        with self._lock:
            self.runs.setdefault((case, system), {})[seed] = found
            self._append({"run": found, "case": case, "system": system, "seed": seed})
        self.told(f"{case}, {system}")

    def done(self) -> None:
        """The record has been written: what a later run could take up is not to be mistaken for it."""
        if self._path is not None:
            self._path.unlink()

    def has(self, case: str, system: str, seed: int) -> bool:
        return seed in self.runs.get((case, system), {})

    def of(self, case: str, system: str) -> list[dict[str, Any]]:
        """Of each run, in the order of seeds."""
        runs = self.runs[case, system]
        return [runs[seed] for seed in sorted(runs)]

    def _append(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        try:
            text = path.read_text()
            whole, _, cut = text.rpartition("\n")  # a line that an end cut short is worth nothing
            first, *entries = [json.loads(line) for line in whole.splitlines()]
            before = dict(first["identity"])
            for entry in entries:
                if "facts" in entry:
                    self.facts[entry["system"]] = entry["facts"]
                else:
                    self.runs.setdefault((entry["case"], entry["system"]), {})[entry["seed"]] = entry["run"]
                    self.kept += 1
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} does not hold what a run left ({error!r}); remove it, or name another --json"
            ) from None
        other = [key for key, value in identity.items() if before.get(key) != value]
        if other and self.kept:
            raise UsageError(
                f"{path} holds runs that were made with another {', '.join(other)}; repeat that command as it was, "
                "remove the file, or name another --json"
            )
        if cut:
            path.write_text(whole + "\n")
