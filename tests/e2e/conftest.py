"""End-to-end tests: real processes, a real model, vLLM's CPU build."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def compile_caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with compile caches of this test session: cold at first, shared by the tests afterwards."""
    root = tmp_path_factory.mktemp("compile")
    return {"VLLM_CACHE_ROOT": str(root / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor")}
