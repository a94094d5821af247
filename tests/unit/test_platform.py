"""How the cores of a CPU machine are divided, and which GPU the draft gets."""

import os
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.executor import ray_utils

from vllm_ssd.checks import check_device
from vllm_ssd.config import SSDConfig
from vllm_ssd.draft import keeper
from vllm_ssd.draft.spec import DraftModelSpec
from vllm_ssd.placement import (
    Place,
    engine_index,
    gpu_environment,
    local_engines,
    place_draft,
    place_target_by_ray,
)
from vllm_ssd.platform import parse_cores, split_cores
from vllm_ssd.target import launch
from vllm_ssd.target.launch import DraftLauncher


@pytest.mark.parametrize(
    ("text", "cores"), [("0", [0]), ("2-4,7", [2, 3, 4, 7]), (" 1 , 1-2", [1, 2])]
)
def test_core_lists(text, cores):
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1;2", "0x1"])
def test_bad_core_lists_get_a_sentence(text):
    with pytest.raises(ValueError, match="is not a list of cores: write for example"):
        parse_cores(text)


@given(st.integers(1, 64), st.integers(1, 8))
def test_every_core_has_one_user_as_long_as_there_are_enough(count, ranks):
    cores = list(range(10, 10 + count))
    split = split_cores(cores, ranks, None, None)
    assert split.target is not None
    parts = [parse_cores(part) for part in split.target.split("|")]
    assert len(parts) == ranks and all(parts)
    assert split.draft
    used = [core for part in parts for core in part] + split.draft
    assert split.shared == (len(set(used)) < len(used))
    if count > ranks:
        assert not split.shared and sorted(used) == cores


def test_the_users_choices_come_first():
    assert split_cores([0, 1, 2, 3], 1, "0", None).target == "1,2,3"
    bound = split_cores([0, 1, 2, 3], 2, None, "0|1")
    assert (bound.draft, bound.target, bound.shared) == ([2, 3], None, False)
    assert split_cores([0, 1], 1, None, "0-1").shared


def test_engines_of_one_machine_have_cores_of_their_own():
    """Every one tells vLLM of all, which takes the parts at the engine's own place."""
    one, two = (split_cores(range(8), 2, None, None, engine, 2) for engine in (0, 1))
    assert (one.draft, one.target) == ([3], "0|1,2|0|1,2")
    assert (two.draft, two.target) == ([7], "4|5,6|4|5,6")
    assert not one.shared and not two.shared
    chosen = [split_cores(range(6), 1, "4-5", None, engine, 2) for engine in (0, 1)]
    assert [(s.draft, s.target, s.shared) for s in chosen] == [
        ([4], "0,1|0,1", False),
        ([5], "2,3|2,3", False),
    ]
    bound = [split_cores(range(6), 1, None, "0,1|2,3", engine, 2) for engine in (0, 1)]
    assert [(s.draft, s.target) for s in bound] == [([4], None), ([5], None)]
    few = [split_cores([0, 1], 1, None, None, engine, 2) for engine in (0, 1)]
    assert [(s.draft, s.target, s.shared) for s in few] == [
        ([0], "0|0", True),
        ([1], "1|1", True),
    ]


# GPUs


def gpus(count: int, rocm: bool = False) -> SimpleNamespace:
    """A platform with so many visible GPUs, the first of which is the machine's fifth."""
    return SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: not rocm,
        is_rocm=lambda: rocm,
        device_count=lambda: count,
        get_device_uuid=lambda index: f"GPU-0000{index}",
        visible_device_id_to_physical_device_id=lambda index: index + 4,
        ray_device_key="GPU",
    )


def parallel(tp: int, engine: int | None = 0, ids: list[int] | None = None, **fields):
    return SimpleNamespace(
        world_size=tp,
        data_parallel_rank_local=engine,
        assigned_physical_gpu_ids=ids,
        **{"use_ray": False, "placement_group": "the group"} | fields,
    )


def refused(error) -> str:
    text = str(error.value)
    assert "\n" not in text and ". " not in text
    return text


