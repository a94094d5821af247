"""`vllm-ssd draft` in a process of its own, as users run it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.models import Model
from vllm_ssd.config.draft_server import FLAGS

_LAST_WORDS = 3000


def service_words(
    draft: Model, name: str, device: str, requests: int, dtype: str, options: dict[str, Any]
) -> list[str]:
    """What comes after "draft" on the command line. device: several drafts as `vllm-ssd draft`
    takes them. requests: of all engines at a time. options: of method ssd; those that engines have
    by themselves are left out."""
    words = [draft.path, "--name", name, "--device", device, "--dtype", dtype]
    words += ["--max-num-seqs", str(requests)]
    words += ["--draft-load-config", f'{{"load_format": "{draft.load_format}"}}']
    for option, value in options.items():
        if option in FLAGS:
            said = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{option.replace('_', '-')}", said]
    return words


@contextmanager
def draft_server(
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    limit_s: float,
    command: Callable[..., list[str]] = lambda *words: list(words),
) -> Iterator[None]:
    """As soon as its drafts are loaded, until the end. words: after "draft". environment: added to
    ours. command: the words of a command that runs one elsewhere. Ends the program, with the
    server's last words, if it ends or takes longer than ``limit_s`` seconds."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(sys.executable, "-m", "vllm_ssd.cli", "draft", *words),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        deadline = time.monotonic() + limit_s
        while b"engines join it with" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(log.read_text(errors="replace")[-_LAST_WORDS:])
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()
