"""What is refused before an engine starts: too little memory, a port that is taken."""

from __future__ import annotations

import argparse
import math
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import checks, checks_memory
from kvcompile.ops import nvrtc

GIB = 1 << 30
# The small Llama: 2 layers, K and V, 1 KV head of 64; int8 data with a 4-byte scale each.
TOKEN_BYTES = 2 * 2 * 1 * (64 + 4)
BLOCK = 128
BLOCK_BYTES = BLOCK * TOKEN_BYTES


def _refused(check: Callable[..., None], *arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        check(*arguments)
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A platform of 16 GiB, of which `free` are; set `cpu` to False for a GPU."""
    it = SimpleNamespace(cpu=True, total=16 * GIB, free=16 * GIB, capability=None)
    platform = SimpleNamespace(
        is_cpu=lambda: it.cpu,
        mem_get_info=lambda: (it.free, it.total),
        get_device_total_memory=lambda: it.total,
        get_device_capability=lambda: it.capability,
    )
    for module in (checks, checks_memory):
        monkeypatch.setattr(module, "current_platform", platform)
    return it


# --- memory: the size of a request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 4096])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 80, "num_key_value_heads": 2}, {"num_hidden_layers": 5}], ids=str)
@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "mode"),
    [
        ("int8_per_token_head", torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
        ("bfloat16", torch.bfloat16, KVQuantMode.NONE),
        ("fp8", torch.uint8, KVQuantMode.FP8_PER_TENSOR),
    ],
)
def test_the_bytes_of_a_request_are_those_of_vllms_own_pages(
    build, checkpoint, cache_dtype, dtype, mode, changes, tokens
):
    config = build(model=checkpoint(**changes), kv_cache_dtype=cache_dtype)
    layers, heads = changes.get("num_hidden_layers", 2), changes.get("num_key_value_heads", 1)
    page = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=changes.get("head_dim", 64), dtype=dtype, kv_quant_mode=mode
    ).page_size_bytes
    assert config.cache_config.block_size == BLOCK
    assert checks_memory.request_bytes(config, tokens) == layers * page * math.ceil(tokens / BLOCK)


def test_the_bytes_of_a_request_in_numbers(build):
    assert checks_memory.request_bytes(build(), 256) == 256 * 2 * 2 * 68 == 69_632
    assert checks_memory.request_bytes(build(kv_cache_dtype="bfloat16"), 256) == 256 * 2 * 2 * 128 == 131_072
    assert checks_memory.request_bytes(build(kv_cache_dtype="auto", block_size=16), 17) == 32 * 2 * 2 * 68


# --- memory: given in bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 1])
def test_memory_for_exactly_one_request_is_accepted(build, given):
    assert build(kv_cache_memory_bytes=given).cache_config.kv_cache_memory_bytes == given


@pytest.mark.parametrize("given", [BLOCK_BYTES, 2 * BLOCK_BYTES - 1])
def test_a_byte_too_little_is_refused_with_the_length_that_fits(build, refusal, given):
    line = refusal(kv_cache_memory_bytes=given)
    assert line.startswith("too little memory: one request of 256 tokens needs 68.00 KiB of KV cache, there is ")
    assert line.endswith(f"(--kv-cache-memory-bytes {given}); lower --max-model-len to at most 128 or give more memory")
    assert build(kv_cache_memory_bytes=given, max_model_len=128).model_config.max_model_len == 128


def test_the_length_that_fits_is_of_whole_blocks(build, refusal):
    line = refusal(kv_cache_memory_bytes=3 * BLOCK_BYTES // 2)
    assert "lower --max-model-len to at most 128 or give more memory" in line
    with pytest.raises(UsageError, match="too little memory: one request of 129 tokens"):
        build(kv_cache_memory_bytes=3 * BLOCK_BYTES // 2, max_model_len=129)


@pytest.mark.parametrize("given", [0, BLOCK_BYTES - 1])
def test_where_not_even_one_block_fits_no_length_is_proposed(refusal, given):
    assert refusal(kv_cache_memory_bytes=given).endswith(f"(--kv-cache-memory-bytes {given}); give more memory")


def test_with_an_automatic_length_vllm_looks_for_what_fits(build, refusal):
    config = build(max_model_len=-1, kv_cache_memory_bytes=BLOCK_BYTES)
    assert config.model_config.max_model_len == 256
    assert "one request of 1 tokens" in refusal(max_model_len=-1, kv_cache_memory_bytes=BLOCK_BYTES - 1)


def test_more_bytes_than_the_host_has_free_are_refused_on_a_cpu(build, refusal, machine):
    machine.free = 2 * GIB
    assert refusal(kv_cache_memory_bytes=2 * GIB + 1) == (
        "too little memory: --kv-cache-memory-bytes 2147483649 asks for 2.00 GiB of this host's 16.00 GiB, 2.00 GiB "
        "are free; lower it"
    )
    assert build(kv_cache_memory_bytes=2 * GIB).cache_config.kv_cache_memory_bytes == 2 * GIB


def test_the_size_of_other_pages_is_left_to_vllm(build):
    assert build(kv_cache_dtype="turboquant_k8v4", kv_cache_memory_bytes=1).cache_config.kv_cache_memory_bytes == 1


# --- memory: a share of the device ----------------------------------------------------------------------------------


def test_a_share_that_holds_one_request_is_accepted(build, machine):
    machine.total = machine.free = 1 << 20
    assert build(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5).cache_config.kv_cache_memory_bytes is None


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
def test_a_share_too_small_for_one_request_is_refused_with_the_length_that_fits(refusal, machine, cpu):
    machine.cpu = cpu
    machine.total = machine.free = 1 << 20
    assert refusal(kv_cache_memory_bytes=None, gpu_memory_utilization=0.0625) == (
        "too little memory: one request of 256 tokens needs 68.00 KiB of KV cache, there is 64.00 KiB (6% of 1.00 MiB "
        "less 0.00 KiB of weights); lower --max-model-len to at most 128 or give more memory"
    )


def test_a_share_that_is_not_free_is_refused_on_a_cpu_only(build, refusal, machine):
    machine.free = 6 * GIB
    fields = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5}
    assert refusal(**fields) == (
        "too little memory: --gpu-memory-utilization 0.5 asks for 8.00 GiB of this host's 16.00 GiB, 6.00 GiB are "
        "free; lower it, or set --kv-cache-memory-bytes, for instance 1G"
    )
    machine.cpu = False
    build(**fields)


SHARDS = {"model-00001-of-00002.safetensors": 600, "model-00002-of-00002.safetensors": 500}


@pytest.mark.parametrize(
    ("files", "changes", "fields", "kib"),
    [
        ({"model.safetensors": 900}, {}, {}, 900),
        (SHARDS, {}, {}, 1100),
        # The same weights twice, as Mistral's checkpoints have them; and what is no weight of this model.
        ({**SHARDS, "consolidated.safetensors": 1100}, {}, {}, 1100),
        ({"model.safetensors": 900, "adapter_model.safetensors": 300}, {}, {}, 900),
        # Stored in fp32, held in bf16.
        ({"model.safetensors": 900}, {"dtype": "float32"}, {"dtype": "bfloat16"}, 450),
        ({"model.safetensors": 900}, {"dtype": "bfloat16"}, {"dtype": "float32"}, 900),
        ({"model.safetensors": 900}, {}, {"cpu_offload_gb": 1}, 0),
        ({"model.safetensors": 900}, {}, {"quantization": "fp8"}, 0),
        ({}, {}, {}, 0),
    ],
    ids=["one", "shards", "twice", "adapter", "fp32", "bf16", "offloaded", "quantised", "none"],
)
def test_the_weights_are_taken_off_at_what_they_need_at_least(
    refusal, checkpoint, machine, files, changes, fields, kib
):
    model = checkpoint(**changes)
    for name, size in files.items():
        with (model / name).open("wb") as file:
            file.truncate(size * 1024)
    # Less than one block remains beside the weights.
    machine.total = machine.free = kib * 1024 + BLOCK_BYTES // 2
    line = refusal(model=model, kv_cache_memory_bytes=None, gpu_memory_utilization=1.0, **fields)
    weights = f"{kib / 1024:.2f} MiB" if kib >= 1024 else f"{kib:.2f} KiB"
    assert f"less {weights} of weights); give more memory" in line


# --- port -----------------------------------------------------------------------------------------------------------


def _serving(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"host": "127.0.0.1", "port": 0, "uds": None, "headless": False, **changes})


@pytest.fixture
def taken() -> int:
    """A port that something listens to on 127.0.0.1."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", None, ""])
