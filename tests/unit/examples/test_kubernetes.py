"""The manifests are what Kubernetes takes, by its own schemas. Those do not know KubeRay's object,
whose pods are checked by them, and whose other fields by the names that KubeRay 1.0 gives them."""

from __future__ import annotations

import argparse
import copy
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
# rayStartParams are options of `ray start`, a template is of a pod.
GROUP = [("rayStartParams", dict[str, str]), ("template", dict[str, Any])]
WORKERS = [("groupName", str), *((f"{each}eplicas", int) for each in ("r", "minR", "maxR")), *GROUP]
STRICT = {"forbid_unknown_fields": True}
GROUPS = {"headGroupSpec": GROUP, "workerGroupSpecs": WORKERS}
HEAD, WORKER = (msgspec.defstruct(name, fields, **STRICT) for name, fields in GROUPS.items())
RAY_CLUSTER = msgspec.defstruct(
    "RayCluster",
    [("rayVersion", str), ("headGroupSpec", HEAD), ("workerGroupSpecs", list[WORKER])],
    **STRICT,
)


def objects(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """The pods that an object, or a part of one, is a template for."""
    parts = found if isinstance(found, list) else ()
    if isinstance(found, dict):
        if "template" in found:
            yield {"apiVersion": "v1", "kind": "Pod", **found["template"]}
        parts = found.values()
    for part in parts:
        yield from pods(part)


def targets() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container of a target, with its pod."""
    for pod in (pod for file in FILES for pod in pods(objects(file))):
        yield from ((pod, each) for each in pod["spec"]["containers"] if each.get("args"))


def commands(container: dict[str, Any]) -> list[list[str]]:
    """The words of each command: that of the image with its arguments, or those of a script. The
    target's is the last one."""
    args = container["args"]
    if len(args) > 1:
        return [["vllm", "serve", *args]]
    lines = [line.partition(" | tee ")[0] for line in args[0].replace("\\\n", "").splitlines()]
    found = [shlex.split(line.removeprefix("exec ")) for line in lines]
    return sorted(found, key=lambda words: words[:2] == ["vllm", "serve"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_takes_it(file, version):
    checked = [*objects(file), *pods(objects(file))]
    assert len(checked) > 1
    for one in checked:
        if one["kind"] == "RayCluster":
            msgspec.convert(one["spec"], RAY_CLUSTER)
            continue
        kubernetes_validate.validate(one, version, strict=True)
        if one["kind"] == "Pod":
            wrong = copy.deepcopy(one)
            wrong["spec"]["containers"][0]["redinessProbe"] = {}
            with pytest.raises(kubernetes_validate.ValidationError, match="redinessProbe"):
                kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_lead_somewhere(file):
    """Of volumes, claims, and the pods of services and deployments."""
    found, volumes = list(pods(objects(file))), []
    for pod in found:
        volumes += (own := pod["spec"].get("volumes", []))
        mounts = [m for each in pod["spec"]["containers"] for m in each.get("volumeMounts", ())]
        assert {mount["name"] for mount in mounts} <= {volume["name"] for volume in own}
    claims = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    made = [o["metadata"]["name"] for o in objects(file) if o["kind"] == "PersistentVolumeClaim"]
    assert {claim["claimName"] for claim in claims} == set(made)
    known = [pod["metadata"]["labels"].items() for pod in found if "metadata" in pod]
    for one in objects(file):
        selector = one["spec"].get("selector", {})
        wanted = selector.get("matchLabels", selector).items()
        assert not wanted or any(wanted <= its for its in known)


def test_what_a_target_needs():
    """Options that vLLM and ssd take, shared memory, pages that may be locked, models that stay,
    its GPUs, and no variables of services."""
    assert len(list(targets())) == len(FILES)
    for pod, container in targets():
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(commands(container)[-1][2:])
        config = dict(args.speculative_config)
        assert config.pop("method") == "ssd" and set(config) <= set(OPTIONS)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == args.tensor_parallel_size + ("draft_server" not in config)
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in mounts["/root/.cache/huggingface"]
        assert pod["spec"]["enableServiceLinks"] is False, "VLLM_SSD_PORT"


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
    join, drafts, *_, serve = commands(container)
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    args = parser.parse_args(drafts[1:])
    groups = cluster["spec"]["workerGroupSpecs"]
    assert labels(args.ray_labels) in [labels(g["rayStartParams"]["labels"]) for g in groups]
    served = make_arg_parser(FlexibleArgumentParser()).parse_args(serve[2:]).speculative_config
    assert served["draft_server"] == args.name
    assert served["ray_address"] == args.ray_address
    joined = start.make_context("ray start", join[2:]).params
    assert joined["address"] == f"{cluster['metadata']['name']}-head-svc:6379"
    for group in (cluster["spec"]["headGroupSpec"], *groups):
        options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        start.make_context("ray start", options)
    # KubeRay's probes ask the agents of Ray's dashboard, which plain Ray does not have.
    assert '"ray[default]"' in (FOLDER.parents[1] / "docker" / "Dockerfile.cuda").read_text()


@pytest.mark.parametrize(
    "draft, status, said",
    [
        ("sleep .2; exit 1", 1, b""),
        ("sleep 1.5; echo engines join it; touch $KEY; sleep 1", 0, b"engines join it\nserves\n"),
    ],
)
def test_a_draft_that_fails_ends_the_container(with_ray, tmp_path, draft, status, said):
    """And one that loads is waited for, before the target starts."""
    (script,) = with_ray[1]["args"]
    script = script.replace("/run/draft.log", str(tmp_path / "log"))
    stubs = {"ray": "exit 0", "vllm": "[ -e $KEY ] && echo serves", "vllm-ssd": draft}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KEY": str(tmp_path / "key")}
    done = subprocess.run(
        ["bash", "-ec", script],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (status, said)
