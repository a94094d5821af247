"""A draft that equals its target: it is always right, and ahead of it (invariant 5).

It reads texts by itself. So it does not matter to it that the target has KV of a text already, or
has lost some: as many draft tokens are accepted as without that. (Drafts that need the target's
hidden states may fall to one token a round.) The KV of a connector is shown in test_kv_transfer.

It sleeps with its target, wakes up with it, and takes other weights in between: texts are those of
an engine without it, nobody waits for it while it is away, and its drafts come back. Nothing of it
listens to the network. Then the worst end: engine core and keeper are killed at once, so that
nobody puts anything away.

A step of the target lasts until the draft is ahead, so that the draft has all the time it needs:
every miss, late branch or rejected draft is an error of ours.
"""

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import AF_INET
from typing import Any

import psutil
import pytest

from benchmarks.common.running import counters, leftovers, processes_of
from benchmarks.standin.tiny import tiny_llama
from tests.support.greedy_texts import tiny_answers
from tests.support.harness import PATIENT, SSD, engine, greedy, own_run_dir, serves, wait_for
from vllm_ssd.metrics import rates, subtract
from vllm_ssd.service.keeper import HANG_S
from vllm_ssd.table import rundir

PROMPTS = [[(7 * n + m**2) % 400 for m in range(5 + 9 * n)] for n in range(4)]
K, TOKENS = 3, 48
ROUNDS = 12
LONGER = 1 + ROUNDS * (K + 1)  # tokens of these rounds; the prompt's forward yields the first one
ALL = [0] * K + [ROUNDS]  # rounds that accepted 0, 1, .. k draft tokens
BLOCK, LONGEST = 32, 512  # the fewest tokens of a block on CPUs; the tiny model's longest text
TURNS = 5
_CHANCE = random.Random(1)
OPTIONS: dict[str, Any] = {
    **PATIENT,
    "block_size": BLOCK,
    "max_model_len": LONGEST,
    "num_gpu_blocks_override": LONGEST // BLOCK + 1,  # vLLM keeps one for itself
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "per_request_spec_decode_metrics": "summary",
}


def words(number: int) -> list[int]:
    return [_CHANCE.randrange(400) for _ in range(number)]


# Their texts begin in all blocks of KV memory but the first, and then want more.
LONG_PROMPTS = [words(BLOCK * 4 - 20) for _ in range(4)]


def answers(llm: Any, prompts: Sequence[list[int]], tokens: int = TOKENS) -> list[Any]:
    sampling = greedy(tokens, ignore_eos=True, detokenize=False)
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]
    found: list[Any] = llm.generate(rows, sampling, use_tqdm=False)
    return found


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def accepted(output: Any) -> list[int]:
    """The numbers of rounds that accepted 0, 1, .. k draft tokens."""
    found: list[int] = output.outputs[0].spec_decode_metrics.histogram
    return found


class Watched:
    """An engine whose draft is the target."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.run_dir = own_run_dir()

    def counters(self) -> dict[str, Any]:
        return counters(self.run_dir)

    def serves(self) -> bool:
        return serves(self.counters())

    def news(self) -> tuple[Any, dict[str, Any]]:
        """Texts, and what was counted meanwhile."""
        before = self.counters()
        found = [tokens_of(output) for output in answers(self.llm, PROMPTS)]
        return found, subtract(self.counters(), before)


@pytest.fixture(scope="module")
def watched(tiny) -> Iterator[Watched]:
    """The last test kills it. The target's own sockets are at an address that others reach, as on
    a cluster."""
    addresses = {name: {a.family for a in of} for name, of in psutil.net_if_addrs().items()}
    others = [name for name in addresses if name != "lo" and AF_INET in addresses[name]]
    speculation = {**SSD, "k": K, "f": 1, "model": str(tiny), "max_wait_ms": 20000}
    with pytest.MonkeyPatch.context() as patched:
        if others:
            patched.setenv("GLOO_SOCKET_IFNAME", others[0])
        with engine(str(tiny), speculative_config=speculation, **OPTIONS) as llm:
            yield Watched(llm)


def own_texts(tiny: Path, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The target's own."""
    return [choice.tokens for choice in tiny_answers(tiny, prompts, tokens)]


@pytest.fixture(scope="module")
def plain(tiny) -> list[list[int]]:
    return own_texts(tiny, PROMPTS, TOKENS)


def at_work(watched: Watched, plain: Any) -> None:
    """Drafts are there, and as good as a draft's that is the target."""
    found, counted = watched.news()
    assert found == plain
    assert rates(counted)["tokens_per_round"] > 3.5 and rates(counted)["hit"] > 0.5


def test_every_round_is_a_hit_that_accepts_k(watched, tiny):
    found = [answers(watched.llm, [prompt], LONGER)[0] for prompt in PROMPTS]
    counted = watched.counters()
    assert [tokens_of(output) for output in found] == own_texts(tiny, PROMPTS, LONGER)
    assert counted["misses"] == 0
    # The first outcome may come before the draft has read the prompt; it then gets a fallback, and
    # the round after it is ahead again. So do others on a busy machine.
    print("late:", counted["late"])
    assert counted["hits"] == counted["rounds"] - counted["late"] > counted["rounds"] // 2
    assert counted["timeouts"] == 0
    assert counted["accepted"] == [0] * K + [ROUNDS * len(PROMPTS)]


