"""Rules for the whole suite."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device. torch is imported only if such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    usable = torch.cuda.is_available()
    if usable and importlib.util.find_spec("vllm"):  # the operators' own tests do without vLLM
        from vllm.platforms import current_platform

        # vLLM's CPU build may be installed on a host with a GPU, where torch alone would see it.
        usable = current_platform.is_cuda()
    if not usable:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """fp32 for every test: vLLM sets the model's dtype while it loads, and leaves it set where loading is refused."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """A real model: the checkpoint of SmolLM2-135M-Instruct in the default cache, which the demo shares."""
    from kvcompile.tools.smollm2 import checkpoint

    return checkpoint(progress=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer LlamaForCausalLM configuration without weights, for `load_format="dummy"`."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
