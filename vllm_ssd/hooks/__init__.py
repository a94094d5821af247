"""Every wrapper of a function of vLLM's; ``patches.py`` lists them all."""
