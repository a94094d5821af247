"""The device lookup in Triton's interpreter: ``lookup_cases.py``, ``trimmed_cases.py``,
``lookup_agreement.py``."""

from itertools import count

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

if interpreter.HERE:
    import torch
    import triton.language as tl

    from tests.support.fallbacks import publish_fallback, sampled_from
    from tests.support.lookup_agreement import host_and_device_agree
    from tests.support.lookup_cases import CASES, SAMPLED, TOP_M, Target, beat
    from tests.support.trimmed_cases import TRIMMED_CASES
    from vllm_ssd.table import draft_probs_kernels, make_stamp, prediction_kernels
    from vllm_ssd.table.predictions import PredictionWriter
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

    def test_no_row_sees_parts_of_two_predictions(tmp_path, monkeypatch):
        """A fallback replaces the prediction before a row's first read, its second, and so on."""
        bodies, stamp = ([10, 11], [30, 31, 32]), make_stamp(1, 0)
        probs, other_probs = (sampled_from(body, TOP_M) for body in bodies)
        reads, moment, seen = count(1), 0, []

        def replacing(original):
            def read(*arguments):
                if next(reads) == moment:
                    publish_fallback(writer, 0, stamp, (0, 3), bodies[1], other_probs.numpy())
                return original(*arguments)

            return read

        for module, name in (
            (prediction_kernels, "read"),
            (prediction_kernels, "read_where"),
            (draft_probs_kernels, "read_where"),
        ):
            monkeypatch.setattr(module, name, replacing(getattr(module, name)))
        for moment in range(1, 10):
            target = Target(tmp_path / str(moment), CPU, on_miss="skip", shape=SAMPLED)
            writer = PredictionWriter(target.table)
            target.add("a", 0, [1, 2])
            writer.publish(0, stamp, [0, 1], [3, 3])
            for step, token in enumerate(bodies[0]):
                writer.extend(0, stamp, [token, 20], probs[[step, step]].numpy(), torch.nan)
            target.write(0, [3])
            reads = count(1)
            (drafts,), (found,) = target.sampled_step([(0, 1)])
            rest = drafts.index(3)
            seen.append(drafts[:rest])
            own = {10: probs, 30: other_probs}.get(drafts[0], probs[:0])
            assert torch.equal(found[:rest], own)
        assert seen == [bodies[1], *[[]] * 7, bodies[0]]

    # Of these, two wait as planned, one not at all, two for all drafts; two of them sample.
    @pytest.mark.parametrize("seed", [0, 1, 2, 5, 16])
    def test_host_and_device_agree(seed, tmp_path):
        host_and_device_agree(tmp_path, CPU, seed)

else:

    def test_the_device_lookup_in_the_interpreter():
        interpreter.run_again(__file__)
