"""Whether vLLM's code still is what kvcompile repeats of it, where vLLM's own is too slow for a decode step.

What is repeated must say the same as its source, so that is compared to the letter; where it differs nothing of it is
used. After a change of vLLM: read what has changed, repeat it, and put the new digest here.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.kvcompile")

# Of vLLM 0.23.0.
_SCHEDULER = "7f4f59ed081517827ec917191fb1ce66f3c476fc5eccdb1a510d274d27d4ee60"


def scheduler_is_known() -> bool:
    """Of what `plain_steps.py` repeats, and of what it takes to be without effect in a decode step.

    Where it is not, a step takes longer, and the log says why.
    """
    from vllm.v1.core import kv_cache_manager, single_type_kv_cache_manager
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    blocks = single_type_kv_cache_manager.SingleTypeKVCacheManager
    repeated = (
        Scheduler.schedule,
        Scheduler._update_after_schedule,
        Scheduler._make_cached_request_data,
        Scheduler.update_from_output,
        Scheduler._update_request_with_output,
        AsyncScheduler,
        check_stop,
        kv_cache_manager.KVCacheManager.allocate_slots,
        KVCacheCoordinator.get_num_blocks_to_allocate,
        KVCacheCoordinator.allocate_new_blocks,
        KVCacheCoordinator.remove_skipped_blocks,
        blocks.remove_skipped_blocks,
        blocks.get_num_skipped_tokens,
        blocks.get_num_blocks_to_allocate,
        blocks.allocate_new_blocks,
        blocks.cache_blocks,
        get_request_block_hasher,
        Request,
        CachedRequestData,
        SchedulerOutput,
        EngineCoreOutput,
        EngineCoreOutputs,
        ModelRunnerOutput,
    )
    if _digest(repeated) == _SCHEDULER:
        return True
    logger.warning("this vLLM's scheduler is not that of 0.23.0: decode steps are scheduled by its own, slower code")
    return False


def _digest(sources: Iterable[Any]) -> str:
    """Of the source text of functions and classes; empty if one has none."""
    try:
        text = "".join(map(inspect.getsource, sources))
    except OSError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()
