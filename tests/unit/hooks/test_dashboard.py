"""The example's dashboard asks for metrics that a server has, with labels that these have."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
METRIC = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")


@pytest.fixture
def served(engine_args, models, table):
    """name -> labels, of all metrics of a server whose draft serves."""
    table.draft["heartbeat"] = time.monotonic_ns()
    config = engine_args({"method": "ssd", "k": 2, "model": models.draft}).create_engine_config()
    config.speculative_config.run_dirs[0] = "of an engine that has files"
    PrometheusStatLogger(config, [0])
    yield {s.name: set(s.labels) for family in REGISTRY.collect() for s in family.samples}
    unregister_vllm_metrics()


def queries():
    """The dashboard's, with the panels' titles, and the alerts'."""
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))
    for variable in DASHBOARD["templating"]["list"][1:]:
        yield variable["name"], variable["query"]
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


def test_every_query_names_a_metric_that_exists(served):
    asked = set()
    for title, query in queries():
        found = METRIC.findall(query)
        assert found, f"{title} asks for nothing"
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", query))))
        for name, selector in found:
            assert name in served, f"{title}: {name}"
            labels = set(re.findall(r"(\w+) *(?:=~|!=|!~|=)", selector)) | grouped
            assert labels <= served[name], f"{title}: {name} has no such labels"
            asked.add(name)
    families = {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked}
    ours = {name for name in served if name.startswith("vllm:ssd_")}
    shown = {name for name in ours if re.sub("_(total|bucket|sum|count)$", "", name) in families}
    assert {re.sub("_total$", "", name) for name in ours - shown} == {
        f"vllm:ssd_draft_{name}" for name in ("work", "rounds", "branches")
    }, "everything else is in a panel"
