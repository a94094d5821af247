"""The command ``vllm-ssd``."""

from __future__ import annotations

import argparse
import os
import sys

from vllm_ssd import __version__
from vllm_ssd.tools import stats
from vllm_ssd.tools.check import command as check
from vllm_ssd.tools.draft_server import command as draft
from vllm_ssd.tools.tune import command as tune


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-ssd",
        description="Tools for vLLM with the speculative method 'ssd'.",
        epilog="Each command has its own help: vllm-ssd check --help. To serve with ssd: "
        'vllm serve TARGET --speculative-config \'{"method":"ssd"}\'',
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        dest="command", required=True, title="commands", metavar="COMMAND"
    )
    for command in (check, tune, stats, draft):
        command.add_command(commands)
    args, further = parser.parse_known_args(arguments)
    if further and not hasattr(args, "takes_further"):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    words = sys.argv[1:] if arguments is None else arguments
    if further and args.target in words and words.index(further[0]) < words.index(args.target):
        parser.error("TARGET comes first, before the arguments of vllm serve")
    try:
        status: int = args.run(args, further)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    if arguments is None and args.command == "check":
        # Libraries' exit handlers can take minutes on GPU machines, after a check has used a GPU.
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
