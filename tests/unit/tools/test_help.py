"""The help of the commands: sentences, and a word for every value."""

from __future__ import annotations

import argparse

from vllm_ssd.config.draft_server import COMMON, OF_ITS_PROCESS
from vllm_ssd.tools import stats
from vllm_ssd.tools.check import command as check
from vllm_ssd.tools.draft_server import command as draft
from vllm_ssd.tools.tune import command as tune

COMMANDS = {"check": check, "tune": tune, "stats": stats, "draft": draft}


def parser_of(name: str) -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser().add_subparsers()
    COMMANDS[name].add_command(commands)
    return commands.choices[name]


def test_a_draft_has_all_options_under_their_names():
    """Those of its process and those that its engines have in common."""
    names = {action.dest for action in parser_of("draft")._actions}
    its_own = {"draft_device", "draft_dtype"}  # --device may be several, --dtype is vllm serve's
    options = {*COMMON, *OF_ITS_PROCESS} - its_own
    assert options <= names and not its_own & names
    assert {name for name in names if name.startswith("draft_")} <= options
