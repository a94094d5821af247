"""The device lookup in Triton's interpreter: ``lookup_cases.py``, ``trimmed_cases.py``,
``lookup_agreement.py``."""

from itertools import count

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

if interpreter.HERE:
    import torch
    import triton.language as tl

    from tests.support.lookup_agreement import host_and_device_agree
    from tests.support.lookup_cases import CASES, Target, beat
    from tests.support.trimmed_cases import TRIMMED_CASES
    from vllm_ssd.worker import lookup_kernel

    CPU = torch.device("cpu")

    @pytest.mark.parametrize("case", CASES + TRIMMED_CASES, ids=lambda case: case.__name__)
    def test_case(case, tmp_path):
        case(tmp_path, CPU)

    def test_a_wait_ends_by_the_gpus_timer(tmp_path, monkeypatch):
        """However long a look takes: with many rows, it takes longer."""
        times = count(10**15, 2_000_000)
        monkeypatch.setattr(lookup_kernel, "timer_ns", lambda: next(times))
        monkeypatch.setattr(lookup_kernel, "_SHORTEST_LOOK_NS", tl.constexpr(100))
        target = Target(tmp_path / "t", CPU, max_wait_s=9e-3)
        beat(target.table)
        target.add("a", 0, [1, 2])
        target.write(0, [3])
        target.step([(0, 1)])
        target.write(0, [4])
        target.step([(0, 1)])  # counts the wait
        assert target.counted("timeouts") == 1
        assert target.counted("wait_us") == 10_000, "five looks"

    # Of these, one each waits as planned, not at all, and for all drafts; two of them sample.
    @pytest.mark.parametrize("seed", [2, 5, 7])
    def test_host_and_device_agree(seed, tmp_path):
        host_and_device_agree(tmp_path, CPU, seed)

else:

    def test_the_device_lookup_in_the_interpreter():
        interpreter.run_again(__file__)
