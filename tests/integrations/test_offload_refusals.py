"""What offload refuses at start-up: more ranks than it knows to ask, and more memory than there is."""

from __future__ import annotations

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler

from kvcompile import host_memory
from kvcompile.config import OffloadConfig
from kvcompile.host_memory import HostMemory
from kvcompile.integrations.vllm import compat_offload, offload_preset, preset
from kvcompile.integrations.vllm.active import offloads

GIB = 1 << 30
ON = {"kvcompile": {"offload": {"enabled": True, "cpu_bytes_to_use": 2 * GIB}}}


def _available(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(host_memory, "read", lambda: HostMemory(16 * GIB, count))


def test_a_pool_larger_than_the_memory_there_is_is_refused_in_one_line(refusal, build, monkeypatch) -> None:
    _available(monkeypatch, 2 * GIB - 1)
    assert refusal(additional_config=ON) == (
        "offload.cpu_bytes_to_use is 2147483648, for 1 worker on this machine 2147483648 bytes, and 2147483647 bytes "
        "of its memory are available; give at most 2147483647, and leave some for the model, or end what else takes "
        "memory"
    )
    _available(monkeypatch, 2 * GIB)
    assert offloads(build(additional_config=ON))


def test_every_worker_on_the_machine_has_a_pool(refusal, monkeypatch) -> None:
    _available(monkeypatch, 3 * GIB)
    said = refusal(additional_config=ON, tensor_parallel_size=2)
    assert "for 2 workers on this machine 4294967296 bytes" in said and f"at most {3 * GIB // 2}" in said


def test_memory_that_the_kernel_says_nothing_of_is_no_reason_to_refuse(build, monkeypatch) -> None:
    def read() -> HostMemory:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(host_memory, "read", read)
    assert offloads(build(additional_config=ON))


def test_without_offload_nobody_looks_at_the_memory(build, monkeypatch) -> None:
    _available(monkeypatch, 0)
    assert not offloads(build())


def test_ranks_of_tensor_parallelism_are_offloaded_together(build, monkeypatch) -> None:
    _available(monkeypatch, 8 * GIB)
    config = build(additional_config=ON, tensor_parallel_size=2)
    assert offloads(config)
    assert "offload (" in preset.startup_line(config).split("not active: ")[0]


def test_pipeline_parallelism_is_refused_by_name(engine_args) -> None:
    args, notes = engine_args(pipeline_parallel_size=2), {}
    offload_preset.apply(args, OffloadConfig(enabled=True), notes, our_attention=True)
    assert notes == {"offload": "--pipeline-parallel-size given: no stage has all layers of a block"}
    assert args.kv_transfer_config is None


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, HostMemory(16 * GIB, 8 * GIB)),
        ({"memory.max": f"{6 * GIB}", "memory.current": f"{3 * GIB}"}, HostMemory(6 * GIB, 3 * GIB)),
        (
            {"memory.max": f"{6 * GIB}", "memory.current": f"{3 * GIB}", "memory.stat": f"anon 5\ninactive_file {GIB}"},
            HostMemory(6 * GIB, 4 * GIB),
        ),
        ({"memory.max": f"{6 * GIB}", "memory.current": f"{7 * GIB}"}, HostMemory(6 * GIB, 0)),
    ],
    ids=["no container", "a container", "with files", "full"],
)
def test_memory_that_is_available_is_what_a_container_leaves_with_what_files_take(tmp_path, limits, expected) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\nPages: 0\n")
    for name, text in limits.items():
        (tmp_path / name).write_text(text)
    assert host_memory.read(tmp_path, tmp_path) == expected


def test_this_vllm_has_all_that_offload_needs() -> None:
    assert compat_offload.missing() == []


def test_with_a_vllm_without_it_offload_is_off_and_says_so(build, monkeypatch) -> None:
    monkeypatch.delattr(Scheduler, "_build_kv_connector_meta")
    monkeypatch.delattr(BlockPool, "touch")
    assert compat_offload.missing() == ["Scheduler._build_kv_connector_meta", "BlockPool.touch"]
    _available(monkeypatch, 8 * GIB)
    config = build(additional_config=ON)
    assert not offloads(config)
    assert "offload (vLLM has no Scheduler._build_kv_connector_meta, BlockPool.touch)" in preset.startup_line(config)
