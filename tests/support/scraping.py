"""Metrics as a Prometheus server reads them."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

Values = dict[str, dict[tuple[str, ...], float]]


def scrape(url: str) -> Values:
    """What the server at this address says now, as ``values``."""
    answer = httpx.get(f"{url}/metrics", follow_redirects=True, timeout=60)  # of a busy machine
    assert answer.status_code == httpx.codes.OK
    return values(answer.text)


def values(text: str) -> Values:
    """Of ssd's metrics, by name and by the values of all labels but the model's name: the engine,
    then the metric's own."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:ssd_"):
                labels = dict(sample.labels)
                del labels["model_name"]
                of_name = found.setdefault(sample.name, {})
                key = tuple(labels.values())
                assert key not in of_name, f"{sample.name} is there twice"
                of_name[key] = sample.value
    return found
