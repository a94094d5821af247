"""How far the guess for rows without drafts reaches back. What it is, `lookup_agreement.py` shows
with shorter texts."""

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

if not interpreter.HERE:

    def test_in_the_interpreter():
        interpreter.run_again(__file__)

else:
    import torch
    import triton
    import triton.language as tl

    from vllm_ssd.protocol import TableShape
    from vllm_ssd.protocol.kernel_layout import KernelLayout
    from vllm_ssd.worker.guess_kernels import REACH, continuation

    K, VOCAB = 7, 100
    AT = KernelLayout.of(TableShape(slots=1, k=K, branches=1))

    @triton.jit
    def _guess(text, length, found, VOCAB: tl.constexpr, AT: tl.constexpr):
        lane = tl.arange(0, AT.token_lanes)
        tokens = continuation(text, tl.load(length), VOCAB, AT)
        tl.store(found + lane, tokens, mask=lane < AT.k)

    def guessed(text):
        """What stands before the text in memory would make all matches longer."""
        found = torch.zeros(K, dtype=torch.int32)
        memory = torch.tensor([*text, *text]).int()
        _guess[(1,)](memory[len(text) :], torch.tensor([len(text)]), found, VOCAB, AT)
        return found.tolist()

    def test_no_further_back_than_it_reaches():
        assert guessed([2, 8, *[9] * (REACH - 2), 2]) == [8, *[9] * (K - 1)]
        assert guessed([2, 8, *[9] * (REACH - 1), 2]) == [2] * K
