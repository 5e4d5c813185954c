"""Serving every case with every system: engines of one GPU are asked in turn, those of different GPUs side by side."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcompile.config import UsageError
from kvcompile.prune.plan import plan
from kvcompile.tools import serve_memory, serve_systems
from kvcompile.tools.serve_engine import Served
from kvcompile.tools.serve_gpus import Gpu
from kvcompile.tools.serve_state import Results

_WARM_UP = 1000  # its seeds, one of each case, begin here: no timed run has them
_WARM_TOKENS = 65_536  # of prompts: seconds on a GPU; all of 32 prompts of 16,000 would take as long as a run
_WARM_OUTPUT = 16  # by then the last of those prompts is done, and all requests decode together


class Case(NamedTuple):
    """Tokens of a prompt and of an answer, and how many requests are sent at once. name: in records."""

    prompt: int
    output: int
    requests: int
    name: str


@dataclass
class Serving:
    """What is to be served. arguments: of LLM, kv: bytes of the cache, both by system; config: the model's."""

    model: Path
    config: Mapping[str, Any]
    cases: list[Case]
    runs: int
    together: bool
    arguments: Mapping[str, dict[str, Any]]
    kv: Mapping[str, int]
    logs: Path
    int8_head: bool = True  # of W4A8 weights
    results: Results = field(default_factory=Results)
    _engines: list[Served] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False

    def serve(self, shares: Mapping[Gpu, list[str]]) -> None:
        """Fill `results` with what is not there yet. shares: the systems of each GPU.

        Raises UsageError if an engine ends, or is not what its system says. However it ends, no engine is left: on
        SIGTERM too, which a limit of time sends.
        """
        with _terminable(), ThreadPoolExecutor(len(shares)) as pool:
            try:
                futures = [pool.submit(self._on_gpu, gpu, names) for gpu, names in shares.items()]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                self._stop()

    def _on_gpu(self, gpu: Gpu, names: list[str]) -> None:
        names = [name for name in names if any(self._seeds_left(case, name) for case in self.cases)]
        for group in [names] if self.together else [[name] for name in names]:
            engines = [self._start(name, gpu) for name in group]
            for engine in engines:
                facts = engine.facts()
                serve_systems.check_facts(engine.name, facts)
                own = self.kv[engine.name]
                serve_memory.check_loaded(engine.name, self.config, facts, own, self.int8_head)
                self.results.add_facts(engine.name, {**facts, "gpu": gpu.index, "kv_bytes": own})
            for case in self.cases:
                self._serve_case(case, engines)
            for engine in engines:
                self._close(engine)

    def _serve_case(self, case: Case, engines: list[Served]) -> None:
        left = {engine: self._seeds_left(case, engine.name) for engine in engines}
        for engine, seeds in left.items():
            if seeds:
                _warm_up(engine, case, _WARM_UP + self.cases.index(case))
        for seed in range(self.runs):
            for engine, seeds in left.items():
                if seed in seeds:
                    found = engine.run(case.prompt, case.output, case.requests, seed)
                    _check_run(engine.name, case, found)
                    self.results.add_run(case.name, engine.name, seed, found)

    def _seeds_left(self, case: Case, name: str) -> list[int]:
        return [seed for seed in range(self.runs) if not self.results.has(case.name, name, seed)]

    def _start(self, name: str, gpu: Gpu) -> Served:
        with self._lock:
            if self._stopped:
                raise UsageError("another engine has ended")
            log = self.logs / f"{name.replace('/', '-')}.log"
            engine = Served(name, self.model, self.arguments[name], log, gpu.visible, gpu.cores)
            self._engines.append(engine)
        return engine

    def _close(self, engine: Served) -> None:
        with self._lock:
            if engine in self._engines:
                self._engines.remove(engine)
                engine.close()

    def _stop(self) -> None:
        """Threads that wait for an engine find that it has ended."""
        with self._lock:
            self._stopped = True
            while self._engines:
                self._engines.pop().close()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that what is to be done at the end is done."""

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # one is enough: a second would end what the first has begun
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _warm_up(engine: Served, case: Case, seed: int) -> None:
    """Have compiled, loaded and allocated what prompts of that length need, and what so many requests at once do.

    Where all of them have too many tokens, some of full length come first, then all, shortened.
    """
    output = min(case.output, _WARM_OUTPUT)
    whole = min(case.requests, max(4, _WARM_TOKENS // case.prompt))
    engine.run(case.prompt, output, whole, seed)
    if whole < case.requests:
        engine.run(min(case.prompt, max(1, _WARM_TOKENS // case.requests)), output, case.requests, seed)


def _check_run(name: str, case: Case, found: Mapping[str, Any]) -> None:
    """Raise UsageError if a system that prunes has not pruned the prompts of this run."""
    options = serve_systems.pruning_of(name)
    planned = options and plan(case.prompt, serve_systems.BLOCK_SIZE, options)
    if not planned:
        return
    least = case.requests * (case.prompt - planned.kept)
    if found["pruned_tokens"] < least or found["not_pruned"]:
        raise UsageError(
            f"{name}, {case.name}: {found['pruned_tokens']:,} prompt tokens were pruned, {found['not_pruned']} prompts "
            f"were not as they should: at least {least:,} and none are to be, or it is not what is to be compared"
        )
