"""The screen of ``check``, what makes its exit status, its file for a bug report, and what it says
of vLLM, Ray, and vLLM's choice of plugins."""

import importlib.metadata
import json
import sys

import pytest
import vllm

from vllm_ssd import __version__, cli
from vllm_ssd.table import SpeculationTable, TableOwner, TableShape, rundir
from vllm_ssd.tools.check import command, software
from vllm_ssd.tools.check.findings import Finding, gib, refusal
from vllm_ssd.tools.check.report import without_secrets
from vllm_ssd.tools.check.software import examine_software

FINE = Finding("ok", "vLLM", "0.33.0")
SLOW = Finding("note", "attention", "triton is wrong", "none: sdpa is used instead")
INSTALL = "install a supported vLLM"
WRONG = Finding("bad", "draft", "has another vocabulary", "name another")


@pytest.mark.parametrize(
    "findings, status, end",
    [
        ([FINE], 0, "ssd can start"),
        ([FINE, SLOW], 0, "ssd can start, 1 to note"),
        ([FINE, WRONG], 1, "ssd could not start: 1 of 2 lines are bad"),
    ],
)
def test_each_line_is_printed_as_soon_as_it_is_known(findings, status, end, monkeypatch, capsys):
    def look(*_):
        for each in findings:
            yield each
            assert capsys.readouterr().out == f"{each.shown()}\n"

    monkeypatch.setattr(command, "_look", look)
    assert cli.main(["check"]) == status
    assert capsys.readouterr().out == f"\n{end}\n"


def test_a_refusal_ends_with_its_remedy():
    finding = refusal("draft", ValueError("SSD: no room (a: b): free some"))
    assert finding == Finding("bad", "draft", "no room (a: b)", "free some")
    assert refusal("draft", ValueError("k must be 1")) == Finding("bad", "draft", "k must be 1")
    assert gib(2**30 * 1.5) == "1.50 GiB" and gib(2**30 * 139.2) == "139 GiB"


def test_a_report_has_all_but_secrets(tmp_path, monkeypatch, capsys):
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
    assert cli.main(["check", "--report", "-"]) == 1
    assert "## counters" in capsys.readouterr().out and not sys.stdout.closed
    (engine,) = json.loads(text.partition("## counters")[2])
    assert engine["model"] == "the model"
    words = "T --api-key=a --hf-token b --api-key c d -tp 4 --max-num-batched-tokens 8"
    without = "T --api-key=... --hf-token ... --api-key ... ... -tp 4 --max-num-batched-tokens 8"
    assert list(without_secrets(words.split())) == without.split()


def test_the_target_comes_first(capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "-tp", "2", "the/target"])
    assert "TARGET comes first, before the arguments" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "--report", str(tmp_path / "nowhere" / "report.txt")])
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("plugins", [None, "a,ssd"])
def test_software_is_in_order(monkeypatch, plugins):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert [each.state for each in examine_software()] == ["ok"] * 3


def no_version(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    "set_up, name, fact, remedy",
    [
        (lambda p: p.setattr(software, "version", no_version), None, "ray", "pip install"),
        (lambda p: p.setenv("VLLM_PLUGINS", "another"), None, "", "add ssd"),
        (lambda p: p.setenv("VLLM_PLUGINS", ""), None, "", "add ssd"),
        (lambda p: p.setattr(vllm, "__version__", "0.1.0"), "platform", "0.1.0", INSTALL),
    ],
)
def test_software_that_is_not(monkeypatch, set_up, name, fact, remedy):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    set_up(monkeypatch)
    *_, found = examine_software()
    assert found.state == "bad" and fact in found.fact and remedy in found.remedy
    assert name in (None, found.name)
