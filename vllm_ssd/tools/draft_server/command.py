"""The command ``vllm-ssd draft``: its flags, its output, its signals and its exit status."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ssd.table.draft_names import NAME
from vllm_ssd.tools.options import add_option

if TYPE_CHECKING:
    from vllm_ssd.tools.draft_server.placed import PlacedDrafts
    from vllm_ssd.tools.draft_server.serving import LocalDrafts

LOOK_S = 0.5  # between two checks whether the draft is lost for good


def add_command(commands: Any) -> None:
    """Add the command ``draft`` to the subparsers of ``vllm-ssd``."""
    about = "Run a draft that several engines share."
    parser = commands.add_parser(
        "draft",
        help=about,
        usage="vllm-ssd draft MODEL --name NAME [options]",
        description=f"{about} It runs until Ctrl-C; engines may come and go. An engine joins it "
        'with --speculative-config \'{"method":"ssd","draft_server":"NAME"}\'.',
        epilog="Options of --speculative-config keep their names here, with dashes. Only --device "
        "and --dtype are draft_device and draft_dtype there.",
    )
    about = "The draft model, with the vocabulary of all targets."
    parser.add_argument("model", metavar="MODEL", help=about)
    add = partial(add_option, parser.add_argument_group("the process"))
    about = "Name of the draft. Engines of this user give it as their draft_server."
    add("--name NAME", about, required=True)
    about = (
        "GPU of the draft, by index or UUID; on CPUs its cores, as in 2-3,6. Each of several GPUs "
        "(6,7) or lists of cores ('2-3|6') runs a draft. Default: GPU 0, or all cores."
    )
    add("--device DEVICE", about)
    about = "Seconds that a start of the draft may take. Default: 600."
    add("--start-timeout-s SECONDS", about, _json)
    about = "Consecutive restarts allowed for a draft that dies or hangs. Default: 3."
    add("--max-restarts COUNT", about, _json)
    model = parser.add_argument_group("the model")
    add = partial(add_option, model)
    add("--dtype TYPE", "Data type: auto, float32, bfloat16 or float16.", default="auto")
    about = "Tokens of text after which drafting stops for a request. Default: the model's limit."
    add("--max-model-len TOKENS", about, int)
    about = "Requests, of all engines, that get drafts at the same time. Default: vLLM's."
    add("--max-num-seqs COUNT", about, int)
    add("--quantization NAME", "Quantization, such as fp8. Default: that of the checkpoint.")
    add("--revision NAME", "Branch, tag or commit of the model on the Hugging Face Hub.")
    add("--code-revision NAME", "Branch, tag or commit of the code that comes with the model.")
    about = "Run the code that comes with the model."
    model.add_argument("--trust-remote-code", action="store_true", help=about)
    about = 'How weights are loaded: load_format and download_dir, as in \'{"load_format":"pt"}\'.'
    add("--draft-load-config JSON", about, _json)
    about = "Most memory for the KV cache, in GiB. Default: 1 on CPUs, as needed on GPUs."
    add("--draft-kv-cache-gib GIB", about, _json)
    about = "Prompt tokens read between two rounds, 32 or more. Default: 64 on CPUs, 512 on GPUs."
    add("--draft-max-num-batched-tokens TOKENS", about, _json)
    about = "Attention: triton, flashinfer, sdpa, or auto for the first that computes correctly."
    add("--tree-backend NAME", f"{about} Default: auto.")
    add = partial(add_option, parser.add_argument_group("drafting"))
    add("--k TOKENS", "Draft tokens per round, 1 to 16. Default: 15 on GPUs, 7 on CPUs.", _json)
    about = (
        "Bonus tokens predicted for each accepted length, in the mean. Raise it if most rounds "
        "miss. On CPUs, lower it if most are late. Default: 2 on GPUs, 3 on CPUs."
    )
    add("--f COUNT", about, _json)
    about = (
        "For requests with a temperature: probabilistic samples draft tokens, greedy takes the "
        "likeliest and needs less memory on the targets' GPUs. Default: probabilistic."
    )
    add("--draft-sample-method METHOD", about)
    about = "A draft token is sampled from so many likeliest tokens, 1 to 128. Default: 32."
    add("--draft-top-m COUNT", about, _json)
    about = (
        "Factor on the draft's probabilities of predicted bonus tokens, above 0 and at most 1. "
        "Below 1, more rounds hit and fewer draft tokens are accepted. Change it only if you "
        "measure a gain. Default: 1."
    )
    add("--saguaro FACTOR", about, _json)
    add = partial(add_option, parser.add_argument_group("in a Ray cluster, for engines in it"))
    about = "Run the draft on a free GPU of this Ray cluster: auto, or HOST:PORT."
    add("--ray-address ADDRESS", about)
    about = "Use only nodes with these labels of 'ray start --labels'."
    add("--ray-labels KEY=VALUE,...", about)
    parser.set_defaults(run=run)


def _json(text: str) -> Any:
    """The JSON value in a text. Other text is returned as is: the option's check refuses it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(args: argparse.Namespace, _: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the process's exit status."""
    if not re.match(NAME, args.name):
        return _refuse(f"--name {args.name!r} must consist of letters, digits, . _ -: change it")
    if args.ray_labels and not args.ray_address:
        return _refuse("--ray-labels needs a Ray cluster: add --ray-address ADDRESS")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    drafts: LocalDrafts | PlacedDrafts | None = None
    try:
        drafts = _make_drafts(args)
        drafts.start()
        drafts.wait_ready()
        _say_how_to_join(args)
        while drafts.tend():
            time.sleep(LOOK_S)
        return _refuse("the draft is lost for good, see above")
    except (ValueError, RuntimeError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 0
    finally:
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)  # a second signal must not interrupt the end
        if drafts is not None:
            drafts.stop()


def _refuse(sentence: str) -> int:
    print(f"vllm-ssd draft: {sentence}", file=sys.stderr)
    return 2


def _make_drafts(args: argparse.Namespace) -> LocalDrafts | PlacedDrafts:
    """The drafts that the flags ask for; ``ValueError`` with a sentence if a flag is invalid."""
    if args.ray_address:
        from vllm_ssd.tools.draft_server.placed import PlacedDrafts

        return PlacedDrafts(args)
    from vllm_ssd.tools.draft_server.serving import LocalDrafts, make_configs

    return LocalDrafts(make_configs(args), args.name)


def _say_how_to_join(args: argparse.Namespace) -> None:
    options = {"method": "ssd", "draft_server": args.name}
    if args.ray_address:
        options["ray_address"] = args.ray_address
    print(f"engines join it with --speculative-config '{json.dumps(options)}'", flush=True)
