"""The manifests are what Kubernetes takes, by its own schemas."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllm_ssd.config.options import OPTIONS

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
# Of Kubernetes: the oldest that its makers still mend, and the newest.
VERSIONS = ("1.35", kubernetes_validate.latest_version())


def objects(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """The pods that an object, or a part of one, is a template for."""
    if isinstance(found, list):
        for part in found:
            yield from pods(part)
    elif isinstance(found, dict):
        if "template" in found:
            yield {"apiVersion": "v1", "kind": "Pod", **found["template"]}
        for part in found.values():
            yield from pods(part)


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each with its pod."""
    found = [pod for file in FILES for pod in pods(objects(file))]
    return [(pod, container) for pod in found for container in pod["spec"]["containers"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_takes_it(file, version):
    checked = [*objects(file), *pods(objects(file))]
    assert len(checked) > 1
    for one in checked:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_misspelt_field_would_be_found():
    (pod, container), *_ = containers()
    wrong = copy.deepcopy(pod)
    wrong["spec"]["containers"][0]["redinessProbe"] = container["readinessProbe"]
    with pytest.raises(kubernetes_validate.ValidationError, match="redinessProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_names_lead_somewhere():
    """Volumes that are mounted are the pod's, a service's pods and a deployment's are there."""
    for pod, container in containers():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
    for file in FILES:
        labels = [pod["metadata"]["labels"] for pod in pods(objects(file)) if "metadata" in pod]
        for one in objects(file):
            selector = one["spec"].get("selector", {})
            wanted = selector.get("matchLabels", selector).items()
            assert not wanted or any(wanted <= its.items() for its in labels)


def test_what_a_target_needs():
    """A configuration that ssd takes, shared memory, pages that may be locked, its GPUs."""
    targets = [both for both in containers() if "--speculative-config" in both[1].get("args", ())]
    assert targets
    for pod, container in targets:
        args = container["args"]
        config = json.loads(args[args.index("--speculative-config") + 1])
        assert config.pop("method") == "ssd"
        assert set(config) <= set(OPTIONS)
        (ranks,) = (int(arg.split("=")[1]) for arg in args if arg.startswith("--tensor-p"))
        own_draft = int("draft_server" not in config)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks + own_draft
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        (shm,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm")
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == shm)
        assert volume["emptyDir"]["medium"] == "Memory"
