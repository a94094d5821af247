"""From an engine that is ready to the metrics of its frontends: what is heard of its table."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.hooks.metrics import (
    with_run_dir_heard,
    with_run_dir_told,
    with_ssd_collected,
    with_ssd_metrics,
)
from vllm_ssd.hooks.patches import wrapped
from vllm_ssd.protocol import SpeculationTable, TableShape, rundir


def process(speculation):
    """An engine core or a frontend, as far as it is used."""
    model = SimpleNamespace(served_model_name="m")
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculation, model_config=model)
    )


def ready_response(engine):
    """vLLM's own, of the engine at this place in the data parallel group."""
    fields = dataclasses.fields(EngineCoreReadyResponse)
    needed = [field for field in fields if field.default is dataclasses.MISSING]
    values = {f.name: f.type() if isinstance(f.type, type) else None for f in needed}
    return EngineCoreReadyResponse(**{**values, "data_parallel_rank": engine})


def tell(core, frontend, engine):
    """One response from the core to the frontend, as vLLM sends it; returns what vLLM reads."""
    told = with_run_dir_told(lambda core: ready_response(engine), core)
    read = []

    def apply(frontend, payload):
        read.append(msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse))

    with_run_dir_heard(apply, frontend, msgspec.msgpack.encode(told))
    return read[0]


def test_a_frontend_hears_of_every_engine():
    frontend = process(SSDConfig(k=2))
    for engine, run_dir in ((1, "/tmp/b"), (0, "/tmp/a")):
        core = process(SSDConfig(k=2, run_dir=run_dir))
        assert tell(core, frontend, engine) == ready_response(engine)
    assert frontend.vllm_config.speculative_config.run_dirs == {0: "/tmp/a", 1: "/tmp/b"}


def test_other_methods_are_left_alone():
    core, frontend = process(None), process(None)
    assert tell(core, frontend, 0) == ready_response(0)
    assert with_run_dir_told(lambda core: "its own", core) == "its own"
    with_ssd_metrics(lambda *args: None, None, core.vllm_config)
    assert b"vllm:ssd" not in generate_latest(REGISTRY)


@pytest.fixture
def frontend(tmp_path, monkeypatch):
    """One with metrics of its engine, made twice."""
    monkeypatch.setattr(rundir, "table_path", lambda run_dir: run_dir / "table")
    SpeculationTable.create(tmp_path / "table", TableShape(slots=1, k=2, branches=2))
    frontend = process(SSDConfig(k=2, run_dirs={0: str(tmp_path)}))
    for _ in range(2):
        unregister_vllm_metrics()  # as vLLM's logger begins
        with_ssd_metrics(lambda *args: None, None, frontend.vllm_config)
    yield frontend
    unregister_vllm_metrics()


class OfFiles:
    """As ``MultiProcessCollector``, patched."""

    @partial(wrapped, wrapper=with_ssd_collected)
    def collect(self):
        yield CounterMetricFamily("others", "What the files have.", value=3)


@pytest.mark.usefixtures("frontend")
def test_one_of_several_api_servers_has_them_beside_those_of_the_files():
    own = CollectorRegistry()
    own.register(OfFiles())
    for registry in (own, REGISTRY):
        text = generate_latest(registry).decode()
        assert text.count('vllm:ssd_draft_up{engine="0",model_name="m"} 0.0') == 1
        assert ("others_total 3.0" in text) == (registry is own)
