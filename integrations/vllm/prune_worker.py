"""The worker of a CPU engine that prunes: vLLM's, whose runner is made to."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from kvcompile.integrations.vllm import prune_runner


class PruningCPUWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        prune_runner.install(self.model_runner)
