"""The help of the commands: options have the names that they have elsewhere."""

import argparse

from vllm_ssd.config.draft_server import COMMON, OF_ITS_PROCESS
from vllm_ssd.tools.draft_server import command


def test_a_draft_has_all_options_under_their_names():
    """Those of its process and those that its engines have in common."""
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_command(commands)
    names = {action.dest for action in commands.choices["draft"]._actions}
    its_own = {"draft_device", "draft_dtype"}  # --device may be several, --dtype is vllm serve's
    options = {*COMMON, *OF_ITS_PROCESS} - its_own
    assert options <= names and not its_own & names
    assert {name for name in names if name.startswith("draft_")} <= options
