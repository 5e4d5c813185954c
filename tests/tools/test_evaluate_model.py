"""A pruned prompt answers as an independent Llama does that keeps the same tokens."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.llama_reference import Llama
from tests.tools import quantize_sources as sources
from torch.nn import functional

from kvcompile.config import UsageError
from kvcompile.ops.prune import Method, pages_of, parse_method, prune_score, select
from kvcompile.tools.evaluate_model import PrunedModel
from kvcompile.tools.evaluate_pruned import FULL, Budget, by_system, outcomes, parse_budget
from kvcompile.tools.evaluate_samples import Sample

FAMILIES = {"llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"attention_bias": False}}
PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(200)]


def _checkpoint(folder: Path, family: str = "llama") -> Path:
    # Not tied: a random model with tied embeddings says one token again and again.
    state = sources.tensors(tied=False, bias=family == "qwen2", head_norms=family == "qwen3")
    names = {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "tie_word_embeddings": False}
    return sources.write(folder, state, **names, **FAMILIES[family])


def _sample(later: list[int], answer: list[int]) -> Sample:
    return Sample("single", "last", PROMPT, later, answer, [])


def _kept_by(method: Method):
    """What the independent Llama asks for its kept tokens: the server's operators."""

    def kept(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
        cache, row = pages_of(keys.contiguous(), values.contiguous())
        return select(prune_score(query, cache, row, len(keys), query.shape[-1] ** -0.5, method), method, count)

    return kept


@pytest.mark.parametrize("name", ["andpro", "robust", "streaming", FULL])
def test_the_greedy_tokens_of_a_pruned_llama_rank_first(tmp_path: Path, name: str) -> None:
    folder = _checkpoint(tmp_path / "model")
    method = parse_method("andpro" if name == FULL else name, window=32)
    pruned = {} if name == FULL else {"kept": 80, "select": _kept_by(method)}
    answer = Llama(folder).generate(PROMPT, 12, **pruned)
    assert min(answer.leads[1:]) > 1e-3
    sample = _sample(answer.tokens[:1], answer.tokens[1:])
    found = outcomes(PrunedModel(folder), sample, {"method": method}, [Budget("80", tokens=80)])
    assert found["80", FULL if name == FULL else "method"].rank1 == 1


@pytest.mark.parametrize("name", ["andpro", "robust", FULL])
def test_generated_tokens_are_those_of_a_llama_that_keeps_the_same_tokens(tmp_path: Path, name: str) -> None:
    folder = _checkpoint(tmp_path / "model")
    method = parse_method("andpro" if name == FULL else name, window=32)
    pruned = {} if name == FULL else {"kept": 80, "select": _kept_by(method)}
    answer = Llama(folder).generate(PROMPT, 12, **pruned)
    assert min(answer.leads) > 1e-3 and len(set(answer.tokens)) > 6
    model = PrunedModel(folder)

    def said(most: int, stop: tuple[int, ...] = ()) -> list[int]:
        generate = partial(model.generate, most=most, stop=stop)
        found = by_system(model, PROMPT, {"method": method}, [Budget("80", tokens=80)], generate)
        return found["80", FULL if name == FULL else "method"]

    assert said(12) == answer.tokens and said(1) == answer.tokens[:1]
    end = answer.tokens[5]
    assert said(12, (end,)) == answer.tokens[: answer.tokens.index(end)]
    first = said(12, tuple(answer.tokens[:1]))  # an answer that may stop has a token all the same
    assert first and answer.tokens[0] not in first


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_pruned_gives_the_losses_of_the_whole_model(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = _checkpoint(tmp_path / "model", family)
    later, answer = [5, 6, 7], [11, 13, 17, 19]
    model = PrunedModel(folder)
    prompt = model.prefill(PROMPT, 32)
    everything = torch.arange(len(PROMPT)).expand(*prompt.keys.shape[:2], -1)
    first, nats = model.losses(prompt, everything.unsqueeze(1), later, answer)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = stock(torch.tensor([[*PROMPT, *later, *answer]])).logits[0, -len(answer) - 1 : -1]
    expected = functional.cross_entropy(logits, torch.tensor(answer), reduction="none")
    torch.testing.assert_close(nats[0], expected, rtol=0, atol=0.2)  # int8 keys and values
    assert first.shape == nats.shape == (1, 4)


def test_a_prompt_within_the_budget_is_not_pruned(tmp_path: Path) -> None:
    model, sample = PrunedModel(_checkpoint(tmp_path / "model")), _sample([5], [11, 13])
    methods = {name: parse_method(name) for name in ("streaming", "robust")}
    found = outcomes(model, sample, methods, [parse_budget("100%"), parse_budget("544"), parse_budget("40%")])
    for budget in ("100 %", "544 tokens"):
        assert found[budget, "streaming"] == found[budget, "robust"] == found[budget, FULL]
    assert found["40 %", "streaming"] != found["40 %", FULL]


def test_a_budget_below_what_is_always_kept_is_one_line(tmp_path: Path) -> None:
    model, sample = PrunedModel(_checkpoint(tmp_path / "model")), _sample([5], [11])
    with pytest.raises(UsageError, match=r"^--budget 35 tokens: 35 of 200 tokens; tova always keeps 36; give a larger"):
        outcomes(model, sample, {"tova": parse_method("tova")}, [parse_budget("35")])


@pytest.mark.parametrize("text", ["", "0", "-3", "0%", "101%", "x", "1.5", "nan%"])
def test_no_budget_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--budget: given '{text}', allowed a share such as 25% or a number"):
        parse_budget(text)


def test_budgets_are_shares_rounded_up_and_tokens() -> None:
    assert parse_budget("25%").of(1001) == 251 and parse_budget("25%").text == "25 %"
    assert parse_budget("544").of(1001) == 544 and parse_budget("544").of(500) == 500


@pytest.mark.parametrize(("window", "most"), [(None, 1024), (300, 300), (4096, 1024)])
def test_prompts_are_no_longer_than_a_sliding_window(tmp_path: Path, window: int | None, most: int) -> None:
    folder = _checkpoint(tmp_path / "model", "mistral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    assert PrunedModel(folder).max_tokens == most


def test_an_architecture_with_an_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = _checkpoint(tmp_path / "model")  # for its tokenizer
    (folder / "model.safetensors").unlink()
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(folder)
    with pytest.raises(UsageError, match=r"config.json: architectures is \['GPT2LMHeadModel'\]; allowed is a list of"):
        PrunedModel(folder)


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, damaged: str) -> None:
    folder = _checkpoint(tmp_path / "model")
    content = b"[]" if damaged == "config.json" else (folder / damaged).read_bytes()[:-100]
    (folder / damaged).write_bytes(content)
    with pytest.raises(UsageError, match="no model and tokenizer can be loaded") as error:
        PrunedModel(folder)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model and tokenizer can be loaded") as error:
        PrunedModel(tmp_path)
    assert "\n" not in str(error.value)
