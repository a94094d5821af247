"""The functions that are replaced are those of a vLLM that ssd was made for."""

from __future__ import annotations

from pathlib import Path

from tests.support.known_functions import KNOWN, changed_functions, fingerprints, installed


def test_all_of_this_vllm_are_known():
    assert changed_functions(installed()) == []


def test_a_function_with_another_body_is_named(monkeypatch):
    """And none that only has another place in its file."""
    original = Path.read_text

    def read(path: Path) -> str:
        head, found, tail = original(path).partition("def create_engine_config(")
        return f"# Another line\n{head}{found}{tail.replace('self.', 'self . ', 1)}"

    monkeypatch.setattr(Path, "read_text", read)
    changed = changed_functions(installed())
    assert changed == ["vllm.engine.arg_utils:EngineArgs.create_engine_config"]


def test_a_module_that_is_gone(tmp_path):
    found = {fingerprint for _, fingerprint in fingerprints(tmp_path)}
    assert found == {""} and "" not in KNOWN
