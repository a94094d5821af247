"""The device lookup in Triton's interpreter: ``lookup_cases.py``, ``trimmed_cases.py``,
``lookup_agreement.py``."""

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

if interpreter.HERE:
    import torch

    from tests.support.lookup_agreement import host_and_device_agree
    from tests.support.lookup_cases import CASES
    from tests.support.trimmed_cases import TRIMMED_CASES

    CPU = torch.device("cpu")

    @pytest.mark.parametrize("case", CASES + TRIMMED_CASES, ids=lambda case: case.__name__)
    def test_case(case, tmp_path):
        case(tmp_path, CPU)

    # Of these, one each waits as planned, not at all, and for all drafts; two of them sample.
    @pytest.mark.parametrize("seed", [2, 5, 7])
    def test_host_and_device_agree(seed, tmp_path):
        host_and_device_agree(tmp_path, CPU, seed)

else:

    def test_the_device_lookup_in_the_interpreter():
        interpreter.run_again(__file__)
