"""Several engines in one test process."""

import os

# Some tests compute on the GPU themselves, after which CUDA does not survive a fork.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
