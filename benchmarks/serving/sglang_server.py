"""SGLang's server as a side, where it is installed: plain, with its own default settings."""

import subprocess
from collections.abc import Mapping
from typing import Any

# Its options that are the same as arguments of vLLM's `LLM`. Others keep SGLang's defaults.
_OPTIONS = {
    "model": "--model-path",
    "dtype": "--dtype",
    "max_model_len": "--context-length",
    "tensor_parallel_size": "--tp",
}


def check(python: str) -> None:
    """``ValueError`` if this Python does not have the server."""
    probe = [python, "-c", "import sglang.srt.server_args"]
    try:
        found = subprocess.run(probe, capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        raise ValueError(
            f"--sides sglang needs SGLang's server, which {python} does not have: install it in a "
            "Python of its own, and name that with --sglang-python"
        )


def command(python: str, engine: Mapping[str, Any]) -> list[str]:
    """What starts the server, without its name and address. engine: as vLLM's ``LLM`` has it."""
    words = [python, "-m", "sglang.launch_server"]
    for name, option in _OPTIONS.items():
        if name in engine:
            words += [option, str(engine[name])]
    if engine.get("enable_prefix_caching") is False:
        words.append("--disable-radix-cache")
    return words
