"""The benchmark without engines: its load, its figures, its sides and their processes."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks.common.arguments import combinations
from benchmarks.common.models import Model
from benchmarks.common.prompts import make_prompts
from benchmarks.common.records import Load, Measurement, Result, Speculation
from benchmarks.common.sides import Plan
from benchmarks.offline import __main__ as offline
from benchmarks.offline.process import run_side
from benchmarks.offline.run import run_together
from benchmarks.offline.saved import save_results
from benchmarks.offline.table import compare, make_rows, markdown
from benchmarks.offline.turns import Turns
from vllm_ssd.measure.closed_loop import ClosedLoop


class Engine:
    """Answers every request with a token after one step, then two a step, and never prefills and
    decodes another request in one step."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.had: dict[str, int] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict, sampling: object) -> None:
        self.had[name] = 0
        self.most = max(self.most, len(self.had))

    def step(self) -> list:
        new = [name for name, had in self.had.items() if had == 0]
        outputs = []
        for name in new or list(self.had):
            count = min(1 if new else 2, self.length - self.had[name])
            self.had[name] += count
            finished = self.had[name] == self.length
            tokens = SimpleNamespace(token_ids=[7] * count)
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens], finished=finished))
            if finished:
                del self.had[name]
        return outputs


@pytest.mark.parametrize("batch", [1, 3])
def test_closed_loop(batch: int) -> None:
    engine, readings = Engine(9), iter([{"at": "begin"}, {"at": "end"}])
    loop = ClosedLoop(engine, batch, lambda _: None, lambda: next(readings))
    window = loop.run([[1, 2]] * 2 * batch, "x")
    assert window.texts == [[7] * 9] * 2 * batch
    assert engine.most == batch and not engine.had
    assert (window.before, window.after) == ({"at": "begin"}, {"at": "end"})
    # Two waves of four decode steps, and the second wave's first tokens in between.
    assert window.steps == 8 and window.rounds == 8 * batch
    assert window.round_tokens == 16 * batch and window.tokens == 17 * batch
    assert 0 < window.step_seconds < window.seconds


def test_requests_of_different_lengths() -> None:
    load = Load(batch_sizes=[4], requests=100, tokens=200, prompt_tokens=16)
    lengths = [load.tokens_of(number) for number in range(100)]
    assert min(lengths) == 100 and 290 < max(lengths) <= 300
    assert abs(sum(lengths) / 100 - 200) < 2 and len(set(lengths)) > 80
    assert load.requests_at(4) == 100 and load.requests_at(64) == 128, "two for each place"
    asked = []
    ClosedLoop(Engine(3), 2, asked.append, dict).run([[1]] * 4, "x")
    assert asked == [0, 1, 2, 3], "each by its number"


def test_a_batch_that_is_never_full() -> None:
    window = ClosedLoop(Engine(9), 3, lambda _: None, dict).run([[1]] * 2, "x")
    assert window.before is None and window.texts == [[7] * 9] * 2


LOAD = Load(batch_sizes=[1, 4], requests=3, tokens=8, prompt_tokens=16)
PLAN = Plan(
    engine={"model": "target"},
    draft="draft",
    tensor_parallel=2,
    on_gpus=True,
    load=LOAD,
    kinds=["ar", "verify", "draft_model", "sd", "ssd", "away"],
    draft_model=[3, 5],
    sd=[7],
    ssd=[(7, 1), (7, 3)],
    options=[{}],
)


