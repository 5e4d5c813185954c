"""English prose for prompts and perplexity: 30 kB of a public-domain novel (see data/README.md)."""

from importlib.resources import files


def prose() -> str:
    """About 6,700 tokens of the SmolLM2 tokenizer; paragraphs are separated by one newline."""
    return (files("kvcompile.tools") / "data" / "prose.txt").read_text(encoding="utf-8")
