"""vLLM's kernels, compiled ahead for a GPU that is not there, by the real compiler and ptxas."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

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
