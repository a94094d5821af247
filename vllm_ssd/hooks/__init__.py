"""The wrappers of vLLM's functions; ``patches.py`` lists them all."""
