"""What the benchmarks share: options of engines, and what made a result."""

import argparse

import pytest

from benchmarks.common.about import about_run, is_uncompiled
from benchmarks.common.arguments import add_engine_arguments, engine_arguments
from benchmarks.common.models import Model

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
