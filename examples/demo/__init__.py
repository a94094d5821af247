"""``make demo``: the same questions for plain vLLM and for vLLM with SSD, on the same cores."""
