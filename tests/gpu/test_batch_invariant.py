"""bf16 with vLLM's batch-invariant kernels: a row's logits do not depend on what is beside it, and
so the text is token for token the plain engine's, whatever is verified with it."""

from tests.gpu.settings import SSD, check_same_texts

SUBJECTS = ("rivers", "bread", "the moon", "chess", "tides", "clocks", "maps", "salt")
PROMPTS = [f"Explain {subject} to a child." for subject in SUBJECTS]


def test_same_tokens_in_bf16(models, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    speculation = {**SSD, "k": 5, "f": 2, "model": models[1]}
    batches = [PROMPTS[:1], PROMPTS]
    counted = check_same_texts(models[0], speculation, batches, 128, dtype="bfloat16")
    assert sum(counted["accepted"][1:]) > 0, "no draft was accepted"