def test_a_free_port_is_accepted_and_free_afterwards(host):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        checks.refuse_port_in_use(_serving(host=host, port=port))


@pytest.mark.parametrize("host", ["127.0.0.1", None])
def test_a_port_in_use_is_refused_by_its_number(taken, host):
    assert _refused(checks.refuse_port_in_use, _serving(host=host, port=taken)) == (
        f"port {taken} of {host or 'all addresses'} is in use; give another --port, or stop what listens there"
    )


@pytest.mark.parametrize("changes", [{"uds": "/run/serve.sock"}, {"headless": True}], ids=str)
def test_a_server_that_binds_no_port_is_not_asked_for_one(taken, changes):
    checks.refuse_port_in_use(_serving(port=taken, **changes))


@pytest.mark.parametrize("port", [-1, 65536, 700_000])
def test_a_number_that_is_no_port_is_refused(port):
    assert _refused(checks.refuse_port_in_use, _serving(port=port)) == (
        f"port {port} is no port; allowed are 0 to 65535; give another --port"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "2001:db8::1"])
def test_an_address_of_another_host_is_refused_with_the_reason(host):
    line = _refused(checks.refuse_port_in_use, _serving(host=host, port=8000))
    assert line.startswith(f"port 8000 of {host} cannot be bound (")
    assert "Unknown error" not in line
    assert line.endswith("); give another --host or --port")


