"""The checkpoint as a model: its facts, its tokenizer, and what it predicts and generates."""

import gguf
import pytest
import torch
from torch.nn.functional import cross_entropy, silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcompile.tools import smollm2
from kvcompile.tools.prose import prose


@pytest.fixture(scope="module")
def tokenizer(smollm2_checkpoint):
    return AutoTokenizer.from_pretrained(smollm2_checkpoint)


@pytest.fixture(scope="module")
def model(smollm2_checkpoint):
    return AutoModelForCausalLM.from_pretrained(smollm2_checkpoint, dtype=torch.float32).eval()


def test_the_config_is_that_of_smollm2_135m(smollm2_checkpoint):
    config = AutoConfig.from_pretrained(smollm2_checkpoint)
    found = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": (config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        "intermediate": config.intermediate_size,
        "positions": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
        "eps": config.rms_norm_eps,
        "rope": config.rope_parameters,
        "tied": config.tie_word_embeddings,
        "dtype": config.dtype,
        "special": (config.bos_token_id, config.eos_token_id, config.pad_token_id),
    }
    assert found == {
        "layers": 30,
        "hidden": 576,
        "heads": (9, 3, 64),
        "intermediate": 1536,
        "positions": 8192,
        "vocabulary": 49152,
        "eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 100000.0},
        "tied": True,
        "dtype": torch.bfloat16,
        "special": (1, 2, 2),
    }


@pytest.mark.parametrize(
    "text",
    [
        "plain words, punctuation; and 'quotes'",
        "héllo wörld Здравствуй 中文 ﷽ 🦊👩‍👩‍👧 \U0010ffff",
        "0123456789 3.14159 1e-5 ٣٤٥",
        "a\n\n\nb\r\n\t c   ",
        "def f(x):\n\treturn x**2  # ok\n\n\nclass A:\n    pass\n",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <jupyter_code>",
        "",
        " ",
        "\x00\x01",
        prose(),
    ],
)
def test_text_comes_back_from_the_tokenizer_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens_and_special_tokens_are_whole(tokenizer):
    assert tokenizer("In 1817").tokens() == ["In", "Ġ", "1", "8", "1", "7"]
    assert tokenizer("<|im_start|>user\n<|im_end|>")["input_ids"] == [1, 4093, 198, 2]
    assert tokenizer.decode([1, 4093, 198, 2], skip_special_tokens=True) == "user\n"


def test_the_chat_template_frames_a_conversation(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("prompt", "first"), [("The capital of France is", " Paris"), ("Once upon a time", ","), ("2 + 2 =", " ")]
)
def test_the_first_greedy_token_is_the_sensible_one(model, tokenizer, prompt, first):
    with torch.inference_mode():
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
    assert tokenizer.decode(logits.argmax()) == first


@pytest.mark.slow
def test_a_chat_prompt_gets_a_fluent_answer_that_ends(model, tokenizer):
    chat = [{"role": "user", "content": "What is photosynthesis? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == (
        "Photosynthesis is a vital biological process that converts carbon dioxide into organic molecules, "
        "which plants use to grow.<|im_end|>"
    )


def _logits_in_gguf_layout(ids):
    """The model computed from the GGUF file as llama.cpp lays it out: q and k rows permuted, neighbours rotated."""
    reader = gguf.GGUFReader(smollm2.locate()[0])
    w = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    angle = torch.arange(len(ids))[:, None] * 100000.0 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[name]

    def rope(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    hidden = w["token_embd.weight"][ids]
    future = torch.full((len(ids), len(ids)), float("-inf")).triu(1)
    for layer in range(30):
        p = f"blk.{layer}."
        x = norm(hidden, p + "attn_norm.weight")
        q = rope((x @ w[p + "attn_q.weight"].T).view(-1, 9, 64))
        k = rope((x @ w[p + "attn_k.weight"].T).view(-1, 3, 64)).repeat_interleave(3, 1)
        v = (x @ w[p + "attn_v.weight"].T).view(-1, 3, 64).repeat_interleave(3, 1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) / 8 + future).softmax(-1)
        hidden = hidden + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w[p + "attn_output.weight"].T
        x = norm(hidden, p + "ffn_norm.weight")
        gate = silu(x @ w[p + "ffn_gate.weight"].T)
        hidden = hidden + (gate * (x @ w[p + "ffn_up.weight"].T)) @ w[p + "ffn_down.weight"].T
    return norm(hidden, "output_norm.weight") @ w["token_embd.weight"].T


@pytest.mark.slow
def test_the_checkpoint_predicts_prose_as_the_gguf_file_does(model, tokenizer):
    """In nats per token; with q and k left permuted the two differ by more than 2."""
    ids = torch.tensor(tokenizer(prose())["input_ids"][:128])
    with torch.inference_mode():
        ours, theirs = model(ids[None]).logits[0], _logits_in_gguf_layout(ids)
    losses = [cross_entropy(logits[:-1], ids[1:]).item() for logits in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=0.003)  # bf16 against the file's float32
    assert losses[0] < 4.0, losses


def test_the_shipped_prose_is_whole_paragraphs_that_fit_the_context(tokenizer):
    text = prose()
    assert 24_000 <= len(text.encode()) <= 40_000
    assert 5_000 <= len(tokenizer(text)["input_ids"]) < 8_192
    assert text.startswith("No one who had ever seen Catherine Morland in her infancy would have supposed")
    assert text.endswith('"and how pleasant it would be if we had any acquaintance here."\n')
