"""``vllm-ssd draft``: a draft that several engines share, here or on a node that Ray chooses."""
