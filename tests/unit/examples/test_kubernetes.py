"""The manifests are what Kubernetes takes, by its own schemas. Those do not know KubeRay's object,
whose pods are checked by them, and whose other fields by the names that KubeRay 1.0 gives them."""

from __future__ import annotations

import argparse
import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from vllm_ssd.config.options import OPTIONS
from vllm_ssd.tools.draft_server import command
from vllm_ssd.tools.draft_server.placed import labels

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
# Of Kubernetes: the oldest that its makers still mend, and the newest.
VERSIONS = ("1.35", kubernetes_validate.latest_version())


class Group(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """rayStartParams: options of `ray start`. template: of a pod."""

    ray_start_params: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(Group, forbid_unknown_fields=True, rename="camel"):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int


class RayCluster(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """The spec, as far as the manifests use it."""

    ray_version: str
    head_group_spec: Group
    worker_group_specs: list[WorkerGroup]


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


def words(container: dict[str, Any]) -> list[str]:
    """Of its command line, or of its script."""
    args = container.get("args", [])
    return shlex.split(args[0].replace("\\\n", "")) if len(args) == 1 else args


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_takes_it(file, version):
    checked = [*objects(file), *pods(objects(file))]
    assert len(checked) > 1
    for one in checked:
        if one["kind"] == "RayCluster":
            msgspec.convert(one["spec"], RayCluster)
        else:
            kubernetes_validate.validate(one, version, strict=True)


def test_a_misspelt_field_would_be_found():
    pod, container = next(both for both in containers() if "readinessProbe" in both[1])
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
    targets = [both for both in containers() if "--speculative-config" in words(both[1])]
    assert len(targets) == len(FILES)
    for pod, container in targets:
        args = words(container)
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


def test_a_draft_that_ray_places():
    """The command is one that `vllm-ssd draft` takes, and its labels are those of a group."""
    (file,) = (file for file in FILES if file.name == "ray.yaml")
    cluster, server, _ = objects(file)
    (container,) = server["spec"]["template"]["spec"]["containers"]
    script = words(container)
    begin = script.index("vllm-ssd") + 1
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(script[begin : script.index("&", begin)])
    groups = cluster["spec"]["workerGroupSpecs"]
    assert labels(args.ray_labels) in [labels(g["rayStartParams"]["labels"]) for g in groups]
    config = json.loads(script[script.index("--speculative-config") + 1])
    assert config["draft_server"] == args.name
    assert Path(config["draft_server_key"]) == args.key_file
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in script
