"""Rules for the whole suite."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device. torch is imported only if such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """A real model: the checkpoint of SmolLM2-135M-Instruct in the default cache, which the demo shares."""
    from kvcompile.tools.smollm2 import checkpoint

    return checkpoint(progress=False)
