"""In a keeper and its draft server: a draft that only says that it lives, and needs no torch. What
happens to it next is written in the file ``$SSD_HAPPENS``, a word each: "no-ray" (Ray does not
start), "fail" or "hang" (a load does), "stay" (a killed process seems to run, for one look)."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType


def happens(*words):
    """The next word, if it is one of these."""
    path = Path(os.environ["SSD_HAPPENS"])
    first, *others = path.read_text().split() or [""]
    if first not in words:
        return ""
    path.write_text(" ".join(others))
    return first


class DraftEngine:
    requests = ()

    def join(self, table):
        from vllm_ssd.draft.served_table import ServedTable

        self.tables.append(ServedTable(table))
        return self.tables[-1]

    def leave(self, served):
        self.tables.remove(served)

    def step(self):
        return False


class LoadedDraft:
    on_gpu = False

    def __init__(self, spec):
        from vllm_ssd.draft.served_table import ServedTable
        from vllm_ssd.table import SpeculationTable, rundir

        self.table = SpeculationTable.open(rundir.table_path(Path(spec.run_dir)))
        self.served = ServedTable(self.table)
        self.engine = None

    def load(self):
        how = happens("fail", "hang")
        if how == "fail":
            raise OSError("no such weights")
        while how == "hang":
            time.sleep(1)
        self.engine = DraftEngine()
        self.engine.tables = [self.served]
        return "loaded in no time"

    def put_away(self):
        self.engine = None


def module(name, **content):
    sys.modules[name] = made = ModuleType(name)
    made.__dict__.update(content)


module("torch", inference_mode=nullcontext)
module("vllm_ssd.service.quiet", hush_vllm=lambda: None)
module("vllm_ssd.draft.engine", DraftEngine=DraftEngine)
module("vllm_ssd.service.loaded_draft", LoadedDraft=LoadedDraft)

if "vllm_ssd.service.keeper" in sys.orig_argv:
    from vllm_ssd.service import keeper
    from vllm_ssd.service.own_ray import OwnRay

    keeper.HANG_S = 10.0
    start, has_ended = OwnRay.start, keeper.has_ended

    def start_or_fail(self):
        if happens("no-ray"):
            raise OSError("no port")
        start(self)

    def ended_or_stays(process, **kind):
        stays = happens("stay")
        keeper.SAY_AGAIN_S = 0.0 if stays else 60.0
        return not stays and has_ended(process, **kind)

    OwnRay.start = start_or_fail
    keeper.has_ended = ended_or_stays
