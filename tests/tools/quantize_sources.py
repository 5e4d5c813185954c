"""Small random checkpoints of the Llama family, with a byte-level tokenizer, for the tests of `kvcompile quantize`."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvcompile import cli
from kvcompile.ops.w4a8 import W4A8Weight

LAYERS, HIDDEN, MLP, HEAD, VOCAB = 2, 128, 192, 64, 256
KINDS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HEAD, HIDDEN),
    "self_attn.v_proj": (HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HIDDEN // HEAD,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def tensors(
    *, dtype=torch.bfloat16, tied=True, bias=False, head_norms=False, seed=0, layers=LAYERS, mlp=MLP
) -> dict[str, torch.Tensor]:
    """The state of the model of CONFIG. Norms are float32, whatever `dtype`: it must be kept."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    state = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN)}
    for layer in range(layers):
        for part, shape in KINDS.items():
            shape = tuple(mlp if size == MLP else size for size in shape)
            state[f"model.layers.{layer}.{part}.weight"] = normal(*shape, scale=shape[1] ** -0.5)
            if bias and part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                state[f"model.layers.{layer}.{part}.bias"] = normal(shape[0])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
        for norm in ("q_norm", "k_norm") if head_norms else ():
            state[f"model.layers.{layer}.self_attn.{norm}.weight"] = 1 + 0.1 * torch.randn(HEAD, generator=generator)
    state["model.norm.weight"] = torch.ones(HIDDEN)
    if not tied:
        state["lm_head.weight"] = normal(VOCAB, HIDDEN)
    return state


def write(folder: Path, state: dict[str, torch.Tensor] | None = None, *, shards=1, index=True, **config) -> Path:
    """Make `folder` a checkpoint of `state` in `shards` files, of which each holds about as many tensors."""
    folder.mkdir()
    state = tensors() if state is None else state
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    _write_tokenizer(folder)
    names = list(state)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)] if shards > 1 else []
    step = -(-len(names) // shards)
    parts = {file: names[i * step : (i + 1) * step] for i, file in enumerate(files or ["model.safetensors"])}
    for file, some in parts.items():
        save_file({name: state[name] for name in some}, folder / file, metadata={"format": "pt"})
    if shards > 1 and index:
        where = {name: file for file, some in parts.items() for name in some}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder; each must be in one file only."""
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118, it is no mapping
                assert name not in state, f"{name} is in two files"
                state[name] = handle.get_tensor(name)
    return state


def linear(state: dict[str, torch.Tensor], name: str) -> W4A8Weight:
    return W4A8Weight(*(state[f"{name}.{field}"] for field in W4A8Weight._fields))


def linear_names() -> list[str]:
    return [f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in KINDS]


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def refused(tmp_path: Path, capsys, *arguments) -> str:
    """The one line that a refused run writes; it must leave nothing."""
    before = sorted(tmp_path.iterdir())
    assert cli.main(["quantize", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvcompile: error: ") and err.count("\n") == 1, err
    assert sorted(tmp_path.iterdir()) == before
    return err


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
