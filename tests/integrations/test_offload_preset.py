"""How offload is asked for, what it makes of a configuration, and why it may be off."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

from kvcompile.config import OffloadConfig, UsageError
from kvcompile.integrations.vllm import offload_preset, preset
from kvcompile.integrations.vllm.active import OFFLOADING_SCHEDULER, PRUNING_SCHEDULER, SCHEDULER

ON = {"kvcompile": {"offload": {"enabled": True, "cpu_bytes_to_use": 1 << 20}}}
SAID = "offload (1048576 bytes of host memory, copies ahead of need below 35% free blocks)"


def by_flag(role: str | None = "kv_both", name: str = "KVCompileOffload", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role=role, kv_connector_extra_config=extra)


def with_options(**options: dict[str, Any]) -> dict[str, Any]:
    return {"kvcompile": {**ON["kvcompile"], **options}}


def test_it_is_off_unless_it_is_asked_for_and_then_nothing_of_it_is_there(build) -> None:
    config = build()
    assert config.kv_transfer_config is None
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert "offload (offload.enabled=false)" in preset.startup_line(config).split("not active: ")[1]
    assert build(
        additional_config={
            "kvcompile": {"strict": True, "passes": {"norm_quant": False, "swiglu_quant": False, "rotary": False}}
        }
    )


def test_asked_for_by_its_option_it_installs_the_connector(build) -> None:
    config = build(additional_config=ON)
    transfer = config.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("KVCompileOffload", "kv_both")
    assert transfer.kv_connector_extra_config == {
        "cpu_bytes_to_use": 1 << 20,
        "lazy_gpu_free_trigger": 0.35,
        "max_scan_reqs": 3,
    }
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert SAID in preset.startup_line(config).split("not active: ")[0]


def test_asked_for_by_the_flag_of_vllm_it_is_the_same(build) -> None:
    config = build(kv_transfer_config=by_flag(cpu_bytes_to_use=1 << 20, max_scan_reqs=5))
    options = config.additional_config["kvcompile"]["offload"]
    assert options == {
        "enabled": True,
        "cpu_bytes_to_use": 1 << 20,
        "lazy_gpu_free_trigger": 0.35,
        "max_scan_reqs": 5,
    }
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert SAID in preset.startup_line(config)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            by_flag(cpu_bytes=1),
            "--kv-transfer-config: kv_connector_extra_config has 'cpu_bytes'; allowed are cpu_bytes_to_use, "
            "lazy_gpu_free_trigger, max_scan_reqs",
        ),
        (
            by_flag(enabled=False),
            "--kv-transfer-config: kv_connector_extra_config has 'enabled'; allowed are cpu_bytes_to_use, "
            "lazy_gpu_free_trigger, max_scan_reqs",
        ),
        (
            by_flag(role="kv_producer"),
            "--kv-transfer-config: kv_role is 'kv_producer'; allowed for KVCompileOffload is \"kv_both\"",
        ),
        (
            KVTransferConfig(kv_connector="KVCompileOffload", kv_role="kv_both", kv_buffer_size=1e6, kv_rank=1),
            "--kv-transfer-config: KVCompileOffload makes nothing of kv_buffer_size, kv_rank; remove it",
        ),
    ],
    ids=["unknown", "enabled", "role", "of others"],
)
def test_what_the_flag_may_not_say_is_refused(refusal, flag: KVTransferConfig, message: str) -> None:
    assert refusal(kv_transfer_config=flag) == message


def test_a_value_out_of_range_is_refused_by_the_flag_it_came_by(refusal) -> None:
    said = refusal(kv_transfer_config=by_flag(lazy_gpu_free_trigger=1.5))
    wanted = "--kv-transfer-config: offload.lazy_gpu_free_trigger is 1.5: give a number, 0 <= value <= 1"
    assert said.startswith(wanted)


def test_options_given_twice_are_refused(refusal) -> None:
    assert refusal(kv_transfer_config=by_flag(), additional_config=ON) == (
        "offload.enabled, offload.cpu_bytes_to_use and --kv-transfer-config are given; give offload's options in one "
        "place"
    )


def test_another_connector_is_refused_with_the_int8_cache(refusal) -> None:
    said = refusal(kv_transfer_config=by_flag(name="ExampleConnector"))
    assert said.startswith("--kv-transfer-config does not work with the int8 KV cache of kvcompile")


def test_in_vllms_own_order_requests_are_saved_too(build) -> None:
    config = build(additional_config=with_options(scheduler={"enabled": False}, prune={"enabled": False}))
    assert config.scheduler_config.scheduler_cls == OFFLOADING_SCHEDULER
    pruned = build(additional_config=with_options(scheduler={"enabled": False}, prune={"enabled": True}))
    assert pruned.scheduler_config.scheduler_cls == PRUNING_SCHEDULER
    assert SAID in preset.startup_line(pruned)


@pytest.mark.parametrize(
    ("fields", "options", "why"),
    [
        ({}, {"kv8": {"enabled": False}}, "attention is not kvcompile's"),
        ({"attention_backend": "CPU_ATTN"}, {}, "attention is not kvcompile's"),
        ({"scheduler_cls": "some.Scheduler"}, {}, "--scheduler-cls given"),
    ],
    ids=["kv8", "backend", "scheduler"],
)
def test_what_is_in_its_way_is_said_and_refused_where_it_was_asked_for_by_the_flag(
    build, refusal, fields: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    config = build(additional_config=with_options(**options), **fields)
    assert config.kv_transfer_config is None
    assert f"offload ({why})" in preset.startup_line(config)
    assert refusal(additional_config=with_options(**options, strict=True), **fields).startswith("strict is set and ")
    flagged = {"additional_config": {"kvcompile": options}, "kv_transfer_config": by_flag(), **fields}
    assert refusal(**flagged) == (
        f"--kv-transfer-config: KVCompileOffload cannot be used: {why}; remove the flag, or what is in its way"
    )


@pytest.mark.parametrize("sleeps", [False, True])
def test_on_a_gpu_it_is_on_unless_the_cache_may_be_taken_away(engine_args, monkeypatch, sleeps: bool) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    args, notes = engine_args(enable_sleep_mode=sleeps), {}
    offload_preset.apply(args, OffloadConfig(enabled=True), notes, our_attention=True)
    assert notes == ({"offload": "--enable-sleep-mode: not with offload on a GPU"} if sleeps else {})
    assert (args.kv_transfer_config is None) == sleeps


def test_an_allocator_that_vllm_allows_no_connector_is_told_before_vllm_refuses_it(build, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    config = build(additional_config=ON)
    assert config.kv_transfer_config is None
    why = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, which vLLM allows with no KV connector"
    assert f"offload ({why})" in preset.startup_line(config)


def test_a_pool_that_holds_no_block_is_refused(refusal) -> None:
    said = refusal(additional_config=with_options(prune={"enabled": False}), block_size=4096, max_model_len=256)
    assert said.startswith("offload.cpu_bytes_to_use is 1048576, and one block of this model takes 1114112 bytes")


def test_the_connector_without_kvcompile_is_refused_by_name(engine_args) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvcompile.integrations.vllm.offload_connector import KVCompileOffload

    with pytest.raises(
        UsageError, match="--kv-transfer-config: KVCompileOffload needs --compilation-config kvcompile; add it"
    ):
        engine_args(kv_transfer_config=by_flag()).create_engine_config()
    config = engine_args().create_engine_config()  # as by a caller who makes vLLM's configuration himself
    config.kv_transfer_config = by_flag()
    with pytest.raises(UsageError, match="KVCompileOffload needs --compilation-config kvcompile; add it"):
        KVCompileOffload(config, KVConnectorRole.SCHEDULER, None)
