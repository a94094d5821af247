"""vLLM's kernels, compiled ahead for a GPU that is not there, by the real compiler and ptxas."""

import os
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm import envs, platforms
from vllm.distributed import parallel_state

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_ssd.worker import compile_ahead
from vllm_ssd.worker.compile_ahead import Job

# vLLM for CPUs has the kernels, and leaves Triton out: here it is told that it is another vLLM. One
# of the four kernels is enough, as all of them take a minute.
_PROGRAM = """
import vllm.platforms
vllm.platforms.vllm_version_matches_substr = lambda text: False
from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton
topk_topp_sampler.register_top_k_top_p_warmups = topk_topp_triton._topp_split_stats.register_warmup

from triton.backends.nvidia.compiler import CUDABackend
from vllm_ssd.worker.compile_ahead import Job, compile_all

job = Job(90, 32, 132, vocab_size=128256, max_num_seqs=2, num_speculative_tokens=1)
print("kernels:", compile_all(job))

def refuse(*_):
    raise AssertionError("a second process found nothing and compiles")

CUDABackend.make_ttir = refuse
compile_all(job)
"""


def test_another_process_finds_what_was_compiled(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    count = int(done.stdout.split("kernels: ")[1])
    assert count > 1
    assert len(list(tmp_path.rglob("*.cubin"))) == count


@pytest.mark.parametrize("is_first", [True, False])
def test_one_worker_begins_and_all_look_in_the_same_folder(is_first, monkeypatch, tmp_path):
    begun = []
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path), raising=False)
    monkeypatch.setattr(platforms.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(platforms.current_platform, "num_compute_units", lambda _: 132)
    monkeypatch.setattr(
        parallel_state, "get_tp_group", lambda: SimpleNamespace(is_first_rank=is_first)
    )
    active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(
        compile_ahead.subprocess, "Popen", lambda words, env, **_: begun.append((words, env))
    )
    config = SimpleNamespace(
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        parallel_config=SimpleNamespace(data_parallel_rank_local=None),
        model_config=SimpleNamespace(get_vocab_size=lambda: 128256),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        num_speculative_tokens=7,
    )
    compile_ahead.start(config, torch.device("cuda", 0))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton_cache")
    assert len(begun) == is_first
    for words, environment in begun:
        assert msgspec.json.decode(words[-1], type=Job) == Job(90, 32, 132, 128256, 256, 7)
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
