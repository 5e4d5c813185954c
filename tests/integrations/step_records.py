"""All that two schedulers say and look like after each step, to be compared: one whose plain steps are vLLM's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvcompile.integrations.vllm.plain_steps import PlainSteps


def _plain(value: Any) -> Any:
    """What can be compared of vLLM's objects: no clock, no identity."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _output(output: Any) -> list[Any]:
    fields = [getattr(output, name) for name in output.__struct_fields__ if name != "events"]
    return [_plain(field) for field in fields] + [[event.type for event in output.events or ()]]


def _state(scheduler: Any) -> dict[str, Any]:
    manager = scheduler.kv_cache_manager
    (single,) = manager.coordinator.single_type_managers
    return {
        "step": scheduler.current_step,
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "finished": set(scheduler.finished_req_ids),
        "before": set(scheduler.prev_step_scheduled_req_ids),
        "free": [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()],
        "tables": {name: [b.block_id for b in blocks] for name, blocks in single.req_to_blocks.items() if blocks},
        "hashes": {b.block_id: (b.block_hash, b.ref_cnt) for b in manager.block_pool.blocks if b.block_hash},
        "cached": dict(single.num_cached_block),
        "hits": _plain(manager.prefix_cache_stats),
        "requests": {
            name: (
                request.status,
                request.num_computed_tokens,
                request.num_output_placeholders,
                request.async_tokens_to_discard,
                request.next_decode_eligible_step,
                request.is_prefill_chunk,
                list(request.spec_token_ids),
                list(request.all_token_ids),
                list(request.output_token_ids),
                list(request.block_hashes),
                request.stop_reason,
                request.prefill_stats and str(vars(request.prefill_stats)),
            )
            for name, request in scheduler.requests.items()
        },
    }


class _Record:
    """All that a scheduler says and what it looks like after each step, while something goes on around it."""

    def __init__(self, scheduler: Any, *, plain: bool) -> None:
        assert scheduler._plain_possible
        scheduler._plain_possible = plain
        self.scheduler, self.said = scheduler, []
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update

    def schedule(self) -> Any:
        output = self._schedule()
        self.said.append((_plain(output), _state(self.scheduler)))
        return output

    def update(self, output: Any, result: Any) -> Any:
        outputs = self._update(output, result)
        said = {
            client: (list(map(_output, each.outputs)), each.finished_requests, _plain(each.scheduler_stats))
            for client, each in outputs.items()
        }
        self.said.append((said, _state(self.scheduler)))
        return outputs


def same_as_vllms(make: Callable[[], tuple[Any, Any]], serve: Callable[[Any, Any], None]) -> PlainSteps:
    """Serve with a scheduler whose plain steps are vLLM's own, and with another; the latter, once all is compared.

    make: a scheduler and its configuration, which `serve` is given.
    """
    records = []
    for plain in (False, True):
        scheduler, config = make()
        record = _Record(scheduler, plain=plain)
        serve(scheduler, config)
        records.append(record)
    stock, ours = records
    for step, (theirs, own) in enumerate(zip(stock.said, ours.said, strict=True)):
        assert own == theirs, f"call {step} differs"
    assert stock.scheduler.plain_steps == 0
    return ours.scheduler
