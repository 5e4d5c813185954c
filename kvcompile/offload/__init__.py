"""Host offload: which blocks of which request have a copy in host memory. Plain data, without torch and vLLM."""
