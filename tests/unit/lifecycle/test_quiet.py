"""What a draft server prints of vLLM's lines and of its own."""

import os
import subprocess
import sys

SAY = """
import warnings
from vllm_ssd.lifecycle.quiet import hush_vllm
hush_vllm()
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import configure_logging_if_needed, init_logger
# As ``create_engine_config`` does.
configure_logging_if_needed(EngineArgs().create_logging_config())
from vllm_ssd.log import get_logger
get_logger("vllm_ssd.one").info("our info")
get_logger("vllm_ssd.one").warning("our warning")
init_logger("vllm.one").warning("their warning")
init_logger("vllm.one").error("their error")
warnings.warn("their future", FutureWarning)
"""
OURS, THEIRS = ("our info", "our warning"), ("their warning", "their future")


def test_below_an_error_only_our_lines_are_shown():
    said = say("INFO")
    shown = {line for line in (*OURS, *THEIRS, "their error") if line in said}
    assert shown == {*OURS, "their error"}
    assert len(said.splitlines()) == len(shown), "nor is anything else"


def test_all_are_shown_at_debug():
    said = say("DEBUG")
    assert all(line in said for line in (*OURS, *THEIRS, "their error"))


def say(level: str) -> str:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": level, "VLLM_PLUGINS": ""}
    ran = subprocess.run(
        [sys.executable, "-c", SAY], capture_output=True, text=True, check=True, env=environment
    )
    return ran.stdout + ran.stderr