def test_sides() -> None:
    sides = {side.name: side for side in PLAN.sides()}
    assert list(sides) == [
        *("ar", "verify k=7", "draft_model k=3", "draft_model k=5"),
        *("sd k=7", "ssd k=7 f=1", "ssd k=7 f=3", "away k=7"),
    ]
    assert [side.gpus for side in sides.values()] == [2, 2, 2, 2, 3, 3, 3, 3]
    assert "speculative_config" not in sides["ar"].engine
    options = {"method": "ssd", "model": "draft", "k": 7, "f": 0, "on_miss": "wait"}
    assert sides["sd k=7"].engine["speculative_config"] == options
    assert not any("max_num_seqs" in side.engine for side in sides.values()), "vLLM's default"
    away = sides["away k=7"].engine["speculative_config"]
    assert away == sides["ssd k=7 f=3"].engine["speculative_config"] | {"max_restarts": 0}
    on_cpu = dataclasses.replace(PLAN, on_gpus=False, kinds=["verify", "ssd"]).sides()
    assert [(side.kind, side.gpus) for side in on_cpu] == [("ssd", 0), ("ssd", 0)]
    told = dataclasses.replace(PLAN, options=[{"on_miss": "auto"}], kinds=["sd"]).sides()[0]
    assert told.name == "sd k=7 on_miss=auto"
    assert told.engine["speculative_config"] == {**options, "on_miss": "auto"}


def test_environment_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    monkeypatch.setenv("PYTHONPATH", "mine")
    environment = PLAN.sides()[0].environment
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert environment["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
    assert environment["PYTHONPATH"].endswith(":mine")


def measured(
    name: str,
    rate: float,
    texts: list,
    speculation: Speculation | None = None,
    temperature: float = 0.0,
) -> Result:
    """A side at batch size 1 that made `rate` tokens/s, with steps of `rate` / 10 ms."""
    side = next(side for side in PLAN.sides() if side.name == name)
    tokens = int(2 * rate)
    measurement = Measurement(
        batch=1,
        seconds=2.0,
        tokens=tokens,
        rounds=10,
        round_tokens=40,
        steps=10,
        step_seconds=rate / 1000,
        speculation=speculation,
        texts=texts,
        temperature=temperature,
    )
    return Result(side, [measurement])


def test_figures() -> None:
    texts = [[1, 2, 3], [4, 5, 6]]
    ours = Speculation([0.8, 0.6], 0.7, 0.2, 0.1, 0.5, 2.0, 1.0)
    results = [
        measured("ar", 50, texts),
        measured("verify k=7", 60, texts),
        measured("draft_model k=3", 100, texts),
        measured("draft_model k=5", 80, texts),
        measured("sd k=7", 120, texts),
        measured("ssd k=7 f=3", 240, [[1, 2, 3], [4, 9, 6]], ours),
    ]
    results.append(Result(PLAN.sides()[5], error="exit status 1\nno memory"))
    rows = {row.side: row for row in make_rows(results)}
    ssd = rows["ssd k=7 f=3"]
    assert (ssd.over_ar, ssd.over_draft_model, ssd.over_f0) == (4.8, 2.4, 2.0)
    assert (ssd.tokens_per_s, ssd.tokens_per_s_gpu, ssd.tokens_per_round) == (240, 80, 4)
    assert ssd.ms_per_round == 24 and ssd.verify_ms == rows["verify k=7"].ms_per_round == 6
    assert rows["draft_model k=5"].verify_ms is None  # measured at another k only
    assert ssd.text == "1 of 2 part, text 2 after 1 tokens" and rows["sd k=7"].text == "identical"

    table = markdown(make_rows(results), results[-1:])
    assert "| 70% / 20% / 10% |" in table and "| ssd k=7 f=1 | failed |" in table
    assert table.endswith("exit status 1\nno memory\n```")
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_each_temperature_is_compared_with_its_own() -> None:
    results = [
        measured(name, rate, [[1]], temperature=temperature)
        for temperature in (0.6, 0.0)
        for name, rate in (("ar", 50 + 10 * temperature), ("ssd k=7 f=3", 112))
    ]
    rows = [row for row in make_rows(results) if row.side != "ar"]
    assert [row.temperature for row in rows] == [0.0, 0.6]
    assert [row.over_ar for row in rows] == [2.24, 2.0]
    assert [row.text for row in rows] == ["identical", None]


def test_texts_of_different_length_part() -> None:
    assert compare([[1, 2, 3]], [[1, 2]]) == "1 of 1 part, text 1 after 2 tokens"


class Tokenizer:
    """A token a word, and no chat template."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return text.split()

    def decode(self, tokens: list[str]) -> str:
        return " ".join(tokens)


def test_prompts() -> None:
    prompts = make_prompts(Tokenizer(), 40, 500)
    assert all(len(prompt) == 500 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert make_prompts(Tokenizer(), 3, 500) == prompts[:3]


def write_script(tmp_path: Path, code: str) -> Path:
    """A side's process that does `code`; `side` is what it is told, `events` where it reports."""
    script = tmp_path / "script"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\nevents = int(sys.argv[3])\n"
        f"side = sys.stdin.readline()\n{code}\n"
    )
    script.chmod(0o700)
    return script