@pytest.fixture(scope="module")
def long_texts(tiny) -> list[list[int]]:
    """The target's own answers to ``LONG_PROMPTS``."""
    return own_texts(tiny, LONG_PROMPTS, LONGER)


def test_after_a_preemption(watched, long_texts):
    outputs = answers(watched.llm, LONG_PROMPTS, LONGER)
    assert [tokens_of(output) for output in outputs] == long_texts
    preemptions = [output.metrics.num_preemptions for output in outputs]
    assert sum(preemptions) > 0
    for output, often in zip(outputs, preemptions):
        # Reading a text again yields one token, as reading a prompt does. The round after it may
        # verify what is left over of the draft tokens that were not verified before.
        taken = sum(drafts * rounds for drafts, rounds in enumerate(accepted(output)))
        assert taken == output.outputs[0].spec_decode_metrics.num_draft_tokens
        assert sum(accepted(output)) <= ROUNDS + often, f"after {often} preemptions"


def test_in_each_turn_of_a_chat(watched, tiny):
    """A turn's prompt is all of the chat so far. Target and draft have that in their caches."""
    chat = words(BLOCK * 2)
    for turn in range(TURNS):
        before = watched.counters()["prefill"]
        (output,) = answers(watched.llm, [chat], LONGER)
        assert accepted(output) == ALL, f"in turn {turn + 1}"
        assert [tokens_of(output)] == own_texts(tiny, [chat], LONGER)
        if turn:
            assert output.num_cached_tokens > len(chat) // 2
            assert watched.counters()["prefill"] - before < len(chat) // 2
        chat += tokens_of(output) + words(30)


def test_sleep_and_wake(watched, plain):
    """It sleeps for long: the keeper does not take it for a draft that hangs."""
    at_work(watched, plain)
    watched.llm.sleep(level=1)
    assert not watched.serves(), "asleep before sleep() returns"
    time.sleep(HANG_S + 1)
    watched.llm.wake_up()
    found, counted = watched.news()
    assert found == plain
    assert counted["timeouts"] == 0
    wait_for("draft", watched.serves)
    at_work(watched, plain)
    assert watched.counters()["restarts"] == 0


def reload(watched: Watched, folder: Path) -> None:
    watched.llm.collective_rpc("reload_draft", args=(str(folder),))
    wait_for("draft", watched.serves)


def of_another_function(folder: Path, **changes: Any) -> Path:
    tiny_llama(2, 400, tie_word_embeddings=True, **changes).save_pretrained(folder)
    return folder


def has_other_weights(watched: Watched, plain: Any) -> None:
    found, counted = watched.news()
    assert found == plain
    assert rates(counted)["tokens_per_round"] < 1.5, "another function's drafts were accepted"


def test_other_weights(watched, plain, tiny, tmp_path):
    reload(watched, of_another_function(tmp_path / "other"))
    has_other_weights(watched, plain)
    wide = of_another_function(tmp_path / "wide", hidden_size=128)
    half = shutil.copytree(tiny, tmp_path / "half")
    (half / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-1000])
    for folder, said in (
        (tmp_path, "no config.json"),
        (wide, "is of another model"),
        (half, "new weights cannot be loaded"),
    ):
        with pytest.raises(Exception, match=said):
            reload(watched, folder)
    wait_for("draft", watched.serves)
    has_other_weights(watched, plain)
    reload(watched, tiny)
    at_work(watched, plain)


def test_new_weights_during_a_sleep(watched, plain, tiny, tmp_path):
    """As a trainer gives them: while the engine wakes up in parts. They stay through the next
    sleep. (On CPUs vLLM itself keeps the target's weights.)"""

    def sleep(folder: Path | None = None) -> None:
        watched.llm.sleep(level=2)
        watched.llm.wake_up(["weights"])
        if folder is not None:
            watched.llm.collective_rpc("reload_draft", args=(str(folder),))
            assert not watched.serves()
        watched.llm.wake_up(["kv_cache"])
        wait_for("draft", watched.serves)

    sleep(of_another_function(tmp_path / "other"))
    has_other_weights(watched, plain)
    sleep(tiny)
    at_work(watched, plain)
    sleep()
    at_work(watched, plain)


def listening(processes):
    """The addresses that TCP sockets of these listen at."""
    sockets = [socket for process in processes for socket in process.net_connections("tcp")]
    open_ones = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return {address.removeprefix("::ffff:") for address in open_ones}


def test_the_draft_leaves_by_itself_and_the_next_start_removes_the_rest(watched):
    run_dir = watched.run_dir
    watched.news()
    assert listening(processes_of(run_dir)) == {"127.0.0.1"}
    # Ray's agents outlive a Ray that is killed by a minute or so: they hold nothing of ours.
    own = [p for p in processes_of(run_dir) if "Agent" not in p.name()]
    children = psutil.Process().children(recursive=True)
    living = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    core = next(c for c in living if "EngineCore" in " ".join(c.cmdline()))
    keeper = next(p for p in own if "vllm_ssd.service.keeper" in " ".join(p.cmdline()))
    assert len(own) > 2, "Ray and the draft server should be among them"
    files = {str(run_dir), str(rundir.table_path(run_dir))}
    for process in (core, keeper):
        process.kill()
    wait_for("end of the draft", lambda: not psutil.pid_exists(keeper.pid))
    wait_for("end of the draft", lambda: set(leftovers(run_dir, own)) <= files)
    rundir.sweep()
    assert leftovers(run_dir, own) == []
