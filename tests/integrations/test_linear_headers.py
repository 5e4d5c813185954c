"""A damaged W4A8 checkpoint is one line before an engine is started, from the headers of its files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import linear_values
from kvcompile.ops.w4a8 import W4A8Weight
from tests.integrations.w4a8_checkpoints import DOWN, INTERMEDIATE, QKV, QWEN2, QWEN3, Tensors, described, tensors

INDEX = "model.safetensors.index.json"
ANEW = "it is incomplete, quantise or copy it anew"
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """`folder(change, files, quantised, skipped, **changes of config.json)`: a checkpoint in so many files."""

    def make(
        change: Callable[[Tensors], Any] = lambda given: None,
        *,
        files: int = 1,
        index: bool = True,
        quantised: bool = True,
        skipped: tuple[str, ...] = (),
        **changes: Any,
    ) -> Path:
        changes = {"intermediate_size": INTERMEDIATE, **changes}
        path = checkpoint(**changes, **({"quantization_config": described(skipped)} if quantised else {}))
        given = tensors(changes, skipped, quantised=quantised)
        change(given)
        names = sorted(given)
        where = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(names)}
        for file in set(where.values()):
            save_file({name: given[name].contiguous() for name in names if where[name] == file}, path / file)
        if index and files > 1:
            (path / INDEX).write_text(json.dumps({"weight_map": where}))
        return path

    return make


@pytest.fixture(params=[True, False], ids=["preset", "stock"])
def refused(request, refusal, engine_args) -> Callable[..., str]:
    """`refused(**fields)`: the one line, with the preset asked for and without it."""

    def without_preset(**fields: Any) -> str:
        with pytest.raises(UsageError) as caught:
            engine_args(**fields).create_engine_config()
        assert str(caught.value).splitlines() == [str(caught.value)]
        return str(caught.value)

    ask = refusal if request.param else without_preset
    return lambda **fields: ask(load_format="auto", **fields)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"files": 3},
        {"files": 3, "index": False},
        {"tie_word_embeddings": True},
        {"skipped": (*QKV, *DOWN)},
        QWEN2,
        {**QWEN3, "tie_word_embeddings": True},
        {"quantised": False},
        {"quantised": False, "files": 2, **QWEN2},
    ],
    ids=str,
)
def test_whole_checkpoints_are_served(build, folder, how):
    fields = {} if how.get("quantised", True) else {"quantization": "kvcompile_w4a8"}
    config = build(model=folder(**how), load_format="auto", **fields)
    assert config.model_config.quantization == "kvcompile_w4a8"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((f"{UP}.{field}", {}) for field in W4A8Weight._fields),
        ("model.norm.weight", {"files": 3}),
        ("model.embed_tokens.weight", {"tie_word_embeddings": True}),
        ("lm_head.weight", {}),
        (f"{DOWN[1]}.weight", {"skipped": DOWN}),
        ("model.layers.1.self_attn.k_proj.bias", QWEN2),
        ("model.layers.0.self_attn.k_norm.weight", QWEN3),
        (f"{UP}.weight", {"quantised": False}),
    ],
)
def test_a_missing_tensor_is_named(refused, folder, name, how):
    model = folder(lambda given: given.pop(name), **how)
    fields = {} if how.get("quantised", True) else {"quantization": "kvcompile_w4a8"}
    assert refused(model=model, **fields) == f"the checkpoint has no tensor {name}; {ANEW}"


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda given: given.update({name: change(given[name])})


@pytest.mark.parametrize(
    ("name", "change", "found", "wanted"),
    [
        (f"{UP}.qweight", lambda t: t[:, :32], "torch.uint8 [192, 32]", "torch.uint8 [192, 64]"),
        (f"{UP}.qweight", lambda t: t.view(torch.int8), "torch.int8 [192, 64]", "torch.uint8 [192, 64]"),
        (f"{UP}.group_scales", lambda t: t[:, :1], "torch.uint8 [192, 1]", "torch.uint8 [192, 2]"),
        (f"{UP}.group_zeros", lambda t: t[:100], "torch.uint8 [100, 2]", "torch.uint8 [192, 2]"),
        (f"{UP}.channel_scales", lambda t: t.half(), "torch.float16 [192]", "torch.float32 [192]"),
        (f"{UP}.channel_scales", lambda t: t[:, None], "torch.float32 [192, 1]", "torch.float32 [192]"),
        ("model.norm.weight", lambda t: t[:64], "torch.bfloat16 [64]", "of a float type [128]"),
        ("lm_head.weight", lambda t: t.double(), "torch.float64 [512, 128]", "of a float type [512, 128]"),
        ("model.embed_tokens.weight", lambda t: t[1:], "torch.bfloat16 [511, 128]", "of a float type [512, 128]"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named_with_both(refused, folder, name, change, found, wanted):
    assert refused(model=folder(_changed(name, change))) == (
        f"tensor {name} is {found}; by the checkpoint's config.json it is {wanted}; the two do not belong together, "
        "quantise the model anew"
    )


def _with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[7] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("group_scales", 0, "1 to 255"),
        ("group_zeros", 16, "0 to 15"),
        ("group_zeros", 255, "0 to 15"),
        ("channel_scales", float("nan"), "finite numbers above 0"),
        ("channel_scales", float("inf"), "finite numbers above 0"),
        ("channel_scales", 0.0, "finite numbers above 0"),
        ("channel_scales", -0.5, "finite numbers above 0"),
    ],
)
def test_a_scale_or_zero_point_that_cannot_be_is_named(refused, folder, field, value, allowed):
    assert refused(model=folder(_changed(f"{UP}.{field}", _with(value)), files=3)) == (
        f"tensor {UP}.{field} holds {value:g} in row 7; allowed are {allowed}; the checkpoint is damaged, quantise or "
        "copy it anew"
    )


def test_the_codes_are_not_read(build, folder, monkeypatch):
    read = []

    class Watched:
        def __init__(self, *args: Any) -> None:
            self._file = safe_open(*args)

        def __enter__(self) -> Watched:
            self._handle = self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self._file.__exit__(*args)

        def keys(self) -> list[str]:
            return self._handle.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name.rpartition(".")[2])
            return self._handle.get_tensor(name)

    monkeypatch.setattr(linear_values, "safe_open", Watched)
    build(model=folder(), load_format="auto")
    assert set(read) == {"group_scales", "group_zeros", "channel_scales"}
    assert len(read) == 3 * 2 * 7


@pytest.mark.parametrize("name", [f"{UP}.weight", "model.layers.2.mlp.up_proj.qweight", f"{UP}.bias", "rotation"])
def test_a_tensor_without_a_place_is_named(refused, folder, name):
    model = folder(lambda given: given.update({name: torch.ones(4)}))
    assert refused(model=model) == (
        f"the checkpoint has a tensor {name} that its config.json has no place for; remove the tensor, or quantise the "
        "model anew"
    )


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale"])
def test_what_vllm_leaves_out_by_itself_may_be_there(build, folder, name):
    build(model=folder(lambda given: given.update({name: torch.ones(4)})), load_format="auto")


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(refused, folder, index):
    model = folder(files=3, index=index)
    (model / "model-00002-of-00003.safetensors").unlink()
    assert refused(model=model) == f"model {model}: file model-00002-of-00003.safetensors is missing; {ANEW}"


def test_a_folder_without_weights_is_refused(refused, checkpoint):
    model = checkpoint(quantization_config=described(), intermediate_size=INTERMEDIATE)
    assert refused(model=model) == f"model {model}: the folder has no safetensors file; {ANEW}"


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_a_file_that_was_cut_off_is_named(refused, folder, keep):
    model = folder()
    file = next(model.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:keep])
    line = refused(model=model)
    assert line.startswith(f"model {model}: {file.name} cannot be read as safetensors (")
    assert line.endswith("); quantise or copy it anew")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": []}}'])
def test_an_index_that_is_none_is_named(refused, folder, text):
    model = folder(files=2)
    (model / INDEX).write_text(text)
    assert refused(model=model) == f"model {model}: {INDEX} has no weight_map that can be read; {ANEW}"


def test_weights_that_are_made_up_are_not_judged(build, checkpoint):
    build(model=checkpoint(quantization_config=described(), intermediate_size=INTERMEDIATE), load_format="dummy")


def test_nor_are_those_of_other_models(build, folder):
    build(model=folder(lambda given: given.pop("model.norm.weight"), quantised=False), load_format="auto")


def test_weights_of_another_kind_are_left_to_vllm(build, checkpoint):
    build(model=checkpoint(), load_format="auto", quantization="kvcompile_w4a8")