@pytest.mark.parametrize(
    "engines, target, count, drafts",
    [
        (1, parallel(1), 2, [1]),
        (1, parallel(2), 8, [2]),
        (2, parallel(2), 6, [4, 5]),
        (3, parallel(1), 8, [3, 4, 5]),
        (1, parallel(2, ids=[5, 6]), 3, [0]),  # the draft may leave --device-ids ...
        (1, parallel(2, ids=[7, 5, 6]), 4, [2]),  # ... but uses what they have to spare first
        (2, parallel(1, ids=[4, 6, 7, 5]), 4, [3, 1]),
        (0, parallel(4), 0, []),
    ],
)
def test_drafts_come_after_all_targets(engines, target, count, drafts):
    config = SSDConfig(engines=engines)
    check_device(config, target, gpus(count))
    places = [place_draft(config, target, gpus(count), engine) for engine in range(engines)]
    assert places == [Place(draft) for draft in drafts]


@pytest.mark.parametrize(
    "engines, target, count, expected",
    [
        (1, parallel(2), 2, "uses 2 of 2 visible GPUs and its draft needs 1 more"),
        (2, parallel(1), 3, "uses 2 of 3 visible GPUs and its drafts need 2 more"),
        (1, parallel(1), 1, 'for development share one of the target with "draft_device": 0'),
        (1, parallel(2, ids=[5, 4]), 2, 'with "draft_device": 1'),
    ],
)
def test_too_few_gpus(engines, target, count, expected):
    with pytest.raises(ValueError) as error:
        check_device(SSDConfig(engines=engines), target, gpus(count))
    assert expected in refused(error)


def test_an_engine_that_nobody_foresaw():
    with pytest.raises(ValueError, match="lower --tensor-parallel-size"):
        place_draft(SSDConfig(), parallel(1, engine=1), gpus(2), 1)


@pytest.mark.parametrize(
    "device, engines, engine, place",
    [
        (3, 1, 0, Place(3)),
        ("2", 1, 0, Place(2)),
        ("GPU-00002", 1, 0, Place(2)),
        ("GPU-0000", 1, 0, Place(0, with_target=True)),  # CUDA takes the first digits, too
        (1, 1, 0, Place(1, with_target=True)),
        ("GPU-00001", 1, 0, Place(1, with_target=True)),
        ("MIG-1-2/3", 1, 0, Place("MIG-1-2/3")),
        ("5,4", 2, 0, Place(5)),
        ("5,4", 2, 1, Place(4)),
        ("GPU-00005,4", 2, 1, Place(4)),
        ("3,4", 2, 0, Place(3, with_target=True)),
        ("4", 2, 1, Place(4, with_drafts=True)),
        ("4,4", 2, 0, Place(4, with_drafts=True)),
    ],
)
def test_the_users_gpu(device, engines, engine, place):
    config, target = SSDConfig(draft_device=device, engines=engines), parallel(2)
    check_device(config, target, gpus(6))
    assert place_draft(config, target, gpus(6), engine) == place


def test_the_users_gpu_among_device_ids():
    target = parallel(1, ids=[5])
    assert place_draft(SSDConfig(draft_device=1), target, gpus(2), 0).with_target
    assert not place_draft(SSDConfig(draft_device=0), target, gpus(2), 0).with_target


def test_rocm_has_its_own_uuids():
    place = place_draft(SSDConfig(draft_device="GPU-beef"), parallel(1), gpus(2, rocm=True), 0)
    assert place == Place("GPU-beef")


@pytest.mark.parametrize(
    "device, engines, expected",
    [
        (3, 1, "draft_device 3 does not exist: choose from 0 to 2"),
        ("2,3", 2, "draft_device 3 does not exist: choose from 0 to 2"),
        ("GPU-7", 1, "draft_device GPU-7 is not the UUID of a visible GPU: choose one"),
        ("0-1", 1, "must be the index or the UUID of a visible GPU"),
        ("1,2", 1, "names 2 GPUs and this host has 1 engine, each with one draft: name one"),
        ("0,1", 3, "names 2 GPUs and this host has 3 engines"),
    ],
)
def test_gpus_that_are_not_there(device, engines, expected):
    with pytest.raises(ValueError) as error:
        check_device(SSDConfig(draft_device=device, engines=engines), parallel(1), gpus(3))
    assert expected in refused(error)


def test_engines_of_this_host():
    offline = SimpleNamespace(data_parallel_rank_local=1, data_parallel_size=4)
    served = SimpleNamespace(data_parallel_rank_local=None, data_parallel_size_local=2)
    assert (local_engines(offline), local_engines(served)) == (4, 2)
    assert engine_index(offline) == 1
    assert engine_index(SimpleNamespace(data_parallel_rank_local=None, data_parallel_index=3)) == 3


