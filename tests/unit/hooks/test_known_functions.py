"""The functions that are replaced are those of a vLLM that ssd was made for."""

from tests.support.known_functions import changed_functions, installed


def test_all_of_this_vllm_are_known():
    assert changed_functions(installed()) == []


def test_one_with_another_body_and_those_that_are_gone_are_named(tmp_path):
    path = tmp_path / "vllm" / "engine" / "arg_utils.py"
    path.parent.mkdir(parents=True)
    source = (installed() / "vllm" / "engine" / "arg_utils.py").read_text()
    head, begin, rest = source.partition("def create_engine_config(")
    path.write_text(f"# Another line\n{head}{begin}{rest.replace('self.', 'self . ', 1)}")
    changed = changed_functions(tmp_path)
    assert "vllm.engine.arg_utils:EngineArgs.create_engine_config" in changed
    assert "vllm.engine.arg_utils:EngineArgs.create_speculative_config" not in changed
    assert "vllm.v1.executor.abstract:Executor.__init__" in changed
