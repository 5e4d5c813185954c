"""The int8 head of a W4A8 model: its values, which heads get it, and what it holds once it is loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_processing, record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload
from vllm.platforms.cpu import CpuPlatform

from kvcompile.config import UsageError
from kvcompile.integrations.vllm import lm_head, lm_head_choice
from kvcompile.integrations.vllm.linear_config import W4A8Config
from kvcompile.integrations.vllm.lm_head import Int8HeadMethod
from tests.integrations.head_values import ROUNDING, assert_product, head_weight
from tests.integrations.w4a8_checkpoints import QUANTISED
from tests.integrations.w4a8_layers import LargestFloats, finish, inputs, rank

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN, VOCABULARY = 192, 300  # vLLM pads the rows to 320


@contextmanager
def _rank(number: int, ranks: int, config: VllmConfig | None = None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, rank(number, ranks, config):
        patch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_rank", lambda: number)
        patch.setattr(vocab_parallel_embedding, "get_tensor_model_parallel_world_size", lambda: ranks)
        yield


def _head(
    weight: torch.Tensor, number: int = 0, ranks: int = 1, config: W4A8Config | None = None, **fields: Any
) -> ParallelLMHead:
    """The head as one rank has it when its weight has been loaded, not yet processed."""
    with _rank(number, ranks, **fields):
        head = ParallelLMHead(
            *weight.shape, params_dtype=weight.dtype, quant_config=config or W4A8Config({192: 64}), prefix="lm_head"
        )
        head.weight.weight_loader(head.weight, weight)
    return head


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 3e-6])
def test_a_weight_is_off_by_half_a_scale_at_most(dtype, size):
    weight = (head_weight(500, 96, torch.float32) * size).to(dtype)
    codes, scales = lm_head.quantise_rows(weight)
    assert codes.dtype == torch.int8 and scales.dtype == dtype and codes.abs().max() <= 127
    off = (weight.double() - codes.double() * scales.double()[:, None]).abs()
    assert (off <= scales.double()[:, None] * (0.5 + 1e-6)).all()


def test_the_largest_weight_of_a_row_is_its_largest_code():
    for dtype in DTYPES:
        codes, _ = lm_head.quantise_rows(head_weight(500, 96, dtype))
        assert (codes.abs().amax(1) == 127).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_and_of_the_smallest_numbers_are_kept(dtype):
    weight = torch.zeros(4, 64, dtype=dtype)
    weight[1, 3] = torch.finfo(torch.float16).smallest_normal / 512
    weight[2, 5] = torch.finfo(dtype).max
    codes, scales = lm_head.quantise_rows(weight)
    assert scales.isfinite().all() and (scales > 0).all() and (scales[[0, 3]] == 1).all()
    assert not codes[[0, 3]].any()
    off = (weight.double() - codes.double() * scales.double()[:, None]).abs().amax(1)
    assert (off <= scales.double() / 2).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize(("rows", "columns"), [(320, 192), (1100, 64), (49, 72)])
def test_a_product_is_that_of_codes_and_scales_rounded_once(dtype, tokens, rows, columns):
    codes, scales = lm_head.quantise_rows(head_weight(rows, columns, dtype))
    x = inputs(tokens, columns, dtype)
    assert_product(lm_head.product(x, codes, scales), x, codes, scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_those_of_the_weight_within_half_a_scale_of_each(dtype):
    weight = head_weight(VOCABULARY, HIDDEN, dtype)
    head = finish(_head(weight))
    x = inputs(5, HIDDEN, dtype)
    with _rank(0, 1):
        processor = LogitsProcessor(VOCABULARY)
    processor._gather_logits = lambda y: y  # of one rank
    logits = processor(head, x)
    assert logits.shape == (5, VOCABULARY)
    exact = x.double() @ weight.double().t()
    bound = x.double().abs().sum(1, keepdim=True) * head.scales[:VOCABULARY].double() / 2
    assert ((logits.double() - exact).abs() <= bound + ROUNDING[dtype] * exact.abs() + 1e-4).all()
    assert ((logits.double() - exact).abs() > ROUNDING[dtype] * exact.abs()).any()  # it is not the weight itself
    assert not head.quant_method.apply(head, x)[:, VOCABULARY:].any()  # rows that vLLM pads with


def test_a_bias_is_added_and_three_dimensions_are_all_their_tokens():
    head = finish(_head(head_weight(VOCABULARY, HIDDEN, torch.bfloat16)))
    x, bias = inputs(6, HIDDEN), torch.linspace(-3, 3, 320).bfloat16()
    y = head.quant_method.apply(head, x)
    assert torch.equal(head.quant_method.apply(head, x, bias=bias), y + bias)
    assert torch.equal(head.quant_method.apply(head, x.view(2, 3, HIDDEN)), y.view(2, 3, 320))
    assert head.quant_method.apply(head, x[:0]).shape == (0, 320)


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_have_the_cut_of_the_whole(ranks):
    weight, x = head_weight(VOCABULARY, HIDDEN, torch.bfloat16), inputs(5, HIDDEN)
    whole = finish(_head(weight))
    parts = [finish(_head(weight, number, ranks)) for number in range(ranks)]
    for name in ("codes", "scales"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    logits = torch.cat([part.quant_method.apply(part, x) for part in parts], dim=1)
    assert torch.equal(logits, whole.quant_method.apply(whole, x))


# --- which heads ----------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(engine_args):
    """`chosen(**fields)`: the method of a head of the model that these fields of EngineArgs describe."""

    def method(**fields: Any) -> object:
        config = engine_args(**fields).create_engine_config()
        with _rank(0, 1, config):
            return ParallelLMHead(512, 128, quant_config=config.quant_config, prefix="lm_head").quant_method

    return method


ASKED = {"compilation_config": "kvcompile"}
UNLISTED = {**QUANTISED, "modules_to_not_convert": []}


@pytest.mark.parametrize("fields", [{}, ASKED], ids=["alone", "preset"])
def test_the_head_of_a_checkpoint_and_of_one_quantised_while_loading_is_int8(chosen, checkpoint, fields):
    assert isinstance(chosen(model=checkpoint(quantization_config=UNLISTED), **fields), Int8HeadMethod)
    assert isinstance(chosen(quantization="kvcompile_w4a8", **fields), Int8HeadMethod)


def test_a_head_stays_as_it_is_where_the_option_or_the_checkpoint_says_so_and_where_it_is_tied(chosen, checkpoint):
    off = {**ASKED, "additional_config": {"kvcompile": {"linear.lm_head_int8": "never"}}}
    tied = checkpoint(tie_word_embeddings=True, quantization_config=UNLISTED)
    for fields in (
        {"quantization": "kvcompile_w4a8", **off},
        {"model": checkpoint(quantization_config=QUANTISED)},  # names lm_head
        {"model": tied},
        {"model": tied, **ASKED},
    ):
        assert type(chosen(**fields)) is UnquantizedEmbeddingMethod


def test_a_tied_head_is_the_embedding_itself(engine_args, checkpoint):
    model = checkpoint(tie_word_embeddings=True, quantization_config=UNLISTED)
    config = engine_args(model=model).create_engine_config()
    with _rank(0, 1, config):
        embedding = VocabParallelEmbedding(512, 128, quant_config=config.quant_config, prefix="model.embed_tokens")
        head = ParallelLMHead(512, 128, quant_config=config.quant_config, prefix="lm_head").tie_weights(embedding)
        embedding.weight.weight_loader(embedding.weight, head_weight(512, 128, torch.bfloat16))
    finish(head)
    assert head.weight is embedding.weight
    assert type(embedding.quant_method) is UnquantizedEmbeddingMethod


HEADS = {
    "int8": ({}, ", lm_head int8)"),
    "option": (
        {"additional_config": {"kvcompile": {"linear.lm_head_int8": "never"}}},
        ", lm_head as it is: linear.lm_head_int8=never)",
    ),
}


@pytest.mark.parametrize(("fields", "said"), HEADS.values(), ids=HEADS)
def test_the_line_at_the_start_says_what_the_head_is(build, startup_lines, fields, said):
    build(quantization="kvcompile_w4a8", **fields)
    assert f"linear (W4A8, quantised while loading, torch CPU operators{said}" in startup_lines[0]


def test_the_line_at_the_start_says_why_a_head_stays(build, checkpoint, startup_lines):
    build(model=checkpoint(quantization_config=QUANTISED))
    build(model=checkpoint(quantization_config=UNLISTED, tie_word_embeddings=True))
    assert "torch CPU operators, lm_head as it is: modules_to_not_convert has it)" in startup_lines[0]
    assert "torch CPU operators, lm_head as it is: tied to the embedding)" in startup_lines[1]


def test_of_a_model_that_is_not_known_nothing_is_said():
    config = SimpleNamespace(model_config=SimpleNamespace(architecture="MambaForCausalLM"))
    assert lm_head_choice.said(config) == ""


def test_on_a_gpu_what_marlin_cannot_do_leaves_the_head_as_it_is(monkeypatch):
    cuda = {"is_cpu": False, "is_cuda": True}
    for name, value in cuda.items():
        monkeypatch.setattr(CpuPlatform, name, lambda self, value=value: value)
    config, quantisation = VllmConfig.__new__(VllmConfig), W4A8Config()
    config.model_config, config.additional_config = None, {}
    config.scheduler_config = SimpleNamespace(max_num_seqs=64)
    assert lm_head_choice.why_not(config, quantisation, 4096) == "this vLLM has no Marlin kernel"
    monkeypatch.setattr(torch.ops._C, "marlin_gemm", None, raising=False)
    assert lm_head_choice.why_not(config, quantisation, 4096) is None
    assert lm_head_choice.why_not(config, quantisation, 576) == (
        "hidden size 576, of which Marlin takes multiples of 128"
    )
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT is set" in lm_head_choice.why_not(config, quantisation, 4096)


def test_on_a_gpu_that_serves_many_requests_at_once_the_head_is_int8_only_if_always_is_said(monkeypatch):
    for name, value in {"is_cpu": False, "is_cuda": True}.items():
        monkeypatch.setattr(CpuPlatform, name, lambda self, value=value: value)
    monkeypatch.setattr(torch.ops._C, "marlin_gemm", None, raising=False)
    config, quantisation = VllmConfig.__new__(VllmConfig), W4A8Config()
    config.model_config, config.additional_config = None, {}
    config.scheduler_config = SimpleNamespace(max_num_seqs=65)
    why = "--max-num-seqs is 65, and int8 is slower for more than 64 rows"
    assert lm_head_choice.why_not(config, quantisation, 4096) == why
    monkeypatch.setattr(lm_head_choice, "is_active", lambda config: True)
    for asked, expected in {"auto": why, "always": None, "never": "linear.lm_head_int8=never"}.items():
        config.additional_config = {"kvcompile": {"linear": {"lm_head_int8": asked}}}
        assert lm_head_choice.why_not(config, quantisation, 4096) == expected
    config.additional_config = {"kvcompile": {"linear": {"lm_head_int8": "always"}}}
    with pytest.raises(UsageError, match="always, which cannot be: hidden size 576, .*; set auto or never"):
        lm_head_choice.why_not(config, quantisation, 576)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_after_loading_the_head_holds_its_codes_and_scales_alone():
    head = finish(_head(head_weight(VOCABULARY, HIDDEN, torch.bfloat16)))
    held = {name: (p.dtype, tuple(p.shape)) for name, p in head.named_parameters()}
    assert held == {"codes": (torch.int8, (320, HIDDEN)), "scales": (torch.bfloat16, (320,))}
    assert [value for value in vars(head).values() if isinstance(value, torch.Tensor)] == []
    before = dict(head.named_parameters())
    finish(head)  # vLLM calls it once more
    assert all(before[name] is p for name, p in head.named_parameters())


def test_a_large_head_is_quantised_in_pieces_with_the_same_result(monkeypatch):
    weight = head_weight(VOCABULARY, HIDDEN, torch.bfloat16)
    whole = finish(_head(weight))
    monkeypatch.setattr(lm_head, "_ELEMENTS_AT_ONCE", 64 * HIDDEN)

    head = _head(weight)
    with LargestFloats() as largest:
        finish(head)
    assert 0 < largest.seen <= 64 * HIDDEN
    assert torch.equal(head.codes, whole.codes) and torch.equal(head.scales, whole.scales)


def test_a_weight_that_is_not_finite_is_refused_with_the_row():
    weight = head_weight(VOCABULARY, HIDDEN, torch.bfloat16)
    weight[7, 9] = torch.inf
    with pytest.raises(UsageError) as caught:
        finish(_head(weight))
    assert str(caught.value) == (
        "layer lm_head: weight is not finite in row 7 of this rank; the checkpoint is damaged, make it anew"
    )


def test_a_reload_puts_another_head_into_the_same_memory():
    first, second = (head_weight(VOCABULARY, HIDDEN, torch.bfloat16, seed) for seed in (3, 4))
    with _rank(0, 1):
        head = ParallelLMHead(VOCABULARY, HIDDEN, params_dtype=first.dtype, quant_config=W4A8Config(), prefix="lm_head")
        record_metadata_for_reloading(head)
        head.weight.weight_loader(head.weight, first)
        before = {name: p.data_ptr() for name, p in finish(head).named_parameters()}
        initialize_layerwise_reload(head)
        head.weight.weight_loader(head.weight, second)
        finalize_layerwise_processing(head, ModelConfig.__new__(ModelConfig))
    other = finish(_head(second))
    assert {name: p.data_ptr() for name, p in head.named_parameters()} == before
    assert all(torch.equal(getattr(head, name), p) for name, p in other.named_parameters())


def test_a_deleted_head_is_freed_although_vllm_remembers_how_to_reload_it():
    head = _head(head_weight(VOCABULARY, HIDDEN, torch.bfloat16))
    record_metadata_for_reloading(head)
    gone = weakref.ref(finish(head))
    del head
    gc.collect()
    assert gone() is None
