"""Runs the drafts of one ``vllm-ssd draft`` on this node."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from vllm_ssd.config.draft_checks import OTHER_DRAFT, check_source
from vllm_ssd.config.draft_server import FLAGS, common_options
from vllm_ssd.service.cores import available_cores, parse_cores
from vllm_ssd.service.draft_device import choose_lone_device
from vllm_ssd.service.errors import first_sentence
from vllm_ssd.service.launch import DraftLauncher, Keep, keep_in_process
from vllm_ssd.service.placement import device_names
from vllm_ssd.table.draft_names import DraftName

END_S = 15.0  # timeout for the drafts' end; the steps of their keepers take less


class LocalDrafts:
    """Several drafts on this node. Call ``start``, ``wait_ready``, ``tend`` now and then, and
    ``stop`` at any time. options: those that the service fixes for its engines. max_num_seqs: most
    requests that a draft serves at a time."""

    def __init__(
        self,
        configs: Sequence[VllmConfig],
        name: str,
        keep: Keep = keep_in_process,
        service: str = "",
    ):
        """Make a draft for each config. All have one service name. keep: see ``DraftLauncher``.
        service: see ``DraftName``; "" = a new one."""
        self.max_num_seqs = configs[0].scheduler_config.max_num_seqs
        self.options = common_options(configs[0].speculative_config)
        named = DraftName(name, self.options)
        if service:
            named = replace(named, service=service)
        devices = [choose_lone_device(config, current_platform) for config in configs]
        self._launchers = [
            DraftLauncher(config, named, device, keep) for config, device in zip(configs, devices)
        ]

    def start(self) -> None:
        """Begin to load the drafts. Raises ``ValueError`` or ``RuntimeError`` with a sentence."""
        for launcher in self._launchers:
            launcher.start()

    @property
    def run_dir(self) -> Path:
        """The run directory of the first draft."""
        return self._launchers[0].run_dir

    def wait_ready(self) -> None:
        """Wait until all drafts serve; ``RuntimeError`` with a sentence if one fails."""
        for launcher in self._launchers:
            launcher.wait_ready()

    def tend(self) -> bool:
        """Returns False if all drafts are lost for good."""
        return not all(launcher.given_up for launcher in self._launchers)

    def stop(self) -> None:
        """End all drafts at the same time and remove their files."""
        for launcher in self._launchers:
            launcher.begin_stop()
        for launcher in self._launchers:
            launcher.stop(END_S)


def make_configs(args: argparse.Namespace) -> Sequence[VllmConfig]:
    """A config for each draft; they differ in ``draft_device``. Raises ``ValueError`` with a
    sentence if a flag is invalid."""
    return [_make_config(args, device) for device in devices(args.device)]


def devices(given: str | None) -> list[str]:
    """A device for each draft; ``ValueError`` with a sentence if two drafts would share one."""
    on_cpu = current_platform.is_cpu()
    if given is None:
        return [",".join(map(str, available_cores())) if on_cpu else "0"]
    names = device_names(given, current_platform)
    if len(names) > 1:
        units = [unit for one in names for unit in (parse_cores(one) if on_cpu else [one])]
        if len(set(units)) < len(units):
            twice = max(units, key=units.count)
            said = f"--device {given!r} has {twice} twice"
            raise ValueError(f"{said}: name a device of its own for each draft")
    return names


def _make_config(args: argparse.Namespace, device: str) -> VllmConfig:
    """Config of an engine whose target is the draft itself, so that vLLM makes all start checks."""
    check_source(args.model, args.revision)
    given = {option: getattr(args, option) for option in FLAGS}
    speculation = {"method": "ssd", "model": args.model, "draft_device": device, **given}
    try:
        engine = EngineArgs(
            model=args.model,
            revision=args.revision,
            code_revision=args.code_revision,
            trust_remote_code=args.trust_remote_code,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            speculative_config=speculation,
        )
        return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ImportError, OSError, ValueError) as error:
        if type(error) is ValueError:  # a sentence, written for engines
            raise ValueError(str(error).replace(OTHER_DRAFT, "name another MODEL")) from None
        said = f"vLLM does not take the draft {args.model!r} ({first_sentence(error)})"
        raise ValueError(f"{said}: change what vLLM names") from error
