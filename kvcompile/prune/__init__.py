"""What pruning decides, without vLLM: how much of a prompt is kept, and for which requests."""
