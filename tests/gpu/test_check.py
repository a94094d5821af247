"""`vllm-ssd check` on GPUs: the draft's on the last one, where its attention and the table are
tried; the table also on the target's."""

import pytest

from tests.gpu.settings import GPUS
from vllm_ssd import cli


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_a_pair_that_fits(models, capsys, backend):
    options = f'{{"method": "ssd", "draft_device": {GPUS - 1}, "tree_backend": "{backend}"}}'
    words = ["check", models[0], "--draft", models[1], "--speculative-config", options]
    status = cli.main(words)
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"are free on GPU {GPUS - 1} (" in said and "right in the self-test, is used" in said
    assert "target's table   GPU 0 reads it in " in said
    # The other backends publish from the GPU.
    assert (f"draft's table    GPU {GPUS - 1} reads it in " in said) == (backend == "auto")
