"""Speculative speculative decoding for vLLM: the draft works while the target verifies."""

__version__ = "0.1.0"
