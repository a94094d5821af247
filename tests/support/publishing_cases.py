"""The draft's kernels publish as the host does: in Triton's interpreter and on GPUs alike.

Importing this module compiles kernels the way TRITON_INTERPRET says.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vllm_ssd.table import SpeculationTable, TableShape, make_stamp
from vllm_ssd.table.device_publisher import DevicePublisher
from vllm_ssd.table.pages import memory_of
from vllm_ssd.table.publisher import BranchTokens, HostPublisher, PredictedOutcomes

SIZES = [(0, 5), (3, 5), (4, 19)]  # top_m and branches


class DeviceMemory:
    """In place of ``address_kernel``: a GPU that has registered pages at other addresses than the
    host. What it has there is a copy of the pages, so a kernel that was given the host's address
    is found out: it leaves the copy as it was, and changes the pages themselves."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, pages, found):
        found[0] = self._copy_of(pages).data_ptr()

    def _copy_of(self, pages):
        return self._copies.setdefault(pages.data_ptr(), pages.clone())

    def read(self, table: SpeculationTable) -> bytes:
        """What the GPU has of a table."""
        return self._copy_of(memory_of(table, np.int64)).numpy().tobytes()


def publishing_leaves_the_same_bytes(
    folder: Path,
    device: torch.device,
    top_m: int,
    branches: int,
    read: Callable[[SpeculationTable], bytes] = lambda table: bytes(table.pages),
) -> list[SpeculationTable]:
    """In two tables of different length, whose slots are of different size, at once. read: what
    the kernels have left in a table. Returns the tables that they wrote."""
    wide = TableShape(slots=4, k=3, branches=branches, tail=16, top_m=top_m)
    shapes = wide, replace(wide, slots=1, tail=5)
    on_device = DevicePublisher(wide, None if device.type == "cpu" else device)
    on_host, cpu, published = HostPublisher(), torch.device("cpu"), []
    for publisher, where in ((on_device, device), (on_host, cpu)):
        tables = [
            SpeculationTable.create(folder / f"{type(publisher).__name__}{shape.slots}", shape)
            for shape in shapes
        ]
        first, second = (publisher.join(table) for table in tables)
        rows = torch.tensor([first[2], 0, first[0], second[0]], device=where)  # one is padding
        published.append((publisher, tables, rows))

    def give(publish: str, kind: type, *columns: torch.Tensor) -> None:
        for publisher, _, rows in published:
            there = [each.to(rows.device) for each in columns]
            getattr(publisher, publish)(kind(rows, *there))

    (_, ours, _), (_, theirs, _) = published
    for number in (5, 6):
        # One is of a later generation each time, and one of a later round or a fallback.
        of_rows = (number, 3), (1, 0), (7, number), (9, 2)
        stamps = torch.tensor([int(make_stamp(*each)) for each in of_rows])
        stamps[3] += number - 5
        each = 4, branches
        accepted, bonus = torch.randint(0, 4, each), torch.randint(0, 100, each)
        give("predict", PredictedOutcomes, stamps, accepted, bonus)
        for step in range(wide.k):
            # The trees have fewer branches one by one.
            counts = torch.tensor([branches, branches - 1, 1, branches - 2])
            rows, first = int(counts.sum()), counts.cumsum(0) - counts
            tokens, steps = torch.randint(0, 100, (rows,)), torch.full((rows,), step)
            probs = torch.randint(0, 2**62, (rows, top_m))
            shape = [torch.cat([each, each[:1]]) for each in (first, counts)]  # and what is padding
            new = stamps, *shape, tokens, torch.rand(rows), steps, probs
            give("extend", BranchTokens, *new)
            if device.type != "cpu":
                torch.cuda.synchronize(device)
            for one, other in zip(ours, theirs):
                assert other.slots["prediction"]["depth"].any()
                assert read(one) == bytes(other.pages)
    return ours
