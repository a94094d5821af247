"""What stands behind the commands of ``vllm-ssd``."""
