"""Documented commands with models' names on the Hugging Face Hub, to where processes begin."""

import argparse
import json
import re
import shlex
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from examples import offline
from tests.support.hub_cache import CONFIGS, commit_of
from tests.support.pages import BLOCKS, Block, text_of
from vllm_ssd import cli
from vllm_ssd.config import target_checks
from vllm_ssd.config.default_drafts import FAMILIES
from vllm_ssd.service import launch
from vllm_ssd.service.draft_device import choose_device
from vllm_ssd.service.server_spec import ServerSpec, make_server_spec
from vllm_ssd.tools.check import machine
from vllm_ssd.tools.draft_server import command as draft
from vllm_ssd.tools.tune import command as tune

LLAMAS = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
SMOLLM2S = "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
# What stands for a model or a number in the pages.
MEANT = {
    "TARGET": LLAMAS[0],
    "DRAFT": LLAMAS[1],
    "ANOTHER": LLAMAS[1],
    "meta-llama/Llama-3.1-8B-Instruct": LLAMAS[0],
    ".models/smollm2": SMOLLM2S[0],
    ".models/draft-without-14": SMOLLM2S[1],
    "N": "2",
}
PROGRAMS = "vllm serve", "vllm-ssd check", "vllm-ssd tune", "vllm-ssd draft", "python -m examples.o"


def commands(block: Block) -> list[list[str]]:
    """The words of a block's commands that start something. Those of drafts on other nodes are left
    out."""
    found = []
    for line in block.code.splitlines():
        command = re.sub(r"^[A-Z_]+=\S+ ", "", line.strip())
        if command.startswith(PROGRAMS) and not re.search("ray.address", command):
            names = r"(?<![\w./-])(" + "|".join(map(re.escape, MEANT)) + r")(?![\w./-])"
            meant = re.sub(names, lambda match: MEANT[match[1]], command)
            found.append(shlex.split(meant, comments=True))
    return found


@pytest.fixture(autouse=True)
def machine_of_the_pages(hub, monkeypatch, tmp_path):
    """Eight devices, and no process that is started: a draft is ready at once."""

    def start(module, folder, spec, keep):
        ours, theirs = socket.socketpair()
        threading.Thread(target=keep_nothing, args=[theirs]).start()
        return ours, 0

    monkeypatch.setattr(launch, "start_detached", start)
    monkeypatch.setattr(target_checks, "available_cores", lambda: list(range(8)))
    monkeypatch.setattr(machine, "examine_machine", lambda *_: iter(()))
    monkeypatch.setattr(tune, "measure", lambda *_: {})
    monkeypatch.setattr(offline, "LLM", start_offline)
    # vLLM looks at each class of models in a process of its own, which takes seconds to start.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.txt").write_text("Why?")


def keep_nothing(channel: socket.socket) -> None:
    """A keeper without a draft."""
    with channel:
        channel.sendall(b'{"ready": "here"}\n')
        channel.recv(1)  # until it is told to end


class Started(Exception):
    """The engine of the offline example would be started now."""


def start_offline(model: str, **options: Any) -> None:
    start_draft(EngineArgs(model, **options))
    raise Started


def start_draft(engine: EngineArgs) -> dict[str, Any]:
    """The arguments with which the draft of this engine would be loaded; empty if the engine joins
    a draft server."""
    config: Any = engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
    speculation = config.speculative_config
    if speculation.draft_server is not None:
        assert speculation.revision == commit_of(speculation.draft_model)
        return {}
    device = choose_device(config, current_platform)
    spec = make_server_spec(config, "", device, current_platform)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ServerSpec) == spec
    arguments = spec.model.engine_args
    assert arguments["revision"] == commit_of(arguments["model"])
    return arguments


def serve(words: Sequence[str]) -> dict[str, Any]:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    args.model = args.model_tag  # as vLLM's command does
    return start_draft(AsyncEngineArgs.from_cli_args(args))


def start_service(words: Sequence[str], stack: ExitStack) -> None:
    """A draft server that runs until the end of ``stack``."""
    parser = argparse.ArgumentParser()
    draft.add_command(parser.add_subparsers())
    drafts = draft._make_drafts(parser.parse_args(words))
    stack.callback(drafts.stop)
    drafts.start()


def run(words: Sequence[str], stack: ExitStack, monkeypatch, capsys) -> None:
    model = next((word for word in words[::-1] if word in CONFIGS), None)
    match words:
        case "vllm", "serve", *rest:
            if "--speculative-config" in rest:
                serve(rest)
        case "vllm-ssd", "check", *rest:
            assert cli.main(["check", *rest]) == 0, capsys.readouterr().out
        case "vllm-ssd", "tune", *rest:
            assert cli.main(["tune", *rest]) == 1
            assert f"drafts {model}" in capsys.readouterr().err
        case "vllm-ssd", "draft", *rest:
            start_service(["draft", *rest], stack)
        case "python", "-m", "examples.offline", *rest:
            monkeypatch.setattr(sys, "argv", ["offline.py", *rest])
            with pytest.raises(Started):
                offline.main()


@pytest.mark.parametrize("block", [each for each in BLOCKS if commands(each)], ids=str)
def test_a_documented_command_reaches_its_processes(block, monkeypatch, capsys):
    with ExitStack() as stack:
        for words in commands(block):
            run(words, stack, monkeypatch, capsys)


def test_the_offline_engine_of_the_readme(monkeypatch):
    (block,) = (block for block in BLOCKS if "import LLM" in block.code)
    monkeypatch.setattr("vllm.LLM", start_offline)
    with pytest.raises(Started):
        exec(block.code, {})


def recipes() -> list[list[str]]:
    """Target, draft and arguments in each row of a table."""
    names = r"^\| `([\w./-]+)` \| `([\w./-]+)` \| .*? \| `(.*?)`"
    found = re.findall(names, text_of("docs/deployment.md"), re.M)
    return [[target, draft, *arguments.split()] for target, draft, arguments in found]


@pytest.mark.parametrize("recipe", recipes(), ids=" ".join)
def test_a_recipe(recipe):
    target, model, *arguments = recipe
    speculation = json.dumps({"method": "ssd", "model": model})
    started = serve([target, *arguments, "--speculative-config", speculation])
    assert started["model"] == model


TARGETS = {
    "Llama 3": LLAMAS[0],
    "Qwen3": "Qwen/Qwen3-32B",
    "Qwen2.5": "Qwen/Qwen2.5-72B-Instruct",
    "SmolLM2": SMOLLM2S[0],
    "gpt-oss": "openai/gpt-oss-120b",
    "ERNIE 4.5": "baidu/ERNIE-4.5-21B-A3B-PT",
    "Gemma 3": "google/gemma-3-1b-it",
    "OLMo": "allenai/Olmo-3-1125-32B",
    "Granite 4": "ibm-granite/granite-4.0-micro",
}
# vLLM's class for its draft imports torchvision, which is not here.
WITHOUT_A_CLASS = {"Mistral"}


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.name not in WITHOUT_A_CLASS],
    ids=lambda family: family.name,
)
def test_the_default_draft_of_a_family(family):
    arguments = serve([TARGETS[family.name], "--speculative-config", '{"method":"ssd"}'])
    assert arguments["model"] == family.draft
