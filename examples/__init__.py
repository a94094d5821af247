"""Programs that show vllm-ssd at work. `demo` is `make demo`."""
