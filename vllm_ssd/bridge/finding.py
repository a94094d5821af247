"""Finds a draft service in a Ray cluster and asks which options it fixes for its engines."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import msgspec

from vllm_ssd.bridge.changes import VERSIONS
from vllm_ssd.bridge.cluster import connect, find_sites
from vllm_ssd.service.own_ray import sentence
from vllm_ssd.table.draft_names import CommonOptions, NoDraftServer

REACH_S = 80.0  # timeout of the whole
ANSWER_S = 20.0  # timeout of the service's answer


@functools.lru_cache(maxsize=8)  # vLLM makes a config several times
def described(address: str, name: str, minute: int) -> CommonOptions:
    """What this service of the Ray cluster at ``address`` fixes for its engines; ``NoDraftServer``
    or ``ValueError`` with a sentence if it cannot be reached. minute: part of the cache's key, so
    that another one asks again. A process of its own asks, because this one may connect to another
    Ray later."""
    command = [sys.executable, "-m", "vllm_ssd.bridge.finding", address, name]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, timeout=REACH_S, check=True)
        answer = json.loads(run.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ValueError(
            f"the Ray cluster at {address} does not answer ({type(error).__name__}): see 'ray "
            "status', and the log above"
        ) from error
    if "problem" in answer:
        raise (NoDraftServer if answer["may_come"] else ValueError)(answer["problem"])
    return msgspec.convert(answer["options"], CommonOptions)


def _find(address: str, name: str) -> dict[str, Any]:
    """The answer of the service's first draft: its ``options``, or else a ``problem``."""
    try:
        ray = connect(address)
        sites = find_sites(name)
        if not sites:
            raise NoDraftServer(
                f"there is no draft server {name!r} in the Ray cluster at {address}: start it with "
                f"'vllm-ssd draft MODEL --name {name} --ray-address {address}'"
            )
        answer = ray.get(sites[0].describe.remote(), timeout=ANSWER_S)
        if answer["versions"] != VERSIONS:
            raise ValueError(
                f"the draft server {name!r} speaks version {answer['versions']} and this engine "
                f"{VERSIONS}: install the same vllm-ssd on both nodes"
            )
        return dict(answer)
    except Exception as error:  # Ray has many kinds
        ours = type(error) in (ValueError, NoDraftServer)
        # A draft that waits for a node or for its files does not answer.
        may_come = isinstance(error, (NoDraftServer, TimeoutError))
        return {"problem": str(error) if ours else sentence(error), "may_come": may_come}


if __name__ == "__main__":
    print(json.dumps(_find(*sys.argv[1:])))
