"""What starts a draft and its keeper: what it waits for, says of it, and leaves behind."""

import logging
import os
import re
import select
import socket
from dataclasses import replace

import pytest

from tests.support.gpu_hosts import engine, gpus, parallel
from tests.support.loaded_draft import tiny_spec
from tests.unit.lifecycle.test_joined_draft import said, until
from vllm_ssd.lifecycle import detached, launch
from vllm_ssd.lifecycle.launch import DraftLauncher
from vllm_ssd.lifecycle.placement import DraftDevice
from vllm_ssd.lifecycle.server_spec import ServerSpec
from vllm_ssd.protocol import SpeculationTable, rundir
from vllm_ssd.protocol.draft_names import DraftName, find


@pytest.fixture(autouse=True)
def spec(monkeypatch):
    """Of a draft that is never loaded: a real one's needs its model's config."""

    def make(vllm_config, run_dir, device, platform, name) -> ServerSpec:
        where = {"cores": device.cores, "environment": device.environment}
        return replace(tiny_spec(run_dir, "sdpa", run_dir), **where, name=name)

    monkeypatch.setattr(launch, "make_server_spec", make)


def launcher(name: str, variable="CUDA_VISIBLE_DEVICES", **options) -> DraftLauncher:
    device = DraftDevice([], 1, {variable: "1"})
    return DraftLauncher(engine(parallel(1), **options), DraftName(name, None), device)


@pytest.fixture
def talk(monkeypatch):
    """Makes and starts a launcher whose keeper says this and then nothing. ``keepers``: their ends
    of the channels; ``locks``: of files that they hold; ``specs``: their settings."""
    from vllm import platforms

    made: list[DraftLauncher] = []
    held: list[int] = []
    locks: list[int] = []
    specs: list[ServerSpec] = []

    def start(words: bytes, name: str = "drafts", **options) -> DraftLauncher:
        def say(module, folder, spec, keep):
            specs.append(spec)
            ours, theirs = socket.socketpair()
            held.append(theirs.detach())
            locks.extend(map(os.dup, keep))
            os.write(held[-1], words)
            return ours, 0

        monkeypatch.setattr(launch, "start_detached", say)
        made.append(launcher(name, **options))
        made[-1].start()
        return made[-1]

    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch, "STOP_S", 0.1)
    start.keepers, start.locks, start.specs = held, locks, specs
    yield start
    for one in made:
        one.begin_stop()  # or it would start another keeper when one has ended
    for end in held + locks:
        os.close(end)
    for one in made:
        one.stop()


def test_the_deadline_names_what_it_waited_for(talk):
    made = talk(b'{"awaited": "the draft\'s Ray"}\n', start_timeout_s=0.3)
    with pytest.raises(RuntimeError) as error:
        made.wait_ready()
    late = "the draft's Ray was not ready within 0.3 s (start_timeout_s)"
    assert str(error.value) == f"SSD: the draft could not be started: {late}"


def test_a_draft_that_has_failed_is_not_waited_for(talk):
    made = talk(b'{"failed": "no luck"}\n', name="others")
    until(lambda: made.failure)
    assert (made.failure, made.given_up) == ("no luck", True)
    with pytest.raises(RuntimeError, match="the draft could not be started: no luck"):
        made.wait_ready()


