"""How the command ``vllm`` ends after an error in the options of ssd, and after any other."""

import signal
import sys

import pytest

from vllm_ssd.config import options as options_module

BAD = {"method": "ssd", "kk": 3}


@pytest.fixture
def ends(engine_args, monkeypatch, capsys):
    """What is printed if the error of these options ends the process, by a program of this name."""

    def ends(options, program="/usr/bin/vllm") -> str:
        monkeypatch.setattr(sys, "argv", [program])
        monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
        with pytest.raises(ValueError) as error:
            engine_args(options).create_engine_config()
        capsys.readouterr()
        sys.excepthook(error.type, error.value, error.tb)
        return capsys.readouterr().err

    return ends


@pytest.mark.parametrize("options", [BAD, {"method": "SSD"}, {"k": 3}])
def test_an_error_of_ssds_is_its_sentence(ends, options):
    said = ends(options)
    assert said.startswith("vllm: error: ") and said.count("\n") == 1
    assert ends(options, "/vllm/entrypoints/openai/api_server.py") == said


@pytest.mark.parametrize(
    ("options", "program", "level"),
    [
        (BAD, "my_program.py", "INFO"),
        ({"method": "ngram", "xyzzy": 3}, "vllm", "INFO"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "vllm", "INFO"),
        (BAD, "vllm", "DEBUG"),
    ],
)
def test_others_have_their_traceback(ends, options, program, level, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    assert ends(options, program) == "a traceback\n"


def test_bugs_and_later_errors_have_their_traceback(ends, capsys, monkeypatch):
    ends(BAD)
    sys.excepthook(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "a traceback\n"
    monkeypatch.setattr(options_module, "get_field", lambda *_: int("a bug"))
    assert ends({"method": "ssd", "prompt_lookup_max": 3}) == "a traceback\n"


def test_the_command_ends_with_the_sentence(models, monkeypatch, capsys):
    from vllm.entrypoints.cli.main import main

    options = ["--port", "0", "--speculative-config", '{"method":"ssd","kk":3}']
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", models.target, *options])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    at_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ValueError) as error:
            main()
    finally:
        signal.signal(signal.SIGTERM, at_sigterm)
    capsys.readouterr()
    sys.excepthook(error.type, error.value, error.tb)
    said = capsys.readouterr().err
    assert said.startswith("vllm: error: the speculative method 'ssd' has no option 'kk'")
    assert said.count("\n") == 1
