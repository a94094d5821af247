"""``vllm-ssd draft``, as a command: flags, what is said, and how it ends."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from vllm_ssd.protocol.draft_names import NAME
from vllm_ssd.tools.draft_server.configs import OPTIONS, make_configs

_HELP = "a draft for any number of engines, which name it as their draft_server"
LOOK_S = 0.5  # between two looks at whether the draft is lost for good


class Drafts(Protocol):
    """Those of one command, wherever they run."""

    def look(self) -> bool:
        """Whether any draft is there, or will be there again."""

    def stop(self) -> None:
        """Leave nothing behind."""


def add_command(commands: Any) -> None:
    """Add it to the subparsers of ``vllm-ssd``."""
    parser = commands.add_parser(
        "draft",
        help=_HELP,
        description=f"Runs {_HELP}, until Ctrl-C. Engines may come and go.",
        epilog='Engines: vllm serve TARGET --speculative-config \'{"method":"ssd",'
        '"draft_server":"NAME"}\'',
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="the draft, with the vocabulary of all targets")
    add("--name", required=True, help="by which engines of this user find it")
    add(
        "--device",
        help="a visible GPU, or several as in 6,7 for a draft on each; on CPUs cores as in 2-3,6, "
        "and several drafts as in '2-3|6'; default: GPU 0, all cores",
    )
    add("--max-num-seqs", type=int, help="requests of all engines at a time; default: vLLM's")
    add("--max-model-len", type=int, help="where drafting stops; default: the model's")
    add("--dtype", default="auto", help="as vLLM knows it; default: auto")
    add(
        "--listen",
        metavar="HOST:PORT",
        help="drafts for engines on other nodes, too, at this address",
    )
    add(
        "--key-file",
        type=Path,
        help="for --listen and --ray-address: made if not there; engines need a copy",
    )
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="run on a node of this Ray cluster that has a GPU free: auto, or HOST:PORT",
    )
    add(
        "--ray-labels",
        metavar="KEY=VALUE,...",
        help="for --ray-address: on a node with these labels of 'ray start --labels'",
    )
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    for option, (about, read) in OPTIONS.items():
        add(f"--{option.replace('_', '-')}", type=read, metavar="VALUE", help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the process's exit status."""
    if not re.match(NAME, args.name):
        return _refuse(f"--name {args.name!r} has other characters than letters, digits, . _ and -")
    if (args.listen or args.ray_address) and args.key_file is None:
        return _refuse("--listen and --ray-address need a --key-file: name one")
    if args.key_file is not None and not (args.listen or args.ray_address):
        return _refuse("--key-file is for engines on other nodes: add --listen or --ray-address")
    if args.ray_labels and not args.ray_address:
        return _refuse("--ray-labels is about a Ray cluster: name it as --ray-address")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _serve_placed(args) if args.ray_address else _serve_here(args)
    except (ValueError, RuntimeError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 0


def _refuse(sentence: str) -> int:
    print(f"vllm-ssd draft: {sentence}", file=sys.stderr)
    return 2


def _serve_here(args: argparse.Namespace) -> int:
    from vllm_ssd.relay.keys import prepare_keys
    from vllm_ssd.tools.draft_server.serving import LocalDrafts

    configs = make_configs(args)
    if args.listen is not None:
        prepare_keys(args.key_file, args.name, args.listen, len(configs))
    drafts = LocalDrafts(configs, args.name)
    try:
        drafts.launch()
        if args.listen is not None:
            drafts.listen(args.key_file)
        drafts.wait_ready()
        return _serve(drafts, args, here=True)
    finally:
        _end(drafts)


def _serve_placed(args: argparse.Namespace) -> int:
    from vllm_ssd.tools.draft_server.placed import PlacedDraft

    drafts = PlacedDraft(args)
    try:
        drafts.start()
        return _serve(drafts, args, here=False)
    finally:
        _end(drafts)


def _serve(drafts: Drafts, args: argparse.Namespace, here: bool) -> int:
    """Until they are lost for good. here: engines on this node find them by name."""
    options = {"method": "ssd", "draft_server": args.name}
    if here:
        print(f"engines join it with --speculative-config '{json.dumps(options)}'", flush=True)
    if args.key_file is not None:
        who = "and on other nodes with" if here else "engines join it with --speculative-config"
        options["draft_server_key"] = args.key_file.name
        print(f"{who} '{json.dumps(options)}'", flush=True)
    while drafts.look():
        time.sleep(LOOK_S)
    return _refuse("the draft is lost for good, see above")


def _end(drafts: Drafts) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # the end has begun
    drafts.stop()
