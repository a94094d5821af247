"""Real models and engines for the engine tests. Models are made once, in ``.models``."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Small enough for a CPU machine, and the runner that the plugin supports on CPUs.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Of two files at a time, one has its drafts on the second of two cores, and one on the first; the
# others are for targets that have processes of their own.
if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and os.cpu_count() == 2:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "1")
# Engines find ``tests``, too, and the plugin of shared_cores.py.
PATHS = [str(Path(__file__).with_name("entry")), str(ROOT), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))


@pytest.fixture(scope="session")
def target() -> str:
    """SmolLM2-135M-Instruct."""
    from benchmarks.standin import ensure_smollm2

    return str(ensure_smollm2(ROOT / ".models"))


@pytest.fixture(scope="session")
def draft() -> str:
    """The same without layer 14: it agrees with the target on most tokens."""
    from benchmarks.standin import ensure_draft

    return str(ensure_draft(ROOT / ".models"))


@pytest.fixture(scope="session")
def spoken_pair(target, tmp_path_factory) -> tuple[str, str]:
    """(target, draft): random Qwen3 models of SmolLM2's tokens that cost next to nothing, for tests
    to which texts mean nothing. The draft mostly agrees with the target."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.standin.checkpoint import copy_tokenizer
    from benchmarks.standin.tiny import TINY

    folder = tmp_path_factory.mktemp("spoken")
    torch.manual_seed(1)
    sizes = {**TINY, "vocab_size": 49152, "head_dim": 32, "architectures": ["Qwen3ForCausalLM"]}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).float()
    output = model.lm_head.weight.data
    output *= 0.15  # no token is nearly certain
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        copy_tokenizer(Path(target), folder / name)
        output += 0.06 * output.std() * torch.randn_like(output)
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random function of 400 tokens, without a tokenizer."""
    from benchmarks.standin.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("small"))
