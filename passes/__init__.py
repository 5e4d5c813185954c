"""FX passes of kvcompile. They know torch and `kvcompile.ops`, not vLLM."""