@pytest.mark.parametrize(
    "listed, device, name",
    [
        (None, 2, "2"),
        ("", 0, "0"),
        ("4, 6,7", 1, "6"),
        ("GPU-aa,GPU-bb", 1, "GPU-bb"),
        ("4,6", "GPU-cc", "GPU-cc"),
        ("4,6", "6", "6"),  # as Ray names it: no index
    ],
)
def test_the_draft_sees_one_gpu(monkeypatch, listed, device, name):
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    cuda, rocm = gpu_environment(device, False), gpu_environment(device, True)
    assert {key: cuda[key] for key in cuda if not key.startswith("RAY_")} == {
        "CUDA_VISIBLE_DEVICES": name
    }
    assert {key: rocm[key] for key in rocm if not key.startswith("RAY_")} == {
        "CUDA_VISIBLE_DEVICES": name,
        "HIP_VISIBLE_DEVICES": name,
    }
    assert {key for key in rocm if key.startswith("RAY_")} == {
        f"RAY_EXPERIMENTAL_NOSET_{maker}_VISIBLE_DEVICES" for maker in ("CUDA", "HIP", "ROCR")
    }


# The launcher


def launcher(target, **options) -> DraftLauncher:
    scheduler = SimpleNamespace(max_num_seqs=2)
    return DraftLauncher(
        SimpleNamespace(
            speculative_config=SSDConfig(k=2, f=1, **options),
            parallel_config=target,
            scheduler_config=scheduler,
            model_config=SimpleNamespace(seed=0),
        )
    )


def test_sharing_needs_a_word_and_gets_one(caplog):
    assert launcher(parallel(1))._gpu(gpus(2)) == 1
    assert launcher(parallel(1), draft_device=1)._gpu(gpus(2)) == 1
    assert not caplog.records
    assert launcher(parallel(1), draft_device=0, draft_kv_cache_gib=2.5)._gpu(gpus(2)) == 0
    (record,) = caplog.records
    assert "for development only" in record.getMessage()
    assert "its 2.5 GiB of KV cache (draft_kv_cache_gib)" in record.getMessage()


def test_drafts_that_share_are_warned_of_once(caplog):
    for engine in range(2):
        made = launcher(parallel(1, engine=engine), engines=2, draft_device=2)
        assert made._gpu(gpus(3)) == 2
    (record,) = caplog.records
    assert "the drafts of several engines share one GPU" in record.getMessage()


@pytest.mark.parametrize("device, waits", [(0, True), (1, False)])
def test_a_draft_that_shares_is_there_before_the_target(monkeypatch, device, waits):
    """Else the target would count the draft's memory as its own, or not, as it happens."""
    from vllm import platforms

    def fail(command, **_):
        os.write(int(command[-1]), b'{"failed": "no luck"}\n')

    model = DraftModelSpec({}, "sdpa", 64, 2**20, 2, 8)
    monkeypatch.setattr(DraftLauncher, "_model_spec", lambda *_: model)
    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch.subprocess, "run", fail)
    made = launcher(parallel(1), draft_device=device)
    try:
        if not waits:
            made.start()
        with pytest.raises(RuntimeError, match="the draft could not be started: no luck"):
            made.start() if waits else made.wait_ready()
    finally:
        made.stop()


@pytest.fixture
def talk(monkeypatch):
    """Makes and starts a launcher whose keeper says this and then nothing."""
    from vllm import platforms

    made: list[DraftLauncher] = []
    held: list[int] = []

    def start(said: bytes, **options) -> DraftLauncher:
        def say(command, **_):
            held.append(os.dup(int(command[-1])))
            os.write(held[-1], said)

        monkeypatch.setattr(launch.subprocess, "run", say)
        made.append(launcher(parallel(1), **options))
        made[-1].start()
        return made[-1]

    model = DraftModelSpec({}, "sdpa", 64, 2**20, 2, 8)
    monkeypatch.setattr(DraftLauncher, "_model_spec", lambda *_: model)
    monkeypatch.setattr(platforms, "current_platform", gpus(2))
    monkeypatch.setattr(launch, "STOP_S", 0.1)
    yield start
    for end in held:
        os.close(end)
    for one in made:
        one.stop()


def test_the_deadline_names_what_it_waited_for(talk):
    made = talk(b'{"awaited": "the draft\'s Ray"}\n', start_timeout_s=0.3)
    with pytest.raises(RuntimeError) as error:
        made.wait_ready()
    said = "the draft's Ray was not ready within 0.3 s (start_timeout_s)"
    assert str(error.value) == f"SSD: the draft could not be started: {said}"


