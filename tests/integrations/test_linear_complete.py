"""Loading a model with W4A8 linears: whatever the checkpoint lacks is named, be it quantised or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import linear_complete, linear_headers
from kvcompile.integrations.vllm.linear_config import W4A8Config
from tests.integrations.w4a8_checkpoints import DOWN, INTERMEDIATE, QKV, QWEN2, QWEN3, Tensors, described, tensors

Load = Callable[..., torch.nn.Module]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process group that a worker has, of this process alone."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
    with set_current_vllm_config(VllmConfig()):
        parallel_state.ensure_model_parallel_initialized(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(autouse=True)
def unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the headers show is refused before an engine starts; here it is the loader that must see it."""
    monkeypatch.setattr(linear_headers, "refuse_damaged", lambda *_: None)


@pytest.fixture
def load(checkpoint: Callable[..., Path], engine_args: Callable[..., EngineArgs]) -> Load:
    """`load(lacking, **changes)`: the model, as a worker loads it, of a checkpoint without the tensors `lacking`.

    `extra` are tensors that it has besides, or in place of its own.
    """

    def load(
        *lacking: str,
        skipped: tuple[str, ...] = (),
        quantised: bool = True,
        online: bool = False,
        extra: Tensors | None = None,
        **changes: Any,
    ) -> torch.nn.Module:
        changes = {"intermediate_size": INTERMEDIATE, **changes}
        folder = checkpoint(**changes, **({"quantization_config": described(skipped)} if quantised else {}))
        given = tensors(changes, skipped, quantised=quantised)
        for name in lacking:
            del given[name]
        save_file({**given, **(extra or {})}, folder / "model.safetensors")
        fields = {"quantization": "kvcompile_w4a8"} if online else {}
        config = engine_args(model=folder, load_format="auto", **fields).create_engine_config()
        with set_current_vllm_config(config):
            return get_model(vllm_config=config)

    return load


def _refused(load: Load, *lacking: str, **changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(*lacking, **changes)
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert message.startswith("the checkpoint has no tensor ")
    assert message.endswith("; it is incomplete, quantise or copy it anew")
    return message.removeprefix("the checkpoint has no tensor ").partition(";")[0]


ONLINE = {"quantised": False, "online": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"skipped": (*QKV, *DOWN)},
        QWEN2,
        {**QWEN3, "tie_word_embeddings": True},
        ONLINE,
        {**ONLINE, **QWEN2, "tie_word_embeddings": True},
    ],
)
def test_a_complete_checkpoint_loads_and_nothing_stays_wrapped(load, changes):
    model = load(**changes)
    assert "load_weights" not in vars(model)
    assert not any(hasattr(getattr(p, "weight_loader", None), "__wrapped__") for p in model.parameters())


@pytest.mark.parametrize("how", [{}, ONLINE])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model.norm.weight", {}),
        ("model.embed_tokens.weight", {}),
        ("model.embed_tokens.weight", {"tie_word_embeddings": True}),
        ("lm_head.weight", {}),
        ("model.layers.1.post_attention_layernorm.weight", {}),
        ("model.layers.0.self_attn.k_norm.weight", QWEN3),
        ("model.layers.1.self_attn.k_proj.bias", QWEN2),
    ],
)
def test_what_a_checkpoint_lacks_is_named(load, name, changes, how):
    assert _refused(load, name, **changes, **how) == name


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"])
def test_a_linear_that_is_left_as_it_was_is_asked_for_too(load, name):
    assert _refused(load, f"{name}.weight", skipped=(*QKV, *DOWN)) == f"{name}.weight"


def test_the_first_of_many_are_named_in_the_order_of_the_model(load):
    lacking = ["model.norm.weight", "lm_head.weight", *(f"{name}.bias" for name in QKV)]
    assert _refused(load, *lacking, **QWEN2) == (
        "model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.k_proj.bias, "
        "model.layers.0.self_attn.v_proj.bias and 2 more"
    )


W4A8 = "qweight, group_scales, group_zeros, channel_scales"


