"""The manifests are what Kubernetes takes, by its own schemas, and vLLM, ssd and Ray take what they
are told. The schemas do not know KubeRay's object, whose pods are checked."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ssd.config.options import OPTIONS

FOLDER = Path(__file__).parents[3] / "examples" / "kubernetes"
OBJECTS = {file.name: list(yaml.safe_load_all(file.read_text())) for file in FOLDER.glob("*.yaml")}
# Of Kubernetes: the oldest that its makers still mend, and the newest.
VERSIONS = ("1.35", kubernetes_validate.latest_version())
EACH_FILE = pytest.mark.parametrize("objects", OBJECTS.values(), ids=OBJECTS)


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """The pods that an object, or a part of one, is a template for."""
    parts = found if isinstance(found, list) else ()
    if isinstance(found, dict):
        if "template" in found:
            yield {"apiVersion": "v1", "kind": "Pod", **found["template"]}
        parts = found.values()
    for part in parts:
        yield from pods(part)


def target_of(objects: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of the target, and its container."""
    found = [(pod, each) for pod in pods(objects) for each in pod["spec"]["containers"]]
    (target,) = (pair for pair in found if "args" in pair[1])
    return target


def commands(container: dict[str, Any]) -> list[list[str]]:
    """The words of each command: that of the image with its arguments, or those of a script. The
    target's is the last one."""
    args = container["args"]
    if len(args) > 1:
        return [["vllm", "serve", *args]]
    lines = [line.partition(" | tee ")[0] for line in args[0].replace("\\\n", "").splitlines()]
    found = [shlex.split(line.removeprefix("exec ")) for line in lines]
    return sorted(found, key=lambda words: words[:2] == ["vllm", "serve"])


@EACH_FILE
def test_kubernetes_takes_it(objects):
    for version in VERSIONS:
        for one in [*objects, *pods(objects)]:
            if one["kind"] != "RayCluster":
                kubernetes_validate.validate(one, version, strict=True)
                continue
            for group in one["spec"]["workerGroupSpecs"]:
                assert "labels" not in group["rayStartParams"], "KubeRay refuses these"


@EACH_FILE
def test_what_a_target_needs(objects):
    """Options that vLLM and ssd take, shared memory, pages that may be locked, models that stay,
    its GPUs, and no variables of services."""
    pod, container = target_of(objects)
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
