"""What frontends hear of an engine's table. tests/engine/test_parallel.py shows the metrics of two
engines, answered by several API servers."""

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.metrics import with_run_dir_heard, with_run_dir_told, with_ssd_metrics


@pytest.mark.parametrize("speculation", [None, SSDConfig(k=2, run_dir="/tmp/a")])
def test_of_engines_with_ssd_and_of_no_others(table, speculation):
    """vLLM reads of the response what it has sent. Metrics that are made twice are there once."""
    fields = dataclasses.fields(EngineCoreReadyResponse)
    needed = [field for field in fields if field.default is dataclasses.MISSING]
    values = {f.name: f.type() if isinstance(f.type, type) else None for f in needed}
    response = EngineCoreReadyResponse(**{**values, "data_parallel_rank": 1})
    model = SimpleNamespace(served_model_name="m")
    config = SimpleNamespace(speculative_config=speculation, model_config=model)
    process = SimpleNamespace(vllm_config=config)
    told = msgspec.msgpack.encode(with_run_dir_told(lambda core: response, process))
    with_run_dir_heard(lambda *_: None, process, told)
    assert msgspec.msgpack.decode(told, type=EngineCoreReadyResponse) == response
    assert speculation is None or speculation.run_dirs == {1: "/tmp/a"}

    for _ in range(2):
        unregister_vllm_metrics()  # as vLLM's logger begins
        with_ssd_metrics(lambda *_: None, None, config)
    found = generate_latest(REGISTRY).decode()
    unregister_vllm_metrics()
    assert found.count('vllm:ssd_draft_up{engine="1",model_name="m"}') == bool(speculation)
