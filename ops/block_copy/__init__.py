"""Pages of a KV cache, copied to pinned host memory and back by one kernel launch for all layers, with checksums."""
