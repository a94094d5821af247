"""Engines that join a draft server, with a real draft on a CPU, and leave it in every way."""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks.common.running import leftovers
from benchmarks.standin.tiny import tiny_llama
from tests.support.loaded_draft import HEADS, TEXT, VOCAB, tiny_spec
from tests.unit.service.fake_service import until
from vllm_ssd.service.loaded_draft import LoadedDraft
from vllm_ssd.service.own_table import OwnFiles
from vllm_ssd.service.server import DraftServer
from vllm_ssd.table import ASLEEP, SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.table.messages import OTHERS_CAME, Add, ControlClient, Join, Leave, Remove, Wake, ask
from vllm_ssd.table.service_state import State, state_of

SERVED_S, SAY_AGAIN_S = 120.0, 10.0


class Engine:
    """One that has nothing but its files and a worker's socket."""

    def __init__(self, shape: TableShape):
        self.files = OwnFiles(shape, TableOwner("target"))
        self.run_dir = self.files.run_dir
        self.table = SpeculationTable.open(rundir.table_path(self.run_dir))
        self.control = ControlClient(self.run_dir)

    def die(self):
        """Without removing anything."""
        self.control.close()
        while self.files.locks:
            os.close(self.files.locks.pop())

    def remove(self):
        self.control.close()
        self.files.remove()

    def alive(self) -> bool:
        return bool(self.table.draft["heartbeat"][0])

    def predicted(self, generation: int) -> int:
        """What is predicted after ``TEXT``, of a request that comes and goes. A message that meets
        a socket which is being closed is lost. A draft asks for it once there are outcomes."""
        predictions = self.table.slots["prediction"][1, 0]
        said_at = 0.0

        def is_predicted():
            nonlocal said_at
            if time.monotonic() > said_at + SAY_AGAIN_S:
                said_at = time.monotonic()
                self.control.send(Add(1, generation, TEXT))
            return int(predictions["stamp"]) >> 32 == generation

        until(is_predicted)
        self.control.send(Remove(1, generation))
        return int(predictions["bonus"][0])


class Running:
    """A draft server that serves in a thread, and what the model says after ``TEXT``."""

    def __init__(self, checkpoint: Path):
        model = tiny_llama(1, VOCAB, **HEADS)
        self.model = model
        model.save_pretrained(checkpoint)
        with torch.inference_mode():
            self.expected = int(model(torch.tensor([TEXT])).logits[0, -1].argmax())
        shape = tiny_spec(checkpoint, "sdpa", Path()).policy.table_shape(1)
        self.files = OwnFiles(shape, TableOwner(draft_server="drafts"))
        self.run_dir = self.files.run_dir
        self.table = SpeculationTable.open(rundir.table_path(self.run_dir))
        server = DraftServer(tiny_spec(checkpoint, "sdpa", self.run_dir))
        # As its ``load``, which would also hush vLLM for all tests.
        server._draft = self.draft = LoadedDraft(server._spec)
        server._draft.load()
        server._status = self.table.draft[0]
        self._server = server
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        with suppress(SystemExit):
            self._server.serve()

    def joined(self) -> int:
        return int(self.table.draft["joined"][0])

    def engine(self, **shape) -> Engine:
        """One that has not joined yet, with a table like this one."""
        ours = self.table.shape
        return Engine(TableShape(**{"slots": 3, "k": ours.k, "branches": ours.branches, **shape}))

    def stop(self):
        self.draft.engine.step = sys.exit
        self._thread.join(SERVED_S)
        self._server._control.close()
        self.draft.put_away()
        self.files.remove()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = Running(tmp_path_factory.mktemp("draft"))
    yield one
    one.stop()


@pytest.fixture
def engine(server):
    """Makes engines, which have not joined yet."""
    made = []

    def make(**shape) -> Engine:
        made.append(server.engine(**shape))
        return made[-1]

    yield make
    for each in made:
        each.remove()
        ask(server.run_dir, Leave(str(each.run_dir)), SERVED_S)


def join(server, engine) -> str | None:
    return ask(server.run_dir, Join(str(engine.run_dir)), SERVED_S)


