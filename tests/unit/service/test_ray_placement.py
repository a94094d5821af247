"""Which GPU the draft gets where Ray gives them out."""

import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import ray
from vllm.v1.executor import ray_utils

from tests.support.gpu_hosts import engine, gpus, parallel
from tests.support.sentences import refused
from vllm_ssd.config.ssd_config import SSDConfig
from vllm_ssd.config.target_checks import check_device
from vllm_ssd.service import draft_device
from vllm_ssd.service.draft_device import choose_device, place_target_by_ray


@pytest.fixture
def cluster(monkeypatch):
    """vLLM's Ray: which node each bundle is on; ``calls`` is what was asked of vLLM."""
    made = SimpleNamespace(nodes=["here", "here"], calls=[])

    def bundles(group, *_):
        assert group == "the group"
        return [(index, node, f"{node}'s address") for index, node in enumerate(made.nodes)]

    def by_index(group, indices, world_size):
        return [bundles(group)[index] for index in indices]

    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_utils, "initialize_ray_cluster", made.calls.append)
    monkeypatch.setattr(ray_utils, "get_bundles_sorted_by_node", bundles)
    monkeypatch.setattr(ray_utils, "get_bundles_for_indices", by_index)
    monkeypatch.delenv("VLLM_RAY_BUNDLE_INDICES", raising=False)
    return made


def test_the_target_is_placed_first_and_once(cluster):
    target = parallel(2)
    place_target_by_ray(target)
    assert cluster.calls == [target]
    cluster.nodes.append("there")  # a bundle that nobody uses
    place_target_by_ray(target)


@pytest.mark.parametrize("nodes, indices", [(["there", "here"], ""), (["b", "here"], "0,1")])
def test_a_first_rank_on_another_node(cluster, monkeypatch, nodes, indices):
    """Others may be: they are told what the first one has found."""
    cluster.nodes = nodes
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", indices)
    with refused(f"Ray chose {nodes[0]}'s address: start vLLM on a node with free GPUs"):
        place_target_by_ray(parallel(2))
    cluster.nodes = nodes[::-1]
    place_target_by_ray(parallel(2))


def test_ray_chooses_the_drafts_gpu(cluster, monkeypatch):
    monkeypatch.setattr(draft_device, "reserve_gpu_by_ray", lambda platform: ("holder", "6"))
    check_device(SSDConfig(), parallel(2, use_ray=True), gpus(0))
    found = choose_device(engine(parallel(2, use_ray=True)), gpus(2))
    assert (found.gpu, found.reservation) == ("6", "holder")
    assert not found.notes


def test_ray_and_the_users_choice(cluster):
    target = parallel(2, use_ray=True)
    found = choose_device(engine(target, draft_device=1), gpus(2))
    assert found.gpu == 1
    assert found.may_share_gpu
    (note,) = found.notes
    assert "leave draft_device out to let Ray choose" in note
    with pytest.raises(ValueError, match="does not exist"):
        choose_device(engine(target, draft_device=2), gpus(2))
    with pytest.raises(ValueError, match="must be the index or the UUID"):
        check_device(SSDConfig(draft_device="0-1"), target, gpus(2))


def test_ray_gives_a_gpu_that_nobody_has():
    """Real Ray, with GPUs that exist on paper only."""
    code = """if True:
        import sys, tempfile, ray
        from types import SimpleNamespace
        from vllm_ssd.service import draft_device

        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            _node_ip_address="127.0.0.1",
            _temp_dir=sys.argv[1],
        )
        ray.get(ray.util.placement_group([{"GPU": 1}]).ready())
        gpus = SimpleNamespace(ray_device_key="GPU")
        holder, name = draft_device.reserve_gpu_by_ray(gpus)
        print(name)
        draft_device.RESERVE_S = 2.0
        try:
            draft_device.reserve_gpu_by_ray(gpus)
        except ValueError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "4,GPU-bb"}
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    name, refusal = done.stdout.splitlines()
    assert name in ("4", "GPU-bb")
    assert refusal.startswith("Ray has no free GPU for the draft on the engine's node")
