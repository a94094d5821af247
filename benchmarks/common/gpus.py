"""The visible GPUs: python -m benchmarks.common.gpus [MIB,MIB,..] waits until each GPU uses no more
than its number of MiB, and prints a JSON list of [name, MiB used], empty without GPUs.

A process of its own, because one that has looked at a GPU keeps some of its memory.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence

WAIT_S = 120.0
SLACK_MIB = 1024


def visible_gpus(at_most_mib: Sequence[int] = ()) -> list[tuple[str, int]]:
    """(name, MiB used) of every visible GPU, as soon as they use no more than `at_most_mib` and
    some slack, or after `WAIT_S`: then what comes next may fail, and say so better."""
    command = [sys.executable, "-m", "benchmarks.common.gpus", ",".join(map(str, at_most_mib))]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return [(name, used) for name, used in json.loads(printed)]


def main() -> None:
    """Entry point of that process."""
    import torch

    limits = [int(limit) + SLACK_MIB for limit in "".join(sys.argv[1:]).split(",") if limit]
    deadline = time.monotonic() + WAIT_S
    while True:
        found = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found.append((torch.cuda.get_device_name(index), (total - free) >> 20))
        full = any(used > limit for (_, used), limit in zip(found, limits))
        if not full or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
