"""What offload takes from vLLM 0.23 beyond the connector that its documentation promises.

Beside these names it relies on: `_preempt_request` being called before a victim's blocks are freed; victims being taken
from the end of `running` under FCFS, and further ones until blocks are enough; `handle_preemptions` being what a worker
does first in a step, one without tokens too; `schedule` asking for what the host has of whoever has computed nothing,
skipping whom it answers None, and computing nothing of a request that it loads for until `finished_recving_kv_req_ids`
has it; a request there that is in `failed_recving_kv_req_ids`, without computed tokens, being freed and begun anew;
`_free_request` being told to delay only where a request ends that is being loaded; and `reset_prefix_cache` asking the
cache manager once those that run have given up their blocks.
"""

from __future__ import annotations

from kvcompile.integrations.vllm.compat import names_of

_OF_SCHEDULER = (
    *("schedule", "update_from_output", "reset_prefix_cache", "has_finished_requests"),
    *("_build_kv_connector_meta", "_preempt_request", "_free_request"),
    *("connector", "kv_cache_manager", "requests", "running", "waiting", "skipped_waiting", "policy", "block_size"),
    *("max_num_scheduled_tokens", "_inflight_prefills", "finished_recving_kv_req_ids", "failed_recving_kv_req_ids"),
)
_OF_CACHE_MANAGER = (
    *("get_computed_blocks", "get_blocks", "free", "coordinator", "block_pool", "enable_caching"),
    "reset_prefix_cache",
)
_OF_BLOCK_MANAGER = (
    *("get_num_skipped_tokens", "get_num_blocks_to_allocate", "allocate_new_computed_blocks", "req_to_blocks"),
)
_OF_BLOCK_POOL = ("touch", "free_blocks", "get_num_free_blocks", "blocks", "num_gpu_blocks")
_OF_BLOCK = ("block_id", "ref_cnt", "block_hash", "is_null")
_OF_CONNECTOR = (
    *("bind_gpu_block_pool", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished", "reset_cache", "register_kv_caches", "handle_preemptions"),
    "build_connector_worker_meta",
)
_OF_REQUEST = (
    *("num_computed_tokens", "num_output_placeholders", "num_preemptions", "block_hashes", "resumable"),
    "skip_reading_prefix_cache",
)


def missing() -> list[str]:
    """Those that this vLLM does not have, in code or attributes, as Class.name."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
    from vllm.v1.request import Request

    wanted = (
        (Scheduler, _OF_SCHEDULER, [Scheduler.__init__]),
        (KVCacheManager, _OF_CACHE_MANAGER, [KVCacheManager.__init__]),
        (FullAttentionManager, _OF_BLOCK_MANAGER, [SingleTypeKVCacheManager.__init__]),
        (BlockPool, _OF_BLOCK_POOL, [BlockPool.__init__]),
        (KVCacheBlock, _OF_BLOCK, [KVCacheBlock.__init__]),
        (KVConnectorBase_V1, _OF_CONNECTOR, []),
        (Request, _OF_REQUEST, [Request.__init__]),
    )
    return [
        f"{cls.__name__}.{name}"
        for cls, names, methods in wanted
        for name in names
        if name not in names_of(cls, *methods)
    ]
