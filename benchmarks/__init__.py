"""Benchmarks of vllm-ssd and the models they run on."""
