"""kvcompile: long-context serving on stock vLLM."""

from importlib.metadata import version

# The one place that states the version is pyproject.toml.
__version__ = version("kvcompile")
