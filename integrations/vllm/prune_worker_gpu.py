"""The worker of a GPU engine that prunes: vLLM's, whose runner, of either version, is made to."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from kvcompile.integrations.vllm import prune_runner, prune_runner_v2


class PruningGPUWorker(Worker):
    def init_device(self) -> None:
        super().init_device()
        (prune_runner_v2 if self.use_v2_model_runner else prune_runner).install(self.model_runner)
