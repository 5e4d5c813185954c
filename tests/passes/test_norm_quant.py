"""RMSNorm and quantiser become one operator where they fit, and only there; what they compute stays."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import vllm._C  # vLLM's own kernels
import vllm.distributed.parallel_state  # noqa: F401  vLLM's collectives
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from vllm.ir.ops import fused_add_rms_norm, rms_norm

from kvcompile.config import KVCompileConfig, resolve, to_dict
from kvcompile.ops.act_quant import quant_per_token as quant
from kvcompile.passes.norm_quant import NormQuant
from kvcompile.passes.pipeline import PassError, PassPipeline, PassResult
from tests.passes.graphs import DTYPES, assert_one_step, assert_sound, operators, trace
from tests.passes.norm_graphs import R, W, X, fused, norm_inputs, untouched


def _norm(epsilon: float = 1e-5, **further):
    return lambda x, residual, weight: quant(rms_norm(x, weight, epsilon, **further))


def _add_norm(epsilon: float = 1e-5, **further):
    def function(x, residual, weight):
        y, new_residual = fused_add_rms_norm(x, residual, weight, epsilon, **further)
        return *quant(y), new_residual

    return function


FORMS = {
    "rms_norm": (_norm, ["rms_norm", "quant_per_token"], ["rms_norm_quant"]),
    "fused_add_rms_norm": (_add_norm, ["fused_add_rms_norm", "quant_per_token"], ["fused_add_rms_norm_quant"]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "epsilon"), [(64, 1e-5), (100, 1e-6), (576, 9.999999747378752e-06), (64, 0.25)])
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_and_its_quantiser_become_one_operator_that_computes_the_same(form, channels, epsilon, dtype):
    function, before, after = FORMS[form]
    module = trace(function(epsilon), *norm_inputs(5, channels, dtype))
    assert operators(module) == before
    unfused = copy.deepcopy(module)
    assert fused(module) == PassResult("norm_quant", 1, 1)
    assert operators(module) == after
    for tokens in (1, 2, 300):
        inputs = norm_inputs(tokens, channels, dtype)
        ours, theirs = module(*inputs), unfused(*inputs)
        assert_one_step(ours, theirs)
        # The same steps in the same order, all of them torch's: on a CPU not a bit moves, in the residual neither.
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert_sound(module, *norm_inputs(3, channels, dtype))


@pytest.mark.parametrize("form", FORMS)
def test_epsilon_and_weight_are_those_of_the_graph(form):
    function = FORMS[form][0]
    inputs = norm_inputs(4, 64, torch.float32)
    small, large = (trace(function(epsilon), *inputs) for epsilon in (1e-5, 3.0))
    for module in (small, large):
        fused(module)
    # 1 / sqrt(variance + epsilon), by hand.
    total = inputs[0] + (inputs[1] if form == "fused_add_rms_norm" else 0)
    for module, epsilon in ((small, 1e-5), (large, 3.0)):
        y = total * (total.square().mean(-1, keepdim=True) + epsilon) ** -0.5 * inputs[2]
        torch.testing.assert_close(module(*inputs)[1], y.abs().amax(-1) / 127)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_graphs_for_a_gpu_are_fused_too(form, dtype):
    module = trace(FORMS[form][0](), *norm_inputs(5, 64, dtype), device="cuda")
    assert fused(module) == PassResult("norm_quant", 1, 1)
    assert operators(module) == FORMS[form][2]
    results = [node.meta["val"] for node in module.graph.output_node().args[0]]
    assert [r.dtype for r in results] == [torch.int8, torch.float32, dtype][: len(results)]
    assert {r.device.type for r in results} == {"cuda"}


@pytest.mark.parametrize("form", FORMS)
def test_running_the_pass_again_changes_nothing(form):
    module = trace(FORMS[form][0](), *norm_inputs(5, 64, torch.bfloat16))
    fused(module)
    before = str(module.graph)
    assert fused(module) == PassResult("norm_quant", 0, 0)
    assert str(module.graph) == before


def test_all_norms_of_a_chain_are_fused_and_the_residual_goes_through_all_of_them():
    def function(x, residual, weight):
        y = rms_norm(x, weight, 1e-5)
        for _ in range(4):
            x_q, x_scale = quant(y)
            y, residual = fused_add_rms_norm((x_q * x_scale[:, None]).to(x.dtype), residual, weight, 1e-5)
        return y, residual

    inputs = norm_inputs(6, 64, torch.bfloat16)
    module = trace(function, *inputs)
    unfused = copy.deepcopy(module)
    # The last one has no quantiser behind it and stays.
    assert fused(module) == PassResult("norm_quant", 4, 4)
    names = operators(module)
    assert [names.count(n) for n in ("rms_norm_quant", "fused_add_rms_norm_quant", "fused_add_rms_norm")] == [1, 3, 1]
    assert "quant_per_token" not in names
    assert all(torch.equal(a, b) for a, b in zip(module(*inputs), unfused(*inputs), strict=True))
    assert_sound(module, *inputs)


def test_a_residual_that_nobody_reads_is_left_out():
    module = trace(lambda x, r, w: quant(fused_add_rms_norm(x, r, w, 1e-5)[0]), *norm_inputs(5, 64, torch.bfloat16))
    assert fused(module).matched == 1
    assert sum(node.target is operator.getitem for node in module.graph.nodes) == 2
    assert_sound(module, *norm_inputs(3, 64, torch.bfloat16))


def test_a_quantiser_of_the_residual_stays_and_reads_the_new_one():
    def function(x, residual, weight):
        y, new_residual = fused_add_rms_norm(x, residual, weight, 1e-5)
        return *quant(y), *quant(new_residual)

    inputs = norm_inputs(6, 64, torch.bfloat16)
    module = trace(function, *inputs)
    unfused = copy.deepcopy(module)
    assert fused(module) == PassResult("norm_quant", 1, 1)
    assert operators(module) == ["fused_add_rms_norm_quant", "quant_per_token"]
    assert fused(module) == PassResult("norm_quant", 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(module(*inputs), unfused(*inputs), strict=True))
    assert_sound(module, *inputs)


@pytest.mark.parametrize("form", FORMS)
def test_several_quantisers_share_one_operator(form):
    def function(x, residual, weight):
        if form == "rms_norm":
            y, more = rms_norm(x, weight, 1e-5), ()
        else:
            y, *more = fused_add_rms_norm(x, residual, weight, 1e-5)
        return *quant(y), *quant(y.view(-1, 4, 16).reshape(-1, 64)), *quant(y.clone()), *more

    inputs = norm_inputs(6, 64, torch.bfloat16)
    module = trace(function, *inputs)
    unfused = copy.deepcopy(module)
    assert fused(module) == PassResult("norm_quant", 3, 3)
    assert operators(module) == FORMS[form][2]
    assert all(torch.equal(a, b) for a, b in zip(module(*inputs), unfused(*inputs), strict=True))
    assert_sound(module, *inputs)


def test_views_that_keep_the_rows_may_lie_between():
    def function(x, residual, weight):
        y, new_residual = fused_add_rms_norm(x, residual, weight, 1e-5)
        return *quant(y.view(-1, 4, 16).clone().reshape(-1, 64)), new_residual

    inputs = norm_inputs(6, 64, torch.bfloat16)
    module = trace(function, *inputs)
    unfused = copy.deepcopy(module)
    assert fused(module) == PassResult("norm_quant", 1, 1)
    assert operators(module) == ["fused_add_rms_norm_quant"]
    assert all(torch.equal(a, b) for a, b in zip(module(*inputs), unfused(*inputs), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_rows_in_three_dimensions_are_flattened_for_the_operator_and_the_residual_gets_its_shape_back(form):
    def function(x, residual, weight):
        if form == "rms_norm":
            return quant(rms_norm(x, weight, 1e-5).reshape(-1, 64))
        y, new_residual = fused_add_rms_norm(x, residual, weight, 1e-5)
        return *quant(y.reshape(-1, 64)), new_residual

    def inputs(batch: int):
        x, residual, weight = norm_inputs(batch * 5, 64, torch.bfloat16)
        return x.view(batch, 5, 64), residual.view(batch, 5, 64), weight

    module = trace(function, *inputs(3))
    unfused = copy.deepcopy(module)
    assert fused(module) == PassResult("norm_quant", 1, 1)
    assert FORMS[form][2][0] in operators(module) and "quant_per_token" not in operators(module)
    for batch in (1, 7):
        pairs = zip(module(*inputs(batch)), unfused(*inputs(batch)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert_sound(module, *inputs(2))


def test_a_norm_that_is_read_otherwise_too_stays_and_is_no_candidate():
    def function(x, residual, weight):
        y, new_residual = fused_add_rms_norm(x, residual, weight, 1e-5)
        return *quant(y), y.view(-1, 4, 16) * 2, new_residual

    assert untouched(function, *norm_inputs(5, 64, torch.bfloat16)) == PassResult(
        "norm_quant", 0, 0, ("quant_per_token: what it quantises is read by others too",)
    )


def _kernel(kernel: torch._ops.OpOverload, x: torch.Tensor, weight: torch.Tensor) -> tuple:
    """A kernel that writes into its first argument, as it stands in a graph."""
    return auto_functionalized(kernel, out=torch.empty_like(x), input=x, weight=weight, epsilon=1e-5)


def test_a_norm_that_vllm_has_fused_with_its_all_reduce_stays_and_is_no_candidate():
    with torch.library._scoped_library("of_a_test", "FRAGMENT") as library:
        library.define("fused_allreduce_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()")
        library.impl("fused_allreduce_norm", lambda out, input, weight, epsilon: None, "Meta")
        kernel = torch.ops.of_a_test.fused_allreduce_norm.default
        result = untouched(lambda x, r, w: quant(_kernel(kernel, x, w)[1]), X, R, W)
    assert (result.matched, result.candidates) == (0, 0)
    assert result.refused == ("quant_per_token: of_a_test::fused_allreduce_norm: fused with the all-reduce before it",)


MISFITS = {
    "part of the channels": (_norm(variance_size=32), (X, R, W), "variance_size is 32"),
    "part of the channels, added": (_add_norm(variance_size=32), (X, R, W), "variance_size is 32"),
    "no weight": (lambda x, r, w: quant(rms_norm(x, None, 1e-5)), (X, R, W), "the norm has no weight"),
    "no weight, added": (
        lambda x, r, w: quant(fused_add_rms_norm(x, r, None, 1e-5)[0]),
        (X, R, W),
        "the norm has no weight",
    ),
    "weight in fp32": (_norm(), (X, R, W.float()), "the weight is torch.float32, x torch.bfloat16"),
    "weight for all": (_norm(), (X, R, W[:1]), "the weight is (1,) for 64 channels, or no plain row"),
    "weight with gaps": (_norm(), (X, R, W.repeat(2)[::2]), "the weight is (64,) for 64 channels, or no plain row"),
    "residual in fp32": (_add_norm(), (X, R.float(), W), "the residual is torch.float32 ("),
    "residual for all": (_add_norm(), (X, R[0], W), "the residual is torch.bfloat16 (64,), x torch.bfloat16"),
    "no epsilon": (_norm(0.0), (X, R, W), "epsilon is 0.0"),
    "columns": (_norm(), (X.t().contiguous().t(), R, W), "x_1: the elements of a row are not neighbours"),
    "heads": (
        lambda x, r, w: quant(rms_norm(x.view(-1, 4, 16), w[:16], 1e-5).reshape(-1, 64)),
        (X, R, W),
        "a reshape changes the rows before they are quantised",
    ),
    "another norm": (
        lambda x, r, w: quant(_kernel(torch.ops._C.rms_norm.default, x, w)[1]),
        (X, R, W),
        "_C::rms_norm is none of the norms that this pass knows: vllm_ir::rms_norm, vllm_ir::fused_add_rms_norm",
    ),
    "another norm, behind casts": (
        lambda x, r, w: quant(_kernel(torch.ops._C.rms_norm.default, x, w)[1].float().view(-1, 64).to(x.dtype)),
        (X, R, W),
        "_C::rms_norm is none of the norms that this pass knows",
    ),
    "a norm taken apart": (
        lambda x, r, w: quant(torch.nn.functional.rms_norm(x, [64], w, 1e-5)),
        (X, R, W),
        "is computed with an rsqrt: a norm that is taken apart",
    ),
    "a cast between": (
        lambda x, r, w: quant(rms_norm(x, w, 1e-5).float()),
        (X, R, W),
        "vllm_ir::rms_norm is followed by a cast",
    ),
}


@pytest.mark.parametrize(("function", "given", "why"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_a_candidate_left_alone_with_a_reason(function, given, why):
    result = untouched(function, *given)
    assert (result.matched, result.candidates) == (0, 1)
    assert len(result.refused) == 1 and why in result.refused[0]
    assert result.refused[0].startswith("quant_per_token: ")


NO_CANDIDATES = {
    "behind a product": lambda x, r, w: quant(x @ x.t()),
    "behind an input": lambda x, r, w: quant(x.view(-1, 64)),
    "behind attention over normalised queries": lambda x, r, w: quant(rms_norm(x, w, 1e-5) @ r.t()),
    "behind the residual": lambda x, r, w: quant(fused_add_rms_norm(x, r, w, 1e-5)[1]),
    "behind the residual of a norm behind the block": lambda x, r, w: quant(r + rms_norm(x, w, 1e-5)),
    "behind what is fused already": lambda x, r, w: quant(
        torch.ops.kvcompile.rms_norm_quant(x, w, 1e-5)[0].view(-1, 64).float()
    ),
    "behind SwiGLU": lambda x, r, w: quant(torch.nn.functional.silu(x[..., :32]) * x[..., 32:]),
}


@pytest.mark.parametrize("function", NO_CANDIDATES.values(), ids=NO_CANDIDATES)
def test_a_quantiser_behind_anything_else_is_no_candidate(function):
    assert untouched(function, X, R, W) == PassResult("norm_quant", 0, 0)


def test_one_site_that_does_not_fit_does_not_keep_others_from_being_fused():
    def function(x, residual, weight):
        return *quant(rms_norm(x, weight, 1e-5)), *quant(rms_norm(residual, weight, 1e-5, 32))

    module = trace(function, X, R, W)
    assert fused(module) == PassResult("norm_quant", 1, 2, ("quant_per_token_1: variance_size is 32",))
    assert operators(module) == ["rms_norm_quant", "rms_norm", "quant_per_token"]


def test_strict_stops_at_a_norm_that_no_longer_fits_and_says_why():
    graph = trace(_norm(variance_size=32), X, R, W).graph
    strict = PassPipeline({**to_dict(KVCompileConfig()), "strict": True}, [NormQuant])
    with pytest.raises(PassError, match=r"norm_quant matched none of 1 .*\(quant_per_token: variance_size is 32\)"):
        strict(graph)


def test_strict_has_nothing_against_a_graph_with_a_quantiser_and_no_norm():
    strict = PassPipeline({**to_dict(KVCompileConfig()), "strict": True})
    assert [r.candidates for r in strict(trace(NO_CANDIDATES["behind a product"], X, R, W).graph)] == [0, 0, 0, 0]


def test_switched_off_the_graph_stays_unfused():
    off = PassPipeline(to_dict(resolve(overrides={"passes.norm_quant": False}, environ={}).config))
    module = trace(_add_norm(), X, R, W)
    before = str(module.graph)
    assert off(module.graph) == [PassResult(name, 0, 0) for name in ("swiglu_quant", "rotary", "attention_swap")]
    assert str(module.graph) == before
    assert operators(module) == FORMS["fused_add_rms_norm"][1]
