"""The commands of ``vllm-ssd``: stats, check, tune and draft."""