@pytest.mark.parametrize(
    ("tensor", "changes", "allowed"),
    [
        ("model.layers.1.mlp.down_proj.foo", {}, f"allowed for this layer are {W4A8}"),
        ("model.layers.1.mlp.down_proj.weight", {}, f"allowed for this layer are {W4A8}"),
        ("model.layers.0.self_attn.k_proj.weight", {}, f"allowed for this layer are {W4A8}"),
        ("model.layers.0.self_attn.k_proj.foo", QWEN2, f"allowed for this layer are {W4A8}, bias"),
        ("model.layers.0.self_attn.k_proj.qweight", {"skipped": QKV}, "allowed for this layer are weight"),
        ("model.layers.0.mlp.up_proj.qweight", ONLINE, "allowed for this layer are weight"),
        ("model.layers.0.input_layernorm.foo", {}, "allowed for this layer are weight"),
        ("model.layers.0.mlp.third_proj.weight", {}, "the model has no such layer"),
    ],
)
def test_a_tensor_that_the_model_has_no_place_for_is_named_with_what_is_allowed(load, tensor, changes, allowed):
    with pytest.raises(UsageError) as caught:
        load(extra={tensor: torch.ones(2)}, **changes)
    assert str(caught.value) == (
        f"the checkpoint has a tensor {tensor} that its config.json has no place for; {allowed}; remove the tensor, or "
        "quantise the model anew"
    )


@pytest.mark.parametrize("key", ["rope", "a.rope", "model.weight"])
def test_another_key_that_vllm_does_not_find_is_no_extra_tensor(key):
    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> set[str]:
            for _ in weights:
                raise KeyError(key)

    wrapped = linear_complete.refusing_incomplete(lambda self, model, config: model.load_weights([("x.bias", None)]))
    with pytest.raises(KeyError, match=key):
        wrapped(None, Model(2, 2), SimpleNamespace(quantization="kvcompile_w4a8"))


@pytest.mark.parametrize("rows", [128, 63])
def test_a_bias_with_other_rows_than_the_model_is_refused(load, rows):
    name = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(UsageError) as caught:
        load(extra={name: torch.ones(rows, dtype=torch.bfloat16)}, **QWEN2)
    assert str(caught.value) == (
        f"tensor {name} is torch.bfloat16 [{rows}]; by the checkpoint's config.json it is of a float type [64]; the "
        "two do not belong together, quantise the model anew"
    )


def test_a_failed_load_leaves_nothing_wrapped():
    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> set[str]:
            raise ValueError("damaged")

    model = Model()
    wrapped = linear_complete.refusing_incomplete(lambda self, model, config: model.load_weights(()))
    with pytest.raises(ValueError, match="damaged"):
        wrapped(None, model, SimpleNamespace(quantization="kvcompile_w4a8"))
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_other_models_load_as_without_kvcompile(quantization):
    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> set[str]:
            return set()

    seen: list[Any] = []
    wrapped = linear_complete.refusing_incomplete(lambda *given: seen.extend(given))
    model, config = Model(2, 2), SimpleNamespace(quantization=quantization)
    wrapped("loader", model, config)
    assert seen == ["loader", model, config]


@pytest.mark.parametrize("loader", [DefaultModelLoader, RunaiModelStreamerLoader])
def test_loaders_are_wrapped_as_soon_as_a_layer_is_built(loader, monkeypatch):
    monkeypatch.setattr(loader, "load_weights", inspect.unwrap(loader.load_weights))
    W4A8Config({128: 64}).get_quant_method(torch.nn.Module(), "model.norm")
    assert hasattr(loader.load_weights, "_kvcompile_refuses_incomplete")


@pytest.mark.parametrize("loader", [DefaultModelLoader, RunaiModelStreamerLoader])
def test_loaders_are_wrapped_once(loader):
    linear_complete.install()
    once = loader.load_weights
    linear_complete.install()
    assert loader.load_weights is once
    assert not hasattr(once.__wrapped__, "_kvcompile_refuses_incomplete")


def test_a_model_that_does_not_say_what_it_loaded_is_believed():
    class Model(torch.nn.Linear):
        def load_weights(self, weights: Any) -> None:
            return None

    wrapped = linear_complete.refusing_incomplete(lambda self, model, config: model.load_weights(()))
    wrapped(None, Model(2, 2), SimpleNamespace(quantization="kvcompile_w4a8"))
