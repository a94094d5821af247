"""The manifests are what Kubernetes takes, by its own schemas. Those do not know KubeRay's object,
whose pods are checked by them, and whose other fields by the names that KubeRay 1.0 gives them."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

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


def commands(container: dict[str, Any]) -> list[list[str]]:
    """The words of each command: that of the image with its arguments, or those of a script."""
    args = container.get("args", [])
    if len(args) != 1:
        return [["vllm", "serve", *args]] if args else []
    lines = args[0].replace("\\\n", "").splitlines()
    return [shlex.split(line.removeprefix("exec ").removesuffix("&")) for line in lines]


def served(container: dict[str, Any]) -> list[str]:
    """The words of its `vllm serve`."""
    (words,) = (words for words in commands(container) if words[:2] == ["vllm", "serve"])
    return words


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
    """Options that vLLM and ssd take, shared memory, pages that may be locked, models that stay,
    its GPUs, and no variables of services."""
    targets = [(pod, each) for pod, each in containers() if any(commands(each))]
    assert len(targets) == len(FILES)
    for pod, container in targets:
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(served(container)[2:])
        config = dict(args.speculative_config)
        assert config.pop("method") == "ssd"
        assert set(config) <= set(OPTIONS)
        own_draft = int("draft_server" not in config)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == args.tensor_parallel_size + own_draft
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in mounts["/root/.cache/huggingface"]
        assert pod["spec"]["enableServiceLinks"] is False, "VLLM_SSD_PORT"


def test_claims_of_volumes_are_there():
    for file in FILES:
        volumes = [
            volume for pod in pods(objects(file)) for volume in pod["spec"].get("volumes", ())
        ]
        found = (v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v)
        claims = {claim["claimName"] for claim in found}
        made = {
            o["metadata"]["name"] for o in objects(file) if o["kind"] == "PersistentVolumeClaim"
        }
        assert claims == made


@pytest.fixture
def with_ray() -> tuple[dict[str, Any], dict[str, Any]]:
    """The cluster of KubeRay, and the target's container."""
    found = {each["kind"]: each for each in objects(FOLDER / "ray.yaml")}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found["RayCluster"], container


def test_a_draft_that_ray_places(with_ray):
    """Ray and `vllm-ssd draft` take the commands; the draft's labels are those of a group."""
    from ray.scripts.scripts import start  # it imports much

    cluster, container = with_ray
    join, drafts, *_ = commands(container)
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(drafts[1:])
    groups = cluster["spec"]["workerGroupSpecs"]
    assert labels(args.ray_labels) in [labels(g["rayStartParams"]["labels"]) for g in groups]
    words = served(container)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["draft_server"] == args.name
    assert Path(config["draft_server_key"]) == args.key_file
    joined = start.make_context("ray start", join[2:]).params
    assert joined["address"] == f"{cluster['metadata']['name']}-head-svc:6379"
    for group in (cluster["spec"]["headGroupSpec"], *groups):
        options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        start.make_context("ray start", options)


def test_the_image_answers_kuberays_probes():
    """They ask the agents of Ray's dashboard, which plain Ray does not have."""
    assert '"ray[default]"' in (FOLDER.parents[1] / "docker" / "Dockerfile.cuda").read_text()


def test_a_draft_that_fails_ends_the_container(with_ray, tmp_path):
    """And one that loads is waited for, before the target starts."""
    (script,) = with_ray[1]["args"]
    script = script.replace("/run/drafts.key", str(tmp_path / "key"))
    stubs = {"ray": "exit 0", "vllm": f"[ -e {tmp_path}/key ] && echo serves"}
    for draft, status in (
        ("sleep .2; exit 1", 1),
        (f"sleep 1.5; touch {tmp_path}/key; sleep 1", 0),
    ):
        for name, body in {**stubs, "vllm-ssd": draft}.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-ec", script], env=environment, stdout=subprocess.PIPE, timeout=60
        )
        assert (done.returncode, done.stdout) == (status, b"" if status else b"serves\n")