def test_two_engines_of_different_size(server, engine):
    """What is in their slots already is asked for again."""
    one, two = engine(), engine(slots=5, tail=256)
    two.table.slots["outcome"]["stamp"][4, 0] = 6 << 32
    for number, each in enumerate((one, two), 1):
        assert join(server, each) == "" and each.alive()
        assert server.joined() == number
        assert each.table.draft["pid"][0] == os.getpid()
    assert int(two.table.slots["state"][4]) >> 32 == 6
    assert [each.predicted(1) for each in (one, two)] == [server.expected] * 2
    assert one.table.draft["joined"][0] == two.table.draft["joined"][0] == 2
    assert ask(server.run_dir, Leave(str(one.run_dir)), SERVED_S) == ""
    assert not one.alive() and two.alive() and server.joined() == 1
    assert two.predicted(2) == server.expected


def test_whoever_joins_again_is_served_once(server, engine):
    one = engine()
    assert [join(server, one) for _ in range(3)] == [""] * 3
    assert server.joined() == 1
    assert one.predicted(1) == server.expected
    for _ in range(2):
        assert ask(server.run_dir, Leave(str(one.run_dir)), SERVED_S) == ""
    assert server.joined() == 0


def test_of_those_that_choose_it_at_the_same_time_one_gets_it(server, engine):
    one, two = engine(), engine()
    answers = [ask(server.run_dir, Join(str(e.run_dir), 0), SERVED_S) for e in (one, two)]
    assert answers == ["", OTHERS_CAME]
    assert one.alive() and not two.alive() and server.joined() == 1
    assert ask(server.run_dir, Join(str(two.run_dir), 1), SERVED_S) == ""
    assert two.predicted(1) == server.expected


def test_an_engine_that_dies_is_left_and_put_away(server, engine):
    one, two = engine(), engine()
    assert join(server, one) == join(server, two) == ""
    one.die()
    until(lambda: server.joined() == 1)
    until(lambda: not leftovers(one.run_dir, []))
    assert two.predicted(1) == server.expected


def test_an_engine_that_another_draft_has_taken_over_is_left_as_it_is(server, engine):
    """As where this draft hung for a while."""
    one, two = engine(), engine()
    assert join(server, one) == join(server, two) == ""
    one.table.draft["pid"] = os.getpid() + 1
    one.control.send(Add(1, 5, TEXT))  # on the connection to this one, before it is closed
    until(lambda: server.joined() == 1)
    assert not one.table.slots["state"][1], "the other one would take it for known"
    assert one.alive() and one.run_dir.exists(), "the other one drafts for it"
    assert two.predicted(1) == server.expected


def test_who_cannot_join(server, engine, tmp_path):
    other = engine(k=server.table.shape.k + 1)
    gone, damaged = engine(), engine()
    gone.die()
    damaged.table.header["magic"] = 0
    for run_dir, said in (
        (other.run_dir, "made for k=3"),
        (gone.run_dir, "is gone"),
        (damaged.run_dir, "is not a speculation table"),
        (tmp_path, "is not the run directory of an engine"),
    ):
        answer = ask(server.run_dir, Join(str(run_dir)), SERVED_S)
        assert answer is not None and said in answer
    assert server.joined() == 0 and tmp_path.exists()


def test_what_one_engine_says_wrong_is_its_own_loss(server, engine):
    one, two = engine(), engine()
    assert join(server, one) == join(server, two) == ""
    one.control.send(Add(99, 1, TEXT))
    one.control.send(Add(-1, 1, TEXT))
    one.control.send(Add(1, 2**40, TEXT))
    assert [each.predicted(3) for each in (one, two)] == [server.expected] * 2


def test_it_sleeps_when_the_last_one_does(server, engine):
    """Not when the last one ends. Until it is awake, and is asked again, it serves nobody."""
    one, two = engine(), engine()
    assert join(server, one) == join(server, two) == ""
    for each, away in ((one, 0), (two, ASLEEP)):
        assert ask(server.run_dir, Leave(str(each.run_dir), asleep=True), SERVED_S) == ""
        assert server.table.draft["away"][0] == away
    assert server.draft.engine is None and not server.table.draft["heartbeat"][0]
    assert not two.alive() and join(server, two) == "the draft is not loaded now"
    assert ask(server.run_dir, Wake(), SERVED_S) == ""
    assert state_of(server.table) is State.LOADING, "and not lost"
    until(lambda: join(server, two) == "")
    assert two.predicted(1) == server.expected
    assert ask(server.run_dir, Leave(str(two.run_dir)), SERVED_S) == ""
    assert server.draft.engine is not None
