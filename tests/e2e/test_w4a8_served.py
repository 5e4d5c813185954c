"""W4A8 checkpoints in a real engine: the operators that run, what they answer, and what they hold in memory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.w4a8_model import LAYERS, QKV_GATE_UP_O_DOWN, logprobs, product, write_plain, write_quantised
from tests.engine import run_python

# Engines one after the other in one process: (checkpoint, arguments of LLM) each, one JSON line of answers each, and
# of the last one what went into its linears and came out.
SERVE = """
    import gc, json, os, sys
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from torch.profiler import profile
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.linear import LinearBase

    prompts = [[(7 * i * i + 31 * j) % 509 for i in range(1, n + 1)] for j, n in enumerate((3, 40, 130))]
    sampling = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, prompt_logprobs=0, logprobs=0
    )
    common = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 256,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }
    engines = json.loads(sys.argv[1])
    for number, (model, arguments) in enumerate(engines, 1):
        llm = LLM(model, **common, **arguments)
        module = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        traffic = []
        if number == len(engines):
            for name, layer in module.named_modules():
                if isinstance(layer, LinearBase):
                    layer.register_forward_hook(
                        lambda _, x, y, name=name: traffic.append((name, x[0].clone(), y[0].clone()))
                    )
        with profile() as events:
            outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
        counts = {event.key: event.count for event in events.key_averages()}
        answers = []
        for output in outputs:
            chosen = output.outputs[0]
            follow = [*output.prompt_token_ids, *chosen.token_ids]
            scored = [*output.prompt_logprobs[1:], *chosen.logprobs]
            answers.append([follow, [given[t].logprob for given, t in zip(scored, follow[1:], strict=True)]])
        config = llm.llm_engine.vllm_config
        said = {
            "answers": answers,
            "calls": {key: count for key, count in counts.items() if key.startswith("kvcompile::")},
            "bytes": {name: p.untyped_storage().nbytes() for name, p in module.named_parameters()},
            "cache": config.cache_config.cache_dtype,
            "mode": config.compilation_config.mode.name,
        }
        print("ANSWER", json.dumps(said), flush=True)
        torch.save(traffic, sys.argv[2])
        del llm, module, events, outputs, config
        gc.collect()
        cleanup_dist_env_and_memory()
"""
# Calls per step of the model: what quantises the inputs of qkv and gate_up, of down, and of o_proj, and what turns
# query and key.
FUSED = {
    "kvcompile::rms_norm_quant": 1,  # the first layer has no residual yet
    "kvcompile::fused_add_rms_norm_quant": 2 * LAYERS - 1,
    "kvcompile::silu_mul_quant": LAYERS,
    "kvcompile::quant_per_token": LAYERS,
    "kvcompile::rotary": LAYERS,
}
UNFUSED = {"kvcompile::quant_per_token": QKV_GATE_UP_O_DOWN * LAYERS}


@dataclass(frozen=True)
class Answers:
    answers: list[tuple[list[int], list[float]]]  # tokens of prompt and continuation, log-probability of each but one
    calls: dict[str, int]
    bytes: dict[str, int]
    cache: str
    mode: str

    def logprobs(self) -> torch.Tensor:
        return torch.tensor([value for _, values in self.answers for value in values], dtype=torch.float64)


@dataclass(frozen=True)
class Run:
    """`engines`: name -> answers; `traffic`: of each call of a linear, its name, input and output."""

    engines: dict[str, Answers]
    traffic: list[tuple[str, torch.Tensor, torch.Tensor]]
    log: str


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("w4a8") / "plain")


@pytest.fixture(scope="module")
def quantised(plain: Path) -> Path:
    return write_quantised(plain.with_name("w4a8"), plain)


@pytest.fixture(scope="module")
def served(plain: Path, quantised: Path, compile_caches: dict[str, str]) -> Run:
    """In fp32 and, but for one, with vLLM's own KV cache, so that answers can be compared closely."""
    preset = {"compilation_config": "kvcompile", "additional_config": {"kvcompile": {"strict": True}}}
    own_cache = {**preset, "additional_config": {"kvcompile": {"strict": True, "kv8": {"enabled": False}}}}
    eager, online = {"enforce_eager": True}, {"enforce_eager": True, "quantization": "kvcompile_w4a8"}
    engines: dict[str, tuple[Path, dict[str, Any]]] = {
        "compiled": (quantised, own_cache),
        "online, preset": (plain, {**online, "compilation_config": "kvcompile"}),
        "online": (plain, online),
        "eager": (quantised, eager),
    }
    traffic = plain.with_name("traffic.pt")
    wanted = json.dumps([(str(model), arguments) for model, arguments in engines.values()])
    log = run_python(SERVE, wanted, traffic, environment=compile_caches)
    lines = [json.loads(line.removeprefix("ANSWER ")) for line in log.splitlines() if line.startswith("ANSWER ")]
    return Run({name: Answers(**line) for name, line in zip(engines, lines, strict=True)}, torch.load(traffic), log)