def test_a_start_is_said_in_three_ways(talk, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as soon:
        soon.setattr(launch, "SAY_S", 0.01)
        made = talk(b'{"awaited": "the draft\'s Ray"}\n', start_timeout_s=0.3)
        with pytest.raises(RuntimeError):
            made.wait_ready()
    model = made._spec.model.engine_args["model"]
    starting, *loading = [record.getMessage() for record in caplog.records]
    assert starting == f"SSD: starting draft {model} on GPU 1 (k=2, f=1)"
    assert loading
    assert all(re.fullmatch(r"SSD: still loading the draft \(\d+ s\)", line) for line in loading)
    caplog.clear()
    talk(b'{"ready": "in no time"}\n', name="others").wait_ready()
    assert [r.getMessage() for r in caplog.records][1:] == ["SSD: draft ready (in no time)"]


def test_what_becomes_of_the_draft_is_a_line_each(talk, caplog):
    kinds = ("ready", "lost", "not_back", "back", "given_up")
    words = b"".join(b'{"%s": "%s"}\n' % (kind.encode(), kind[:1].encode()) for kind in kinds)
    made = talk(words, max_restarts=1)
    made.wait_ready()
    until(lambda: len(said(caplog)) == 4)
    lost, not_back, back, given_up = said(caplog)
    assert "lost (l)" in lost and "without drafts while it is started again" in lost
    assert "could not be started again (n)" in not_back
    assert back == "SSD: the draft is back: b"
    assert "lost (g)" in given_up and "max_restarts is 1" in given_up


def end(keeper):
    """As if it were killed. Its number is somebody else's afterwards."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), keeper)


def test_a_keeper_that_was_killed_is_started_again(talk, caplog):
    made = talk(b'{"ready": "r"}\n', max_restarts=1)
    made.wait_ready()
    end(talk.keepers[0])
    until(lambda: len(talk.specs) == 2)
    first, second = talk.specs
    assert first == second
    until(lambda: "back" in caplog.text)
    end(talk.keepers[1])
    until(lambda: "keeper is gone; serving goes on without drafts" in caplog.text)
    assert len(talk.specs) == 2, "one too many"
    assert caplog.text.count("keeper is gone, and the draft with it") == 1


def test_a_keeper_is_started_again_whatever_fails(talk, caplog, monkeypatch):
    """It was killed in the middle of a word, and the next one cannot be started at first."""
    made = talk(b'{"ready": "r"}\n{"lo', max_restarts=3)
    made.wait_ready()
    start, failures = launch.start_detached, [OSError(24, "Too many open files")]

    def run(*command, **how):
        if failures:
            raise failures.pop()
        return start(*command, **how)

    monkeypatch.setattr(launch, "start_detached", run)
    end(talk.keepers[0])
    until(lambda: len(talk.specs) == 2)
    assert "could not be started again: [Errno 24] Too many open files" in caplog.text
    until(lambda: "back" in caplog.text)


def test_nothing_is_missed_once_the_end_is_expected(talk, caplog):
    made = talk(b'{"ready": "r"}\n', max_restarts=1)
    made.wait_ready()
    made.expect_end()
    os.write(talk.keepers[0], b'{"lost": "dead"}\n{"back": "b"}\n{"given_up": "dead"}\n')
    end(talk.keepers[0])
    until(lambda: made.given_up and not made._listener.is_alive())
    assert len(talk.specs) == 1
    assert not said(caplog)


def test_a_keeper_that_is_slow_to_end_removes_the_files(talk):
    """vLLM kills an engine core that waits for long."""
    made = talk(b'{"ready": "here"}\n')
    made.wait_ready()
    run_dir = made.run_dir
    made.begin_stop()
    made.stop()
    assert rundir.is_alive(run_dir) and rundir.table_path(run_dir).exists(), "it works with them"
    while talk.locks:
        os.close(talk.locks.pop())
    assert not rundir.is_alive(run_dir), "it alone has held them"
    rundir.remove(run_dir)


def test_a_keeper_is_not_led_astray_by_the_working_directory(monkeypatch, tmp_path):
    """It begins for real, and ends at what it is told."""
    from vllm import platforms

    (tmp_path / "psutil.py").write_text("raise SystemExit('this is no psutil')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    made = launcher("drafts", variable="")  # of which there is none
    made.start()
    run_dir = made.run_dir
    with pytest.raises(RuntimeError, match="could not be started: OSError: "):
        made.wait_ready()
    made.stop()
    assert not run_dir.exists()


def test_paths_for_another_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = detached.absolute_paths({"PYTHONPATH": ":lib:/opt", "HF_HOME": "hf", "OTHER": "a"})
    assert found == {"PYTHONPATH": f"{tmp_path}/lib:/opt", "HF_HOME": f"{tmp_path}/hf"}


def test_a_service_that_has_this_name_already(talk):
    """It is the user's; this one leaves nothing."""
    other, one = talk(b""), launcher("drafts")
    with pytest.raises(ValueError, match=f"a draft server 'drafts' already, in {other.run_dir}"):
        one.start()
    one.stop()
    assert rundir.living() == [other.run_dir]


def test_what_it_leaves_is_still_there(talk):
    """As long as the keeper of a service that engines share has it."""
    made = talk(b'{"ready": "here"}\n', name="dp:1")
    made.wait_ready()
    run_dir, _ = find("dp:1")
    owner = SpeculationTable.open(rundir.table_path(run_dir), writable=False).owner
    assert (owner.model, owner.draft_server, owner.pid) == ("", "dp:1", os.getpid())
    assert not select.select(talk.keepers, [], [], 0)[0]
    made.stop(leave=True)
    made.stop()
    assert select.select(talk.keepers, [], [], 0)[0], "the keeper sees that it is gone"
    assert find("dp:1")[0] == run_dir and rundir.table_path(run_dir) in rundir.tables()
    while talk.locks:
        os.close(talk.locks.pop())
    assert not rundir.is_alive(run_dir) and rundir.table_path(run_dir) not in rundir.tables()
    rundir.remove(run_dir)


@pytest.mark.parametrize("name, leave", [("drafts", False), ("dp:1", True)])
def test_an_engine_that_is_forgotten_in_the_listener(talk, monkeypatch, name, leave):
    """Python collects what is forgotten in whatever thread it is about to make an object."""
    made = talk(b'{"ready": "here"}\n', name=name)
    made.wait_ready()
    run_dir = made.run_dir
    monkeypatch.setattr(launch.logger, "error", lambda *_: made.stop(leave=leave))
    os.write(talk.keepers[0], b'{"lost": "dead"}\n')
    until(lambda: made._listener is None)
    while talk.locks:
        os.close(talk.locks.pop())
    until(lambda: not rundir.is_alive(run_dir))
    rundir.remove(run_dir)