def test_a_draft_that_is_not_required(talk, caplog):
    made = talk(b'{"failed": "no luck"}\n', required=False)
    made.wait_ready()
    (record,) = caplog.records
    said = "no luck; serving begins without drafts, as required is false"
    assert record.getMessage() == f"SSD: the draft could not be started: {said}"


def test_what_becomes_of_the_draft_is_a_line_each(talk, caplog):
    kinds = ("ready", "lost", "not_back", "back", "given_up")
    words = b"".join(b'{"%s": "%s"}\n' % (kind.encode(), kind[:1].encode()) for kind in kinds)
    made = talk(words, max_restarts=1)
    made.wait_ready()
    deadline = time.monotonic() + 10
    while len(caplog.records) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    lost, not_back, back, given_up = [record.getMessage() for record in caplog.records]
    assert "lost (l)" in lost and "without drafts while it is started again" in lost
    assert "could not be started again (n)" in not_back
    assert back == "SSD: the draft is back: b"
    assert "lost (g)" in given_up and "max_restarts is 1" in given_up


# Ray


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


def test_vllm_032_is_told_not_to_insist_on_the_drivers_node(cluster, monkeypatch):
    def initialize(parallel_config, ray_address=None, require_gpu_on_driver=True):
        cluster.calls.append(require_gpu_on_driver)

    monkeypatch.setattr(ray_utils, "initialize_ray_cluster", initialize)
    place_target_by_ray(parallel(2))
    assert cluster.calls == [False]


@pytest.mark.parametrize("nodes, indices", [(["here", "there"], ""), (["here"] * 2 + ["b"], "0,2")])
def test_targets_on_other_nodes(cluster, monkeypatch, nodes, indices):
    cluster.nodes = nodes
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", indices)
    with pytest.raises(ValueError) as error:
        place_target_by_ray(parallel(2))
    said = refused(error)
    assert f"Ray chose {nodes[-1]}'s address: start vLLM on a node with enough" in said


def test_ray_chooses_the_drafts_gpu(cluster, monkeypatch, caplog):
    monkeypatch.setattr(launch, "reserve_gpu_by_ray", lambda platform: ("holder", "6"))
    made = launcher(parallel(2, use_ray=True))
    check_device(SSDConfig(), parallel(2, use_ray=True), gpus(0))
    assert made._gpu(gpus(2)) == "6"
    assert made._reserved == "holder"
    assert not caplog.records
    made.stop()
    assert made._reserved is None


def test_ray_and_the_users_choice(cluster, caplog):
    target = parallel(2, use_ray=True)
    made = launcher(target, draft_device=1)
    assert made._gpu(gpus(2)) == 1
    assert made._may_share_gpu
    (record,) = caplog.records
    assert "leave draft_device out to let Ray choose" in record.getMessage()
    with pytest.raises(ValueError, match="does not exist"):
        launcher(target, draft_device=2)._gpu(gpus(2))
    with pytest.raises(ValueError, match="must be the index or the UUID"):
        check_device(SSDConfig(draft_device="0-1"), target, gpus(2))


def test_ray_gives_a_gpu_that_nobody_has():
    """Real Ray, with GPUs that exist on paper only."""
    code = """if True:
        import sys, tempfile, ray
        from types import SimpleNamespace
        from vllm_ssd import placement

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
        holder, name = placement.reserve_gpu_by_ray(gpus)
        print(name)
        placement.RESERVE_S = 2.0
        try:
            placement.reserve_gpu_by_ray(gpus)
        except ValueError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "4,GPU-bb"}
        done = subprocess.run(
            [sys.executable, "-c", code, folder],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    name, refusal = done.stdout.splitlines()
    assert name in ("4", "GPU-bb")
    assert refusal.startswith("Ray has no free GPU for the draft on the engine's node")


def test_the_drafts_ray_is_its_own(monkeypatch, tmp_path):
    """Whatever cluster the environment names."""
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_RAYLET_PID", "1")
    seen = {}
    monkeypatch.setattr(keeper.os, "fork", lambda: 0)
    monkeypatch.setattr(keeper.signal, "signal", lambda *_: None)
    monkeypatch.setattr(keeper.socket, "socket", lambda **_: None)
    monkeypatch.setattr(keeper.Keeper, "run", lambda self: seen.update(os.environ))
    keeper.main(str(tmp_path), "0")
    assert seen and not {"RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"} & set(seen)
    assert seen["RAY_RAYLET_PID"] == str(os.getpid())
