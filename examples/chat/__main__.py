"""A chat in the terminal with a vLLM server, which shows after each answer how fast it came:

    python -m examples.chat                                   a server on port 8000
    python -m examples.chat --url http://HOST:PORT --compare http://HOST:PORT
    python -m examples.chat --serve TARGET --draft DRAFT      starts one, and ends it

--compare asks a plain server, too, and shows both answers as they are written; with --serve it
needs no address and starts that one as well: on the same cores or GPUs, which must have room for
both. Rounds and hits are the server's: with other clients at the same time, theirs are in the
figures.

/new begins a new conversation, /quit or Ctrl-D ends the chat, Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import os
import readline
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from openai import BadRequestError, OpenAIError
from rich.console import Console

from benchmarks.common.server import ServerFailed
from examples.chat.answer import Endpoint, Message
from examples.chat.screen import show_beside, show_one
from examples.chat.servers import started

DEFAULT_URL = "http://localhost:8000"
OWN_PLAIN = "start one"  # --compare without an address
HISTORY = Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local/state")) / "vllm-ssd-chat"
HISTORY_LINES = 1000


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1, after a sentence, if a server cannot be reached or started."""
    options = parser()
    args = options.parse_args(arguments)
    if args.compare == OWN_PLAIN and args.serve is None:
        options.error("--compare needs the address of a plain server, or --serve to start one")
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        with ExitStack() as stack:
            urls = {"ssd": args.url, **({"plain": args.compare} if args.compare else {})}
            if args.serve is not None:
                logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chat-")))
                sides = own_servers(args)
                urls |= stack.enter_context(started(console, sides, logs))
            endpoints = {name: Endpoint(url) for name, url in urls.items()}
            chat(console, endpoints, args.temperature, args.max_tokens)
    except (OpenAIError, httpx.HTTPError) as error:
        reached = " and ".join(urls.values())
        print(f"No answer from {reached} ({error}): is a server running there?", file=sys.stderr)
        return 1
    except ServerFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def chat(
    console: Console, endpoints: dict[str, Endpoint], temperature: float, max_tokens: int | None
) -> None:
    """Questions and answers, until the user has no more. The conversation goes on with the answers
    of the first endpoint."""
    for name, endpoint in endpoints.items():
        console.print(f"{name}: {endpoint.model} at {endpoint.url}", style="dim")
    conversation: list[Message] = []
    _load_history()
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if question == "/quit":
            break
        if question == "/new":
            conversation.clear()
            console.print("a new conversation", style="dim")
            continue
        if not question:
            continue
        conversation.append({"role": "user", "content": question})
        streams = [
            partial(endpoint.ask, [*conversation], temperature, max_tokens)
            for endpoint in endpoints.values()
        ]
        try:
            if len(streams) == 1:
                answer = show_one(console, streams[0]())
            else:
                answer, _ = show_beside(console, list(endpoints), streams)
        except BadRequestError as error:  # mostly, the conversation is too long
            console.print(f"{error}: /new begins a new conversation")
            conversation.pop()
            continue
        conversation.append({"role": "assistant", "content": answer.text})
    _save_history()


def own_servers(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What to start: arguments of vLLM's ``LLM`` by name."""
    speculation = {"method": "ssd", "model": args.draft, "k": args.k, "f": args.f}
    plain: dict[str, Any] = {"model": args.serve}
    if args.max_model_len is not None:
        plain["max_model_len"] = args.max_model_len
    sides = {"ssd": {**plain, "speculative_config": speculation}}
    return sides | ({"plain": plain} if args.compare == OWN_PLAIN else {})


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m examples.chat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--url", default=DEFAULT_URL, help=f"the server's address; default: {DEFAULT_URL}")
    add("--compare", nargs="?", const=OWN_PLAIN, metavar="URL", help="of a plain server")
    add("--serve", metavar="TARGET", help="start a server for this model instead")
    add("--draft", help="with --serve: the draft; default: the one known for the target")
    add("--k", type=int, help="with --serve: drafted tokens a round; default: ssd's own")
    add("--f", type=int, help="with --serve: outcomes predicted a length; default: ssd's own")
    add("--max-model-len", type=int, help="with --serve: the longest conversation, in tokens")
    add("--temperature", type=float, default=0.0, help="0, the default: the likeliest text")
    add("--max-tokens", type=int, help="the longest answer; default: what fits")
    return made


def _load_history() -> None:
    with suppress(OSError):  # of the first chat there is none
        readline.read_history_file(HISTORY)


def _save_history() -> None:
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError):  # a home that cannot be written is no reason to fail
        HISTORY.parent.mkdir(parents=True, exist_ok=True)
        readline.write_history_file(HISTORY)


if __name__ == "__main__":
    sys.exit(main())
