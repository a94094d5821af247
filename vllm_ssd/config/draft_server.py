"""The option ``draft_server``: checks and adds the options that a draft server fixes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.transformers_utils.repo_utils import resolve_revision

from vllm_ssd.bridge.finding import described
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.log import get_logger
from vllm_ssd.service.server_spec import absolute, plain
from vllm_ssd.table.draft_names import NAME, CommonOptions, NoDraftServer, find_all

logger = get_logger(__name__)

# How long an engine waits for the name of a draft server that may have been started with it.
BEGINS_S = 30.0
# Options that a draft server fixes for all its engines. Engines may leave them out.
COMMON = CommonOptions.__struct_fields__
# Those that decide whose code comes with the draft's model.
_OF_CODE = ("model", "revision", "code_revision")
# Options of the draft's process, which an engine cannot change because it already runs.
OF_ITS_PROCESS = (
    "draft_device",
    "draft_dtype",
    "draft_kv_cache_gib",
    "draft_load_config",
    "draft_max_num_batched_tokens",
    "max_restarts",
    "quantization",
    "tree_backend",
)
# Options that are flags of ``vllm-ssd draft``. It has words of its own for the others of above.
_OWN_WORDS = {"model", "max_model_len", "draft_device", "draft_dtype"}
FLAGS = {*COMMON, *OF_ITS_PROCESS, "start_timeout_s"} - _OWN_WORDS


def common_options(config: SSDConfig) -> CommonOptions:
    """The options that a draft with this config fixes for its engines."""
    options = {option: getattr(config, option) for option in COMMON}
    options["model"] = absolute(config.draft_model)
    assert config.draft_model_config is not None
    options["revision"] = plain(config.draft_model_config.revision)
    options["draft_top_m"] = config.top_m or None
    return CommonOptions(**options)


def with_common_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an engine with a ``draft_server``, completed by those that the server fixes.
    Raises ``ValueError`` with a sentence if no draft has the name or the options do not fit."""
    name, address = given.get("draft_server"), given.get("ray_address")
    if not isinstance(name, str):
        raise ValueError(
            "ray_address is about a draft server in a Ray cluster: add its name as draft_server"
        )
    if given.get("vocabulary", "same") != "same":
        raise ValueError(
            "a draft server knows its own vocabulary only: leave out vocabulary, or draft_server"
        )
    fixed = msgspec.structs.asdict(_wait_for(name, address))
    for option in OF_ITS_PROCESS:
        if option in given:
            raise ValueError(
                f"{option} is fixed when a draft starts, and the draft server {name!r} runs "
                f"already: leave {option} out, or give it to 'vllm-ssd draft'"
            )
    for option in COMMON:
        theirs, ours = fixed[option], given.get(option)
        if option == "model" and isinstance(ours, str):
            ours = absolute(ours)
        meant = ours
        if option == "revision" and isinstance(ours, str):
            meant = plain(resolve_revision(fixed["model"], ours))
        if meant not in (None, theirs):
            raise ValueError(
                f"{option} is {ours!r} in --speculative-config and {theirs!r} at the draft server "
                f"{name!r}, which fixes it for all its engines: leave {option} out"
            )
    del fixed["max_model_len"]  # not taken over: the target's texts may be shorter
    common = {option: value for option, value in fixed.items() if value is not None}
    named_here = all(option in given for option in _OF_CODE if option in common)
    return {**given, **common, "model_named_here": named_here}


def _wait_for(name: str, address: Any) -> CommonOptions:
    """What the draft server fixes, once there is one. address: its Ray cluster's, or None."""
    if not re.match(NAME, name):
        raise ValueError(
            f"draft_server {name!r} cannot be the name of a draft server: write the --name that "
            "'vllm-ssd draft' was started with"
        )
    deadline, said = time.monotonic() + BEGINS_S, False
    options: CommonOptions | None
    while True:
        try:
            if isinstance(address, str):
                options = described(address, name, int(time.monotonic() // 60))
            else:
                options = find_all(name)[0][1].options
            break
        except NoDraftServer as error:
            if time.monotonic() > deadline:
                raise ValueError(str(error)) from None
            if not said:
                logger.info("SSD: waiting up to %.0f s: %s", BEGINS_S, error)
            said = True
        time.sleep(0.2)
    assert options is not None, "the service is not of a data parallel group, by its name"
    return options