# --- kernels of the int8 cache ----------------------------------------------------------------------------------------


def _heads(kv_heads: int, heads: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        model="m",
        get_total_num_kv_heads=lambda: kv_heads,
        get_head_size=lambda: size,
        model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
    )


def test_on_a_gpu_what_compiles_kernels_has_to_be_there(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise nvrtc.CompilerMissing("cuda-python is needed to compile kernels: install it")

    monkeypatch.setattr(nvrtc, "require", missing)
    checks.refuse_kv8_without_kernels(_heads(8, 32, 128), 1)  # a CPU has none
    machine.cpu = False
    with pytest.raises(UsageError, match=r"^cuda-python is needed .* install it; or keep .*kv8.enabled=false$"):
        checks.refuse_kv8_without_kernels(_heads(8, 32, 128), 1)


def test_heads_have_to_fit_the_gpu(machine: SimpleNamespace) -> None:
    machine.cpu, machine.capability = False, DeviceCapability(8, 9)
    for kv_heads, heads, size in ((8, 32, 128), (8, 64, 256), (3, 9, 64)):
        checks.refuse_kv8_without_kernels(_heads(kv_heads, heads, size), 1)
    with pytest.raises(UsageError, match=r"10 KV heads of 256 with 4 query heads each do not fit .* capability 8\.9"):
        checks.refuse_kv8_without_kernels(_heads(10, 40, 256), 1)
    checks.refuse_kv8_without_kernels(_heads(10, 40, 256), 2)
    machine.capability = DeviceCapability(9, 0)
    checks.refuse_kv8_without_kernels(_heads(10, 40, 256), 1)
