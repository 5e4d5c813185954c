"""A tokenizer of bytes for made-up models, where a test needs text: stop strings, grammars, a server front end."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>")


def save(model: Path, vocabulary: int) -> None:
    """Into the folder of a checkpoint whose vocabulary has so many entries.

    3 to 96 are printable ASCII, up to 258 other bytes, the rest words.
    """
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"word{i}" for i in range(len(tokens), vocabulary)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=SPECIAL[0]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(model)
