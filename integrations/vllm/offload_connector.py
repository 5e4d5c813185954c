"""The KV connector that vLLM knows: each call goes to the half that it is for.

Restoring is vLLM's own asynchronous load: a preempted request waits with its table until its pages have come, and runs
only then. What a connector cannot see, as it is told of a preemption when the blocks are gone, is in
`offload_scheduler`.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvcompile.config import OffloadConfig, UsageError
from kvcompile.integrations.vllm.active import is_active
from kvcompile.integrations.vllm.offload_control import Load, OffloadControl
from kvcompile.integrations.vllm.offload_messages import Orders, Word, word_of
from kvcompile.integrations.vllm.offload_worker import OffloadWorker, copies_of_platform
from kvcompile.offload.books import Books
from kvcompile.offload.host_pool import HostPool
from kvcompile.presets import NAME


class KVCompileOffload(KVConnectorBase_V1, SupportsHMA):
    """control: of the scheduler's half, else None."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not is_active(vllm_config):
            raise UsageError(f"the KV connector {type(self).__name__} needs --compilation-config {NAME}; add it")
        options = OffloadConfig(**vllm_config.additional_config[NAME]["offload"])
        page_bytes = page_bytes_of(kv_cache_config)
        self.control: OffloadControl | None = None
        self._worker: OffloadWorker | None = None
        self.failed: list[Load] = []
        self.released = 0
        if role is KVConnectorRole.WORKER:
            self._rank = vllm_config.parallel_config.rank
            self._worker = OffloadWorker(options.cpu_bytes_to_use, page_bytes, copies_of_platform())
        else:
            books = Books(HostPool(options.cpu_bytes_to_use // page_bytes), vllm_config.cache_config.block_size)
            self.control = OffloadControl(books, page_bytes, vllm_config.parallel_config.world_size)

    # ---- the worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Orders) -> None:
        # The first that a worker hears of a step: nothing of it has been computed.
        self._worker.execute(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All has begun in `handle_preemptions`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request of a step waits for a copy."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Layers are copied together, not while they are computed."""

    def wait_for_save(self) -> None:
        """Blocks that are being copied are held by the scheduler."""

    def build_connector_worker_meta(self) -> Word | None:
        word = self._worker.take_word()
        return word and word.of_rank(self._rank)

    # ---- the scheduler's half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.control.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.num_output_placeholders:
            return None, False  # its last token is not known yet
        tokens = self.control.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.control.allocated(request, blocks.blocks[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self.control.transfers.take_orders()

    def update_connector_output(self, connector_output: Any) -> None:
        good, bad, freed = self.control.heard(word_of(connector_output))
        # vLLM lets these run next, or frees what an aborted request held.
        connector_output.finished_recving = {load.request.request_id for load in (*good, *bad)}
        self.failed += bad
        self.released += freed

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self.control.finished(request.request_id, self.control.transfers.blocks(block_ids[0]))
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """vLLM's base class has it answer None, which counts as done."""
        self.control.forget_all()
        return True


def page_bytes_of(cache: KVCacheConfig) -> int:
    """Bytes of one block of all layers of a rank."""
    return sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in cache.kv_cache_groups)
