"""How processes of vLLM come to know the load format "standin"."""

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PLUGIN = Path(__file__).with_name("plugin")


def environment() -> dict[str, str]:
    """Environment variables for a process that starts vLLM.

    They make this checkout importable, and visible the one entry point that is not in the
    product's setup.py. Whatever that process starts inherits them, Ray's actors included.
    """
    before = os.environ.get("PYTHONPATH")
    paths = [str(_PLUGIN), str(_ROOT), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
