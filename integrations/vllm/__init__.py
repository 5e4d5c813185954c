"""kvcompile inside vLLM 0.23. The only package here that imports vLLM."""
