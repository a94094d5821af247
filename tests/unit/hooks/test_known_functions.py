"""The functions that are replaced are those of the installed vLLM that ssd was made for."""

from __future__ import annotations

from pathlib import Path

from vllm_ssd.hooks import known_functions

FUNCTION = "def create_engine_config("


def test_all_of_this_vllm_are_known():
    assert known_functions.changed_functions() == []


def test_a_function_with_another_body(tmp_path, monkeypatch):
    """It is named, and nothing else of its file."""
    original = known_functions._file

    def file(module: str, folder: Path | None) -> Path:
        path = original(module, folder)
        text = path.read_text()
        if FUNCTION not in text:
            return path
        head, _, tail = text.partition(FUNCTION)
        copy = tmp_path / path.name
        copy.write_text(f"# Another line\n{head}{FUNCTION}{tail.replace('self.', 'self . ', 1)}")
        return copy

    monkeypatch.setattr(known_functions, "_file", file)
    changed = known_functions.changed_functions()
    assert changed == ["vllm.engine.arg_utils.EngineArgs.create_engine_config"]


def test_a_module_that_is_gone(tmp_path):
    found = {fingerprint for _, fingerprint in known_functions._fingerprints(tmp_path)}
    assert found == {""} and "" not in known_functions.KNOWN
