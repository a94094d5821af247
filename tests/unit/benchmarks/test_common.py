"""What the benchmarks share: models by name, options of engines, what is said of figures."""

import argparse
from pathlib import Path

import pytest

from benchmarks.common import models
from benchmarks.common.about import about_run, is_uncompiled
from benchmarks.common.arguments import add_engine_arguments, engine_arguments
from benchmarks.common.models import Model, find_model

MODEL = Model("m", "m", "auto", "m")


def engine(*words: str, on_gpus: bool) -> dict:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_arguments(parser.parse_args(words), MODEL, MODEL, on_gpus)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_engines_have_vllms_defaults_unless_compilation_is_off(on_gpus):
    plain, off = (engine(*words, on_gpus=on_gpus) for words in ([], ["--no-compile"]))
    assert not is_uncompiled(plain) and is_uncompiled(off)
    added = off.keys() - plain.keys()
    assert added == {"compilation_config" if on_gpus else "enforce_eager"}


def test_results_say_what_made_them():
    about = about_run("benchmarks.x", ["--k", "a b"], [], {"enforce_eager": True})
    assert about["command"] == "python -m benchmarks.x --k 'a b'"
    assert "CPU cores, " in about["machine"] and "torch" in about["versions"]
    assert about["compilation"] == "off" and about["commit"] and len(about["date"]) == 10
    assert about_run("x", [], ["H200", "H200"], {})["machine"] == "H200, H200"


@pytest.mark.parametrize("extended", [False, True])
def test_extended_standins_are_called_so(extended, monkeypatch):
    monkeypatch.setattr(models, "ensure_standin", lambda *_: Path("made"))
    monkeypatch.setattr(models, "is_extended", lambda _: extended)
    found = find_model("draft-1b", Path("."), "auto", [14], 32768)
    assert found.name == "draft-1b" and "without layer 14" in found.about
    assert ("32768 positions" in found.about and "for timing only" in found.about) == extended
