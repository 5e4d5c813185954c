"""What the scheduler decides, as plain data types: nothing here knows of vLLM or of torch."""
