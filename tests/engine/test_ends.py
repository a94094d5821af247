"""The worst end: engine core and keeper are killed at once, so that nobody puts anything away.
And, while it lives: nothing of the draft's listens to the network."""

from __future__ import annotations

import psutil

from benchmarks.running import leftovers, processes_of
from tests.engine.harness import engine, greedy, own_run_dir, wait_for
from vllm_ssd import rundir


def listening(processes):
    """The addresses that TCP sockets of these listen at."""
    sockets = [socket for process in processes for socket in process.net_connections("tcp")]
    open_ones = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return {address.removeprefix("::ffff:") for address in open_ones}


def test_the_draft_leaves_by_itself_and_the_next_start_removes_the_rest(tiny_pair):
    _, small = tiny_pair
    speculation = {"method": "ssd", "k": 2, "f": 1, "model": str(small)}
    options = {"skip_tokenizer_init": True, "max_model_len": 128}
    with engine(str(small), speculative_config=speculation, **options) as llm:
        run_dir = own_run_dir()
        prompt = {"prompt_token_ids": [1, 2, 3]}
        llm.generate([prompt], greedy(8, detokenize=False, ignore_eos=True), use_tqdm=False)
        assert listening(processes_of(run_dir)) == {"127.0.0.1"}
        # Ray's agents outlive a Ray that is killed by a minute or so: they hold nothing of ours.
        own = [p for p in processes_of(run_dir) if "Agent" not in p.name()]
        children = psutil.Process().children(recursive=True)
        core = next(c for c in children if "EngineCore" in " ".join(c.cmdline()))
        keeper = next(p for p in own if "vllm_ssd.draft.keeper" in " ".join(p.cmdline()))
        assert len(own) > 2, "Ray and the draft server should be among them"
        for process in (core, keeper):
            process.kill()
        wait_for("end of the draft", lambda: not psutil.pid_exists(keeper.pid), 20)
        files = {str(run_dir), str(rundir.table_path(run_dir))}
        wait_for("end of the draft", lambda: set(leftovers(run_dir, own)) <= files, 20)
    rundir.sweep()
    assert leftovers(run_dir, own) == []
