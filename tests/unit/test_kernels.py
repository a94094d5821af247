"""The device lookup in Triton's interpreter: ``lookup_cases.py``, ``lookup_agreement.py``.

The interpreter is chosen for a whole process, before Triton is imported. So this file, collected
by any other, runs itself again in a process of its own.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    import torch

    from tests.lookup_agreement import host_and_device_agree
    from tests.lookup_cases import CASES

    CPU = torch.device("cpu")

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    def test_case(case, tmp_path):
        case(tmp_path, CPU)

    @pytest.mark.parametrize("seed", range(8))
    def test_host_and_device_agree(seed, tmp_path):
        host_and_device_agree(tmp_path, CPU, seed)

else:

    def test_the_device_lookup_in_the_interpreter():
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