def _assert_w4a8_ran(answers: Answers, quantisers: dict[str, int]) -> None:
    """Each step calls every linear's operator once and `quantisers` as often as it says, and nothing else of ours."""
    steps, rest = divmod(answers.calls["kvcompile::w4a8_linear"], LAYERS * QKV_GATE_UP_O_DOWN)
    assert (steps >= 6, rest) == (True, 0)
    per_step = {**quantisers, "kvcompile::w4a8_linear": LAYERS * QKV_GATE_UP_O_DOWN}
    ours = {name: count for name, count in answers.calls.items() if "kv8" not in name}
    assert ours == {name: count * steps for name, count in per_step.items()}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_compiled_linears_call_the_w4a8_operators(served: Run) -> None:
    assert served.engines["compiled"].mode == "VLLM_COMPILE"
    _assert_w4a8_ran(served.engines["compiled"], FUSED)
    passes = "norm_quant and swiglu_quant and rotary in VLLM_COMPILE, no attention_swap: attention is not kvcompile's"
    assert f"active: passes ({passes}), " in served.log
    assert "linear (W4A8 checkpoint, group size 128 and 64, torch CPU operators, lm_head int8)" in served.log


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_norm_and_swiglu_in_front_of_a_linear_is_fused_with_its_quantiser(served: Run) -> None:
    # Graphs to the first attention, between two, and from the last; the final norm has no quantiser behind it.
    assert re.findall(r"kvcompile passes: graph (\d), \d+ nodes, [\d.]+ ms: (.*)", served.log) == [
        ("1", "norm_quant 1 of 1, swiglu_quant 0 of 0, rotary 1 of 1"),
        ("2", "norm_quant 2 of 2, swiglu_quant 1 of 1, rotary 1 of 1"),
        ("3", "norm_quant 1 of 1, swiglu_quant 1 of 1, rotary 0 of 0"),
    ]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_linear_gives_bit_for_bit_what_the_checkpoint_means(served: Run, quantised: Path) -> None:
    tensors = load_file(quantised / "model.safetensors")
    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, x, y in served.traffic:
        block, _, last = name.rpartition(".")
        parts = [product(tensors, f"{block}.{part}", x) for part in merged.get(last, (last,))]
        assert torch.equal(y, torch.cat(parts, dim=1)), name
    assert len(served.traffic) == served.engines["eager"].calls["kvcompile::w4a8_linear"]
    assert max(len(x) for _, x, _ in served.traffic) == 3 + 40 + 130


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["compiled", "eager"])
def test_prompts_and_continuations_score_as_a_transcription_of_the_model(
    served: Run, plain: Path, quantised: Path, name: str
) -> None:
    answers = served.engines[name]
    wanted = torch.cat([logprobs(quantised, tokens) for tokens, _ in answers.answers])
    unquantised = torch.cat([logprobs(plain, tokens) for tokens, _ in answers.answers])
    difference, error = (answers.logprobs() - wanted).abs().mean(), (unquantised - wanted).abs().mean()
    print(f"{name}: {difference:.5f} from the transcription, {error:.5f} from the unquantised model")
    # A last bit of fp32 moves an activation to the next int8 step now and then, and later layers add to it.
    assert difference < error / 10


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_weights_are_held_once_whichever_way_they_came(served: Run) -> None:
    held = served.engines["compiled"].bytes
    assert {name.rpartition(".")[2] for name in held if "_proj." in name} == {"tiles", "group_params", "channel_scales"}
    # 4 bits a weight, 16 of scale and zero a group, 32 of scale a row; no width here needs padding.
    shapes = [(512, 256, 128), (256, 256, 128), (640, 256, 128), (256, 320, 64)]
    linears = sum(size for name, size in held.items() if "_proj." in name)
    assert linears == LAYERS * sum(n * k // 2 + n * (k // g) * 2 + n * 4 for n, k, g in shapes)
    head = {name: size for name, size in held.items() if name.startswith("lm_head.")}
    assert head == {"lm_head.codes": 512 * 256, "lm_head.scales": 512 * 4}
    assert all(answers.bytes == held for answers in served.engines.values())


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_without_the_preset_the_checkpoint_answers_the_same(served: Run) -> None:
    compiled, eager = served.engines["compiled"], served.engines["eager"]
    _assert_w4a8_ran(eager, UNFUSED)
    assert [tokens for tokens, _ in eager.answers] == [tokens for tokens, _ in compiled.answers]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_quantising_while_loading_is_the_rounded_checkpoint(served: Run) -> None:
    _assert_w4a8_ran(served.engines["online"], UNFUSED)
    assert served.engines["online"].answers == served.engines["eager"].answers


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_quantising_while_loading_works_with_the_preset_and_its_int8_cache(served: Run) -> None:
    online, preset = served.engines["online"], served.engines["online, preset"]
    assert (online.cache, preset.cache) == ("auto", "int8_per_token_head")
    assert "linear (W4A8, quantised while loading, torch CPU operators, lm_head int8)" in served.log
    _assert_w4a8_ran(preset, UNFUSED)
    prompt = len(preset.answers[2][0]) - 6
    ours, theirs = (torch.tensor(answers.answers[2][1][: prompt - 1]) for answers in (preset, online))
    assert (ours - theirs).abs().mean() < 0.1  # int8 keys and values; the unquantised model is four times as far
