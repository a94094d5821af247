"""``vllm-ssd draft``: runs a draft for several engines, here or on a node that Ray chooses."""
