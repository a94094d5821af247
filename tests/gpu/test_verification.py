"""Adaptive verification on GPUs: vLLM verifies, of all rows' drafts, those that pay."""

import pytest

from tests.gpu.settings import SSD, check_same_texts

SUBJECTS = ("rivers", "bread", "the moon", "chess", "tides", "clocks", "maps", "salt")
PROMPTS = [f"{verb} {s}." for s in SUBJECTS for verb in ("Explain", "Praise", "Draw", "List")]


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_same_tokens_with_rows_trimmed(models, method):
    """Nothing is waited for, so that rows have few drafts, or only guesses, and are trimmed. How
    many drafts are left out depends on what else the GPUs do: it is printed."""
    target, draft = models
    speculation = {**SSD, "k": 5, "f": 2, "model": draft, "on_miss": "skip"}
    speculation["draft_sample_method"] = method
    options = {"dtype": "float32", "max_num_seqs": 32}
    batches = [PROMPTS[:count] for count in (1, 2, 7, 32)]
    counted = check_same_texts(target, speculation, batches, 64, **options)
    assert 0 < sum(counted["taken"]) <= sum(counted["verified"]) <= counted["drafts"]
