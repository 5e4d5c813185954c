"""GPTQ on one linear and on a decoder layer: smaller output errors than by rounding, exact where that is possible."""

import pytest
import torch
from tests.tools import quantize_sources as sources

from kvcompile.ops.w4a8 import check_weight, dequantize, quantize
from kvcompile.tools import quantize_calibrate
from kvcompile.tools.quantize_gptq import DAMPING, damped, solve
from kvcompile.tools.quantize_model import LINEARS, LayerwiseModel
from kvcompile.tools.quantize_search import search
from kvcompile.tools.quantize_source import Source


def _inputs(tokens=600, width=192):
    """Correlated activations, some of them large."""
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator)
    mixed[:, ::17] *= 6
    return mixed / 10


def _lost(weight, approximation, inputs):
    """Squared error of the outputs, relative to the outputs."""
    weight, inputs = weight.double(), inputs.double()
    return ((inputs @ (approximation - weight).T).square().sum() / (inputs @ weight.T).square().sum()).item()


def _weight(rows=40, width=192):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(6)) / 10


@pytest.mark.parametrize("group_size", [64, 192])
def test_outputs_are_nearer_than_by_rounding_or_search(group_size):
    inputs, weight = _inputs(), _weight()
    before = weight.clone()
    found = solve(weight, inputs.T @ inputs, group_size)
    check_weight(found)
    candidates = (found, search(weight, group_size), quantize(weight, group_size))
    errors = [_lost(weight, dequantize(candidate), inputs) for candidate in candidates]
    assert errors[0] < 0.6 * min(errors[1:])
    assert torch.equal(weight, before)


@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100])
def test_the_scale_of_the_second_moments_does_not_matter(scale):
    inputs, weight = _inputs(), _weight()
    hessian = inputs.T @ inputs
    for mine, wanted in zip(solve(weight, hessian * scale, 64), solve(weight, hessian, 64), strict=True):
        assert torch.equal(mine, wanted)


def test_coordinate_descent_only_ever_helps():
    inputs, weight = _inputs(), _weight()
    hessian = inputs.T @ inputs
    errors = [_lost(weight, dequantize(solve(weight, hessian, 64, sweeps=n)), inputs) for n in (0, 1, 4)]
    assert errors[0] > errors[1] >= errors[2]


def test_inputs_that_are_never_active_are_rounded_and_harm_nothing():
    inputs, weight = _inputs(), _weight()
    dead = [0, 63, 64, 130, 191]
    inputs[:, dead] = 0
    found = dequantize(solve(weight, inputs.T @ inputs, 64))
    assert torch.isfinite(found).all()
    assert (found - weight)[:, dead].abs().max() < 0.06  # about a step and a half of the grid
    assert _lost(weight, found, inputs) < 0.6 * _lost(weight, dequantize(quantize(weight, 64)), inputs)


def _text(seed):
    """Inputs with the same large channels in every text, but with correlations of its own."""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(600, n, generator=generator) for n in (8, 192))
    inputs = own + 0.6 * common @ torch.randn(8, 192, generator=generator)
    inputs[:, ::24] *= 20
    return inputs / 10


def test_damping_keeps_what_is_gained_on_one_text_from_being_lost_on_another():
    calibration, other, weight = _text(1), _text(2), _weight()
    hessian = calibration.T @ calibration
    found = {damping: dequantize(solve(weight, hessian, 64, damping=damping)) for damping in (0.0, DAMPING)}
    searched = dequantize(search(weight, 64))
    assert _lost(weight, found[DAMPING], other) < 0.9 * _lost(weight, found[0.0], other)
    assert _lost(weight, found[DAMPING], other) < 0.6 * _lost(weight, searched, other)
    assert _lost(weight, found[DAMPING], calibration) < 0.2 * _lost(weight, searched, calibration)


