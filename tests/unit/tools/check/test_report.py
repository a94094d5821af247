"""The file that ``check --report`` writes for a bug report."""

import json
import sys

import pytest

from vllm_ssd import __version__, cli
from vllm_ssd.protocol import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.tools.check import software
from vllm_ssd.tools.check.findings import Finding
from vllm_ssd.tools.check.report import without_secrets

WRONG = Finding("bad", "draft", "has another vocabulary", "name another")


def test_it_has_all_but_secrets(tmp_path, monkeypatch):
    shape = TableShape(slots=1, k=2, branches=2)
    SpeculationTable.create(tmp_path / "table", shape, TableOwner("the model", 0, 4321))
    monkeypatch.setattr(rundir, "tables", lambda: [tmp_path / "table"])
    monkeypatch.setattr(software, "examine_software", lambda: iter([WRONG]))
    monkeypatch.setenv("VLLM_API_KEY", "verysecret")
    monkeypatch.setenv("VLLM_USE_X", "1")
    words = ["check", "T", "--report", str(tmp_path / "report.txt"), "--api-key", "verysecret"]
    monkeypatch.setattr(sys, "argv", ["vllm-ssd", *words])
    assert cli.main(words) == 1
    text = (tmp_path / "report.txt").read_text()
    assert "verysecret" not in text
    assert f"vllm-ssd {__version__}" in text and "VLLM_USE_X=1" in text and "--api-key ..." in text
    assert WRONG.shown() in text
    (engine,) = json.loads(text.partition("## counters")[2])
    assert engine["model"] == "the model"


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "--report", str(tmp_path / "nowhere" / "report.txt")])
    assert "No such file" in capsys.readouterr().err


def test_values_of_secret_options_are_left_out():
    words = ["T", "--api-key=a", "--hf-token", "b", "-tp", "4"]
    assert list(without_secrets(words)) == ["T", "--api-key=...", "--hf-token", "...", "-tp", "4"]
