"""When the KV-length-aware scheduler is installed, and what is said where it is not."""

from __future__ import annotations

import pytest
from vllm.config import KVTransferConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvcompile.integrations.vllm import compat, scheduler
from kvcompile.integrations.vllm.active import SCHEDULER

NO_KV8 = {"kv8.enabled": False}
NO_PRUNE = {"prune.enabled": False}  # which has a scheduler of its own where ours is not wanted
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
OFF = {
    "option": (
        {"additional_config": {"kvcompile": {"scheduler.enabled": False, **NO_PRUNE}}},
        "scheduler.enabled=false",
    ),
    "own class": (
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "--scheduler-cls given",
    ),
    "speculation": (
        {"additional_config": {"kvcompile": NO_KV8}, "speculative_config": NGRAM},
        "speculative decoding: how many tokens a step adds is not known ahead",
    ),
    "connector": (
        {
            "additional_config": {"kvcompile": NO_KV8},
            "kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        },
        "a KV connector is configured",
    ),
}


def test_the_preset_installs_it(build):
    config = build()
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert resolve_obj_by_qualname(SCHEDULER) is scheduler.make_scheduler
    assert config.scheduler_config.get_scheduler_cls() is scheduler.make_scheduler


@pytest.mark.parametrize(("fields", "why"), OFF.values(), ids=OFF)
def test_where_it_cannot_be_or_is_not_wanted_vllms_choice_stays_and_the_line_says_why(
    build, startup_lines, fields, why
):
    config = build(**fields)
    assert config.scheduler_config.scheduler_cls == fields.get("scheduler_cls")
    assert f"scheduler ({why})" in startup_lines[0].partition("not active: ")[2]


@pytest.mark.parametrize("name", ["own class", "speculation", "connector"])
def test_strict_refuses_what_is_in_its_way(refusal, name):
    fields, why = OFF[name]
    options = {**fields.get("additional_config", {}).get("kvcompile", {}), "strict": True}
    assert refusal(**{**fields, "additional_config": {"kvcompile": options}}) == (
        f"strict is set and scheduler is not active: {why}; remove what is in its way, or strict"
    )


def test_strict_does_not_mind_that_it_is_switched_off(build):
    options = {"scheduler.enabled": False, "strict": True, **NO_PRUNE}
    assert build(additional_config={"kvcompile": options}).scheduler_config.scheduler_cls is None


def test_who_does_not_ask_gets_vllms_choice(engine_args):
    assert engine_args().create_engine_config().scheduler_config.scheduler_cls is None


def test_the_options_are_in_the_line(build, startup_lines):
    build(additional_config={"kvcompile": {"scheduler": {"horizon_steps": 100, "max_wait_batches": 3}}})
    assert "synchronous, blocks for 100 steps ahead, passed over by at most 3 batches)" in startup_lines[0]


def test_the_class_is_the_asynchronous_one_where_vllm_schedules_so():
    assert issubclass(scheduler.LengthAwareAsyncScheduler, AsyncScheduler)
    assert not issubclass(scheduler.LengthAwareScheduler, AsyncScheduler)


def test_this_vllm_has_all_that_the_scheduler_needs():
    assert compat.missing_of_scheduler() == []


def test_a_vllm_without_what_the_scheduler_needs_keeps_its_own(build, startup_lines, monkeypatch):
    monkeypatch.delattr(Scheduler, "_select_waiting_queue_for_scheduling")
    monkeypatch.delattr(KVCacheManager, "get_blocks")
    # Attributes that methods set count as there while a method names them.
    assert compat.missing_of_scheduler() == ["get_blocks"]
    monkeypatch.setattr(compat, "_OF_SCHEDULER", ("ask_the_oracle",))
    assert build(additional_config={"kvcompile": NO_PRUNE}).scheduler_config.scheduler_cls is None
    assert "scheduler (vLLM's scheduler has no ask_the_oracle, get_blocks)" in startup_lines[0]