def run(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    script = write_script(tmp_path, code)
    monkeypatch.setattr(sys, "executable", str(script))
    return run_side(PLAN.sides()[0], tmp_path / "log", 5.0, lambda text: None, Turns(1))


def test_failed_side_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = (
        '{"type":"Measurement","batch":1,"seconds":1.0,"tokens":9,"rounds":1,"round_tokens":1,'
        '"steps":1,"step_seconds":1.0,"speculation":null,"texts":[]}'
    )
    code = f"os.write(events, b'{event}' + bytes([10]))\nsys.exit('no memory left')"
    result = run(tmp_path, code, monkeypatch)
    assert [measurement.tokens for measurement in result.measurements] == [9]
    assert result.error == "exit status 1\nno memory left"


def test_side_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, "print('waiting', flush=True)\ntime.sleep(600)", monkeypatch)
    assert result.error == "not done after 5 s\nwaiting"


def test_no_side_is_measured_while_another_starts_or_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one fails at its start, which the others do not wait for."""
    log, names = tmp_path / "what", ("one", "two", "three")
    code = f"""
name = json.loads(side)["name"]
def note(what):
    with open({str(log)!r}, "a") as file: file.write(what + chr(10))
time.sleep({{"one": 0, "two": 0.3, "three": 0.6}}[name])
note("start")
if name == "two": sys.exit("no memory left")
os.write(events, b'{{"type":"Up"}}' + bytes([10]))
sys.stdin.readline()
note("begin"); time.sleep(0.1); note("end")
"""
    monkeypatch.setattr(sys, "executable", str(write_script(tmp_path, code)))
    sides = [msgspec.structs.replace(PLAN.sides()[0], name=name) for name in names]
    results = list(run_together(sides, tmp_path, 5.0))
    assert [result.error is None for result in results] == [True, False, True]
    assert log.read_text().split() == ["start"] * 3 + ["begin", "end"] * 2


def test_files_saved_before_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that sides can run in several commands, or on several machines."""
    monkeypatch.setattr(offline, "find_model", lambda name, *_: Model(name, name, "auto", name))
    monkeypatch.setattr(offline, "visible_gpus", lambda *_: [])
    files = [tmp_path / "ar.json", tmp_path / "ssd.json"]
    for file, name, rate in zip(files, ("ar", "ssd k=7 f=3"), (50, 200)):
        save_results(file, {}, [measured(name, rate, [[1, 2]])])
    join = [word for file in files for word in ("--join", str(file))]
    assert offline.main(["--sides", "", "--logs", str(tmp_path), *join]) == 0
    assert "| 1 | 0.0 | ssd k=7 f=3 | 200.0 | 4.00 |" in capsys.readouterr().out


def test_options_given_twice_are_sides_of_their_own() -> None:
    given = [("on_miss", "wait"), ("max_wait_ms", 2), ("on_miss", "skip")]
    assert combinations(given) == [
        {"on_miss": "wait", "max_wait_ms": 2},
        {"on_miss": "skip", "max_wait_ms": 2},
    ]
    assert combinations([]) == [{}]


def test_bad_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        (["--sides", "ar,magic"], "no such sides: magic"),
        (["--option", "max_wait_ms=x"], "not KEY=JSON"),
    ):
        with pytest.raises(SystemExit):
            offline.main(arguments)
        assert complaint in capsys.readouterr().err
