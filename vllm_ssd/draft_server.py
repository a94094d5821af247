"""``vllm-ssd draft``: a draft that several engines share."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssd.relay.listening import ListeningEnd, prepare_keys
from vllm_ssd.service.draft_names import NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HELP = "a draft for any number of engines on this machine, which name it as their draft_server"
LOOK_S = 0.5  # between two looks at whether the draft is lost for good


def _json(text: str) -> Any:
    """A number, a list or an object; what is none is refused with the option's own words."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# Options of --speculative-config that are said here: what they are, and how they are read.
OPTIONS = {
    "k": ("drafted tokens a round; default: 7", _json),
    "f": ("predicted bonus tokens for every accepted length, as 3 or [4,3,2,1]; default: 3", _json),
    "draft_sample_method": ("probabilistic or greedy; default: probabilistic", str),
    "draft_top_m": ("likeliest tokens that are sampled from; default: 32", _json),
    "saguaro": ("factor on the probabilities of predicted bonus tokens; default: 1", _json),
    "quantization": ("of the draft, as vLLM knows it", str),
    "revision": ("of the draft, as vLLM knows it", str),
    "code_revision": ("of the draft, as vLLM knows it", str),
    "draft_load_config": ("how weights are loaded, as vLLM knows it, in JSON", _json),
    "draft_kv_cache_gib": ("memory for the KV cache, at most", _json),
    "draft_max_num_batched_tokens": ("prompt tokens read between two rounds", _json),
    "tree_backend": ("auto, triton, flashinfer or sdpa; default: auto", str),
    "start_timeout_s": ("seconds that a start may take; default: 600", _json),
    "max_restarts": ("starts in a row of a draft that is lost; default: 3", _json),
}


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
    add("--key-file", type=Path, help="for --listen: made if not there; engines need a copy")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    for option, (about, read) in OPTIONS.items():
        add(f"--{option.replace('_', '-')}", type=read, metavar="VALUE", help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the process's exit status."""
    if not re.match(NAME, args.name):
        return _refuse(f"--name {args.name!r} has other characters than letters, digits, . _ and -")
    if (args.listen is None) != (args.key_file is None):
        return _refuse("--listen and --key-file go together: name both, or none")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        devices = _devices(args.device)
        if args.listen is not None:
            if len(devices) > 1:
                raise ValueError(
                    f"--listen is for one draft, and --device {args.device!r} names "
                    f"{len(devices)} devices: name one of them"
                )
            prepare_keys(args.key_file, args.name, args.listen)
        configs = [_make_config(args, device) for device in devices]
        return _serve(configs, args.name, args.key_file)
    except (ValueError, RuntimeError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 0


def _refuse(sentence: str) -> int:
    print(f"vllm-ssd draft: {sentence}", file=sys.stderr)
    return 2


def _devices(given: str | None) -> list[str]:
    """One for each draft; ``ValueError`` with a sentence if drafts would share one."""
    from vllm.platforms import current_platform

    from vllm_ssd.service.cores import available_cores, parse_cores
    from vllm_ssd.service.placement import device_names

    on_cpu = current_platform.is_cpu()
    if given is None:
        return [",".join(map(str, available_cores())) if on_cpu else "0"]
    devices = device_names(given, current_platform)
    if len(devices) > 1:
        units = [unit for one in devices for unit in (parse_cores(one) if on_cpu else [one])]
        if len(set(units)) < len(units):
            twice = max(units, key=units.count)
            raise ValueError(
                f"--device {given!r} has {twice} twice: name a device of its own for each draft"
            )
    return devices


def _make_config(args: argparse.Namespace, device: str) -> VllmConfig:
    """Of an engine whose target is the draft itself, so that all checks of a start are made."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    given = {option: getattr(args, option) for option in OPTIONS}
    engine = EngineArgs(
        model=args.model,
        revision=args.revision,
        code_revision=args.code_revision,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        speculative_config={
            "method": "ssd",
            "model": args.model,
            "draft_device": device,
            **given,
        },
    )
    return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _serve(configs: Sequence[VllmConfig], name: str, key_file: Path | None) -> int:
    """A draft for each config; they differ in ``draft_device``. key_file: for engines on other
    nodes, None = there are none; with it there is one config."""
    from vllm.platforms import current_platform

    from vllm_ssd.config.draft_server import name_draft
    from vllm_ssd.service.draft_device import choose_lone_device
    from vllm_ssd.service.shared_launch import SharedDraftLauncher

    speculation: Any = configs[0].speculative_config
    named = name_draft(name, speculation)
    devices = [choose_lone_device(config, current_platform) for config in configs]
    launchers = [
        SharedDraftLauncher(config, named, device) for config, device in zip(configs, devices)
    ]
    relay: ListeningEnd | None = None
    try:
        for launcher in launchers:
            launcher.start()
        if key_file is not None:
            relay = ListeningEnd(Path(speculation.run_dir), named, key_file)
        for launcher in launchers:
            launcher.wait_ready()
        options = {"method": "ssd", "draft_server": name}
        print(f"engines join it with --speculative-config '{json.dumps(options)}'", flush=True)
        if key_file is not None:
            options["draft_server_key"] = key_file.name
            print(f"and on other nodes with '{json.dumps(options)}'", flush=True)
        while not all(launcher.given_up for launcher in launchers):
            time.sleep(LOOK_S)
            if relay is not None:
                relay.look()
        return _refuse("the draft is lost for good, see above")
    finally:
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)  # the end has begun
        if relay is not None:
            relay.stop()
        for launcher in launchers:
            launcher.begin_stop()
        for launcher in launchers:
            launcher.stop()
