"""Programs that show vllm-ssd at work. `demo.py` is `make demo`."""
