"""A draft service whose draft does nothing but say that it lives, and what its engines do."""

import logging
import threading
import time
from pathlib import Path

from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.table.draft_names import DraftName, publish
from vllm_ssd.table.messages import OTHERS_CAME, Join, Leave, Wake
from vllm_ssd.table.sockets import Sockets

NAMED = DraftName("drafts", None)  # one service, of which each is a draft


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeService:
    """``loaded``: its draft lives. refusal: what it answers to engines that want to join. asked:
    what it was asked, by the types of messages. named: what it publishes."""

    def __init__(
        self, loaded: bool = True, refusal: str = "", pid: int = 7, named: DraftName = NAMED
    ):
        self.files = OwnFiles(TableShape(1, 2, 3), TableOwner(draft_server="drafts"))
        self._draft = SpeculationTable.open(rundir.table_path(self.files.run_dir)).draft[0]
        self._draft["pid"], self._draft["heartbeat"] = pid, loaded and time.monotonic_ns()
        self.loaded, self.refusal = loaded, refusal
        self.asked: list[type] = []
        self._joined: dict[str, SpeculationTable] = {}
        self._control = Sockets()
        handlers = {Join: self._join, Leave: self._leave, Wake: self._wake}
        self._control.serve(self.files.run_dir, handlers)
        publish(self.files.run_dir, named)
        self._ended = threading.Event()
        self._turn = threading.Lock()  # held during a round of its work
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def engines(self) -> int:
        return int(self._draft["joined"])

    def die(self, away: int = 0):
        """And stay so."""
        with self._turn:
            self.loaded = False
            self._joined.clear()
            self._draft["joined"], self._draft["away"] = 0, away
            self._draft["heartbeat"] = 0

    def end(self):
        self._ended.set()
        self._thread.join()
        self._control.close()
        self.files.remove()

    def _serve(self):
        while not self._ended.wait(0.01):
            with self._turn:
                self._control.drain()
                if self.loaded:
                    joined = [table.draft[0] for table in self._joined.values()]
                    self._draft["joined"] = len(joined)
                    for draft in (self._draft, *joined):
                        draft["heartbeat"] = time.monotonic_ns()

    def _join(self, message):
        self.asked.append(Join)
        if message.engines not in (None, len(self._joined)):
            return OTHERS_CAME
        if not self.refusal:
            try:
                table = SpeculationTable.open(rundir.table_path(Path(message.run_dir)))
            except OSError as error:  # the engine has given up meanwhile
                return str(error)
            table.draft["pid"] = self._draft["pid"]
            table.draft["heartbeat"] = time.monotonic_ns()
            self._joined[message.run_dir] = table
            self._draft["joined"] = len(self._joined)
        return self.refusal

    def _leave(self, message):
        self.asked.append(Leave)
        self._joined.pop(message.run_dir, None)
        self._draft["joined"] = len(self._joined)
        return ""

    def _wake(self, message):
        self.asked.append(Wake)
        self._draft["away"] = 0
        self.loaded = True
        return ""


def begin(draft):
    """As an executor does it."""
    draft.start()
    draft.workers_started()
    draft.wait_ready()


def lives(draft):
    return bool(draft._table.draft["heartbeat"][0])


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno > logging.INFO]