def test_damping_is_in_proportion_to_each_channel_above_a_floor():
    hessian = torch.tensor([[9.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    # The mean of the channels that were active is 5, which stands in for the one that was not.
    wanted = torch.tensor([[18.05, 2.0, 0.0], [2.0, 2.05, 0.0], [0.0, 0.0, 10.05]])
    torch.testing.assert_close(damped(hessian, 1.0), wanted)
    assert hessian[2, 2] == 0


@pytest.mark.parametrize("hessian", [torch.zeros(192, 192), torch.ones(192, 192)], ids=["no inputs", "rank one"])
def test_degenerate_inputs_give_a_valid_weight(hessian):
    found = solve(_weight(), hessian, 64)
    check_weight(found)
    assert _lost(_weight(), dequantize(found), torch.eye(192)) < 0.02


@pytest.fixture
def calibrated(tmp_path):
    """The model, its first layer, streams before it, and the result of calibrating it."""
    source = Source(sources.write(tmp_path / "s"))
    with torch.inference_mode():
        model = LayerwiseModel(source.path, source.read, source.names)
        ids = torch.randint(sources.VOCAB, (4, 256), generator=torch.Generator().manual_seed(0))
        streams = quantize_calibrate.Streams(model.embed(ids))
        start = streams.exact.clone()
        layer = model.layer(0)
        done = quantize_calibrate.calibrate(model, layer, streams, lambda width: 64)
        yield model, layer, start, streams, done


def test_a_calibrated_layer_is_nearer_to_the_exact_one_than_by_rounding(calibrated):
    model, layer, start, streams, done = calibrated
    exact = model.forward(layer, start)
    rounded = {part: quantize(layer.get_submodule(part).weight, 64) for part in LINEARS}
    results = [
        model.forward(quantize_calibrate.quantised_layer(layer, weights), start)
        for weights in ({part: result.weight for part, result in done.items()}, rounded)
    ]
    errors = [(result - exact).square().sum().item() for result in results]
    assert errors[0] < 0.7 * errors[1]


def test_both_streams_have_moved_behind_the_layer_as_a_later_run_would_move_them(calibrated):
    model, layer, start, streams, done = calibrated
    again = quantize_calibrate.Streams(start.clone())
    weights = {part: result.weight for part, result in done.items()}
    again.advance(model, layer, quantize_calibrate.quantised_layer(layer, weights))
    torch.testing.assert_close(streams.exact, again.exact)
    torch.testing.assert_close(streams.quantised, again.quantised)


def test_calibration_leaves_the_layer_as_it_was(calibrated):
    model, layer, start, _, _ = calibrated
    torch.testing.assert_close(model.forward(layer, start), model.forward(model.layer(0), start), rtol=0, atol=0)


def test_activations_are_rounded_to_int8_per_token():
    x = torch.tensor([[127.0, 1.4, -0.6, -126.6], [0.0, 0.0, 0.0, 0.0], [0.0, 2.54, 0.008, -0.031]])
    wanted = torch.tensor([[127.0, 1.0, -1.0, -127.0], [0.0, 0.0, 0.0, 0.0], [0.0, 2.54, 0.0, -0.04]])
    torch.testing.assert_close(quantize_calibrate.rounded(x), wanted)


def test_a_linear_makes_up_for_the_error_of_its_inputs():
    generator = torch.Generator().manual_seed(8)
    exact = _inputs().unflatten(0, (2, 300))
    seen = 0.9 * exact + 0.02 * torch.randn(exact.shape, generator=generator)
    weight = _weight()
    moments = quantize_calibrate._Moments(seen, exact)
    wanted = exact @ weight.T
    errors = [(seen @ some.T - wanted).square().sum() for some in (moments.corrected(weight), weight)]
    assert errors[0] < 0.3 * errors[1]
    same = quantize_calibrate._Moments(exact, quantize_calibrate.rounded(exact)).corrected(weight)
    torch.testing.assert_close(same, weight, rtol=1e-4, atol=1e-5)


def test_the_reported_output_error_is_that_of_the_quantised_model(calibrated):
    model, layer, start, streams, done = calibrated
    x = layer.input_layernorm(start)
    for part in ("self_attn.q_proj", "self_attn.v_proj"):
        wanted = x @ layer.get_submodule(part).weight.T
        found = quantize_calibrate.rounded(x) @ dequantize(done[part].weight).T
        error = (found - wanted).norm() / wanted.norm()
        assert done[part].output_error == pytest.approx(error.item(), rel=1e-3)
        assert error > 0.01
