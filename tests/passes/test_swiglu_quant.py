"""SwiGLU and quantiser become one operator where they fit, in each of its forms, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import vllm._C  # noqa: F401  vLLM's own kernels
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.nn.functional import silu
from vllm.model_executor.layers.activation import SiluAndMul

from kvcompile.config import KVCompileConfig, resolve, to_dict
from kvcompile.ops.act_quant import quant_per_token as quant
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult
from kvcompile.passes.swiglu_quant import SwigluQuant
from tests.passes.graphs import DTYPES, assert_one_step, assert_sound, operators, random, trace

native = SiluAndMul.forward_native
to_dtype = torch.ops.prims.convert_element_type


def kernel(x: torch.Tensor) -> torch.Tensor:
    """vLLM's own kernel, as it stands in a graph."""
    out = torch.empty_like(x[..., : x.shape[-1] // 2])
    return auto_functionalized(torch.ops._C.silu_and_mul.default, out=out, input=x)[1]


def fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What this pass puts in."""
    return torch.ops.kvcompile.silu_mul_quant(x)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def with_sigmoid(x: torch.Tensor) -> torch.Tensor:
    gate, up = halves(x)
    if x.dtype == torch.float32:
        return torch.sigmoid(gate) * gate * up
    gate = to_dtype(gate, torch.float32)
    return to_dtype(torch.sigmoid(gate) * gate, x.dtype) * up


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vLLM's native forward": native,
    "vLLM's kernel": kernel,
    "up first": lambda x: halves(x)[1] * silu(halves(x)[0]),
    "chunks": lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "split by sizes": lambda x: silu(x.split([x.shape[1] // 2] * 2, 1)[0]) * x.split([x.shape[1] // 2] * 2, 1)[1],
    "sigmoid": with_sigmoid,
    "views that keep the rows": lambda x: (silu(halves(x)[0].clone()) * halves(x)[1].reshape(-1, x.shape[1] // 2)).view(
        -1, x.shape[1] // 2
    ),
}


def _fused(module: torch.fx.GraphModule) -> PassResult:
    result = SwigluQuant()(module.graph)
    module.recompile()
    return result


def test_inductor_takes_silu_apart_in_fp32_with_a_cast_there_and_back():
    wide, narrow = (trace(lambda x: quant(native(x)), random(5, 64, dtype=t)) for t in (torch.float32, torch.bfloat16))
    silu_only = ["neg", "exp", "add", "div"]
    assert operators(wide) == ["slice", *silu_only, "slice", "mul", "quant_per_token"]
    cast = "convert_element_type"
    assert operators(narrow) == ["slice", cast, *silu_only, cast, "slice", "mul", "quant_per_token"]


FORMS_AND_DTYPES = [
    pytest.param(form, dtype, id=f"{form}, {dtype}")
    for form in FORMS
    for dtype in DTYPES
    if form != "vLLM's kernel" or dtype == torch.float32  # on a CPU it rounds otherwise
]


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_swiglu_and_its_quantiser_become_one_operator_that_computes_the_same(form, dtype):
    module = trace(lambda x: quant(FORMS[form](x)), random(5, 640, dtype=dtype))
    unfused = copy.deepcopy(module)
    assert _fused(module) == PassResult("swiglu_quant", 1, 1)
    assert operators(module) == ["silu_mul_quant"]
    for tokens in (1, 2, 300):
        x = random(tokens, 640, dtype=dtype, seed=tokens) * 3
        assert_one_step(module(x), unfused(x))
    assert_sound(module, random(3, 640, dtype=dtype))


@pytest.mark.parametrize("channels", [2, 6, 200])
def test_any_number_of_channels_that_has_a_half_is_fused(channels):
    module = trace(lambda x: quant(native(x)), random(5, channels, dtype=torch.bfloat16))
    assert _fused(module) == PassResult("swiglu_quant", 1, 1)
    x = random(9, channels, dtype=torch.bfloat16, seed=4)
    gate, up = x.double().chunk(2, -1)
    scale = (gate / (1 + torch.exp(-gate)) * up).abs().amax(-1) / 127
    torch.testing.assert_close(module(x)[1].double(), scale, rtol=2**-7, atol=1e-18)


def test_silu_as_one_operator_is_fused_too():
    x = random(5, 64, dtype=torch.bfloat16)
    module = trace(lambda x: quant(native(x)), x)
    graph = module.graph
    (activated,) = (n for n in graph.nodes if n.target is to_dtype.default and n.meta["val"].dtype == torch.bfloat16)
    gate = next(n for n in graph.nodes if n.target is torch.ops.aten.slice.Tensor)
    with graph.inserting_before(activated):
        whole = graph.call_function(torch.ops.aten.silu.default, (gate,))
    whole.meta["val"] = activated.meta["val"]
    activated.replace_all_uses_with(whole)
    graph.eliminate_dead_code()
    assert operators(module) == ["slice", "silu", "slice", "mul", "quant_per_token"]
    unfused = copy.deepcopy(module)
    assert _fused(module) == PassResult("swiglu_quant", 1, 1)
    assert_one_step(module(x), unfused(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_graphs_for_a_gpu_are_fused_in_every_form(form, dtype):
    module = trace(lambda x: quant(FORMS[form](x)), random(5, 64, dtype=dtype), device="cuda")
    assert _fused(module) == PassResult("swiglu_quant", 1, 1)
    assert operators(module) == ["silu_mul_quant"]
    (x_q, x_scale) = module.graph.output_node().args[0]
    assert (x_q.meta["val"].dtype, x_scale.meta["val"].dtype) == (torch.int8, torch.float32)
    assert x_q.meta["val"].device.type == x_scale.meta["val"].device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vllms_kernel_for_cpus_rounds_otherwise_and_is_left_alone(dtype):
    x = random(300, 640, dtype=dtype)
    gate, up = halves(x)
    module = trace(kernel, x)
    assert not torch.equal(module(x), silu(gate) * up)
    assert torch.equal(module(x), (silu(gate.float()) * up.float()).to(dtype))
    result = _untouched(lambda x: quant(kernel(x)), x)
    assert (result.matched, result.candidates) == (0, 1)
    assert "on a CPU _C::silu_and_mul does not round silu(gate) before the product" in result.refused[0]


@pytest.mark.parametrize("form", FORMS)
def test_running_the_pass_again_changes_nothing(form):
    module = trace(lambda x: quant(FORMS[form](x)), random(5, 64, dtype=torch.float32))
    _fused(module)
    before = str(module.graph)
    assert _fused(module) == PassResult("swiglu_quant", 0, 0)
    assert str(module.graph) == before


def test_several_quantisers_share_one_operator():
    def function(x):
        y = native(x)
        return *quant(y), *quant(y.reshape(-1, 32))

    x = random(5, 64, dtype=torch.bfloat16)
    module = trace(function, x)
    unfused = copy.deepcopy(module)
    assert _fused(module) == PassResult("swiglu_quant", 2, 2)
    assert operators(module) == ["silu_mul_quant"]
    assert_one_step(module(x), unfused(x))
    assert_sound(module, x)


@pytest.mark.parametrize("form", ["vLLM's native forward", "vLLM's kernel"])
def test_rows_in_three_dimensions_are_flattened_for_the_operator(form):
    module = trace(lambda x: quant(FORMS[form](x).reshape(-1, 32)), random(3, 5, 64, dtype=torch.float32))
    unfused = copy.deepcopy(module)
    assert _fused(module) == PassResult("swiglu_quant", 1, 1)
    assert operators(module) == ["reshape" if "reshape" in operators(module) else "view", "silu_mul_quant"]
    x = random(7, 5, 64, dtype=torch.float32)
    assert_one_step(module(x), unfused(x))
    assert_sound(module, x)


def test_gate_up_and_its_halves_stay_for_whoever_else_reads_them():
    def function(x):
        gate, up = halves(x)
        return *quant(silu(gate) * up), gate + 1, up + 2, x + 3

    x = random(5, 64, dtype=torch.bfloat16)
    module = trace(function, x)
    unfused = copy.deepcopy(module)
    assert _fused(module) == PassResult("swiglu_quant", 1, 1)
    assert_one_step(module(x), unfused(x))
    assert_sound(module, x)


def _untouched(function: Callable[..., object], *inputs: torch.Tensor) -> PassResult:
    """The result of a pass that must leave the graph of `function` as it is."""
    module = trace(function, *inputs)
    before = str(module.graph)
    result = SwigluQuant()(module.graph)
    assert str(module.graph) == before
    return result


X, OTHER = random(5, 64, dtype=torch.bfloat16), random(5, 64, dtype=torch.bfloat16, seed=1)


def test_a_product_that_is_read_otherwise_too_stays_and_is_no_candidate():
    def function(x):
        y = native(x)
        return *quant(y), y + 1

    why = "quant_per_token: what it quantises is read by others too"
    assert _untouched(function, X) == PassResult("swiglu_quant", 0, 0, (why,))


MISFITS = {
    "up and gate swapped": (
        lambda x, _: quant(silu(x[..., 32:]) * x[..., :32]),
        "gate is the second half and up the first",
    ),
    "of two tensors": (
        lambda x, other: quant(silu(x[..., :32]) * other[..., 32:]),
        "gate and up are parts of two tensors, x_1 and other_1",
    ),
    "one half twice": (
        lambda x, _: quant(silu(x[..., :32]) * x[..., :32]),
        "gate and up are channels 0:32 and 0:32 of 64, not its halves",
    ),
    "no halves": (
        lambda x, _: quant(silu(x[..., :16]) * x[..., 48:]),
        "gate and up are channels 0:16 and 48:64 of 64, not its halves",
    ),
    "overlapping": (
        lambda x, _: quant(silu(x[..., :40]) * x[..., 24:]),
        "gate and up are channels 0:40 and 24:64 of 64, not its halves",
    ),
    "every other channel": (
        lambda x, _: quant(silu(x[..., ::2]) * x[..., 1::2]),
        "slice_1 is no slice of another tensor's channels",
    ),
    "halves of the tokens": (
        lambda x, _: quant(silu(x.view(2, -1, 64)[0]) * x.view(2, -1, 64)[1]),
        "is no slice of another tensor's channels",
    ),
    "two whole tensors": (
        lambda x, other: quant(silu(x) * other),
        "x_1 is no slice of another tensor's channels",
    ),
    "product in fp32": (
        lambda x, _: quant((silu(halves(x)[0].float()) * halves(x)[1].float()).to(x.dtype)),
        "exp is an exponential function in no form of SwiGLU that this pass knows",
    ),
    "silu in bf16": (
        lambda x, _: quant(halves(x)[0] / (1 + torch.exp(-halves(x)[0])) * halves(x)[1]),
        "silu is computed in torch.bfloat16 instead of fp32",
    ),
    "clamped": (
        lambda x, _: quant(silu(halves(x)[0].clamp(max=1)) * halves(x)[1].clamp(min=-1)),
        "is no slice of another tensor's channels",
    ),
    "beta": (
        lambda x, _: quant(halves(x)[0] / (1 + torch.exp(-2 * halves(x)[0].float())).to(x.dtype) * halves(x)[1]),
        "exp is an exponential function in no form of SwiGLU that this pass knows",
    ),
    "reshaped": (
        lambda x, _: quant(native(x).reshape(-1, 16)),
        "a reshape changes the rows before they are quantised",
    ),
}


@pytest.mark.parametrize(("function", "why"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_a_candidate_left_alone_with_a_reason(function, why):
    tokens = random(6, 64, dtype=torch.bfloat16), random(6, 64, dtype=torch.bfloat16, seed=1)
    result = _untouched(function, *tokens)
    assert (result.matched, result.candidates) == (0, 1)
    assert len(result.refused) == 1 and why in result.refused[0]
    assert result.refused[0].startswith("quant_per_token: ")


def test_another_kernel_of_that_family_is_a_candidate_left_alone_with_its_name():
    with torch.library._scoped_library("of_a_test", "FRAGMENT") as library:
        library.define("silu_and_mul_with_clamp(Tensor x) -> Tensor")
        half = lambda x: x.new_empty((x.shape[0], x.shape[1] // 2))  # noqa: E731
        torch.library.register_fake("of_a_test::silu_and_mul_with_clamp", half, lib=library)
        result = _untouched(lambda x: quant(torch.ops.of_a_test.silu_and_mul_with_clamp(x)), X)
    assert (result.matched, result.candidates) == (0, 1)
    assert "of_a_test::silu_and_mul_with_clamp, is in no form of SwiGLU that this pass knows" in result.refused[0]


NO_CANDIDATES = {
    "behind a product": lambda x, other: quant(x @ other.t()),
    "behind an input": lambda x, other: quant(x.view(-1, 64)),
    "behind gated attention": lambda x, other: quant(x * torch.sigmoid(other)),
    "behind a linear behind SwiGLU": lambda x, other: quant(native(x) @ other[..., :32].t()),
    "behind what is fused already": lambda x, other: quant(fused(x)[0].float() * fused(x)[1][:, None]),
    "behind a norm": lambda x, other: quant(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)),
}


@pytest.mark.parametrize("function", NO_CANDIDATES.values(), ids=NO_CANDIDATES)
def test_a_quantiser_behind_anything_else_is_no_candidate(function):
    assert _untouched(function, X, OTHER) == PassResult("swiglu_quant", 0, 0)


def test_strict_stops_at_a_swiglu_that_no_longer_fits_and_says_why():
    graph = trace(MISFITS["up and gate swapped"][0], X, OTHER).graph
    strict = PassPipeline({**to_dict(KVCompileConfig()), "strict": True})
    with pytest.raises(PassError, match=r"swiglu_quant matched none of 1 .*\(quant_per_token: gate is the second half"):
        strict(graph)


def test_switched_off_the_graph_stays_unfused():
    off = PassPipeline(to_dict(resolve(overrides={"passes.swiglu_quant": False}, environ={}).config))
    module = trace(lambda x: quant(native(x)), X)
    before = str(module.graph)
    assert off(module.graph) == [PassResult(name, 0, 0) for name in ("norm_quant", "rotary", "attention_swap")]
    assert str(module.graph) == before
