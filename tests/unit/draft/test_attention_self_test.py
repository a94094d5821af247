"""What the draft's attention is tried on before it serves, with backends that are wrong on purpose,
and what is said then."""

import logging
from types import SimpleNamespace

import pytest
import torch

from tests.support.sentences import refused
from vllm_ssd.draft.attention import self_test
from vllm_ssd.draft.attention.base import AttentionShape
from vllm_ssd.draft.attention.flashinfer import plan_hints
from vllm_ssd.draft.attention.sdpa import SDPAAttention
from vllm_ssd.draft.attention.self_test import TOLERANCE, first_sound, largest_error

BLOCK = 16


def shape_of(group=4, dtype=torch.bfloat16) -> AttentionShape:
    """Of a draft of two layers, with ``group`` query heads for each KV head."""
    return AttentionShape(2, 2 * group, 2, 64, 64**-0.5, dtype, torch.device("cpu"))


def with_masks(change):
    """A backend whose queries see ``change(seen)``, bool [batch, branches, width], and not what
    they should."""

    class Wrong(SDPAAttention):
        def tree_plan(self, rows, steps):
            plan = super().tree_plan(rows, steps)
            right = plan.set_masks
            plan.set_masks = lambda seen_in: right(lambda window: change(seen_in(window)))
            return plan

    return Wrong


def with_outputs(change):
    """A backend that returns ``change`` of what it should."""

    class Wrong(SDPAAttention):
        def tree_plan(self, rows, steps):
            plan = super().tree_plan(rows, steps)
            right = plan.attend
            plan.attend = lambda *inputs: change(right(*inputs))
            return plan

    return Wrong


def some_heads_masked_as_their_neighbours(out):
    """Heads 1 to 3 of each group of 4: what the next branch's got, as in 0.5.3+amd.1."""
    heads = torch.arange(out.shape[1]) % 4 > 0
    return torch.where(heads.view(1, -1, 1), out.roll(-1, dims=0), out)


def one_entry_more(seen):
    """The branch that sees the least sees the next entry of its text, too."""
    seen = seen.clone()
    branch = int(seen[0].sum(-1).argmin())
    seen[0, branch, int(seen[0, branch].long().argmin())] = True
    return seen


class DoesNotBuild(SDPAAttention):
    def __init__(self, *args):
        raise RuntimeError("Ninja build failed\nand three pages of what the compiler says")


WRONG = {
    "masks of the next branch": with_masks(lambda seen: seen.roll(1, dims=1)),
    "some heads with the next branch": with_outputs(some_heads_masked_as_their_neighbours),
    "no masks": with_masks(torch.ones_like),
    "one entry more": with_masks(one_entry_more),
    "sums of 16-bit ones read as another type": with_outputs(lambda out: out / 1.875),
    "no numbers": with_outputs(lambda out: out * float("nan")),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_wrong_is_found(wrong, dtype):
    assert not largest_error(wrong, shape_of(dtype=dtype), BLOCK) < 2 * TOLERANCE


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_let_pass(group, dtype):
    assert largest_error(SDPAAttention, shape_of(group, dtype), BLOCK) < TOLERANCE / 2


@pytest.fixture
def trying(monkeypatch, caplog):
    """``first_sound`` of these backends, where those in ``classes`` are what they say."""
    caplog.set_level(logging.WARNING, logger="vllm")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def trying(backends, **classes):
        monkeypatch.setattr(self_test, "load_backend", classes.__getitem__)
        return first_sound(backends, shape_of(), BLOCK), [r.getMessage() for r in caplog.records]

    return trying


def test_the_first_that_is_right(trying):
    wrong = WRONG["no masks"]
    order = ("flashinfer", "triton", "sdpa")
    assert trying(order, flashinfer=SDPAAttention) == ("flashinfer", [])
    chosen, (said,) = trying(order, flashinfer=wrong, triton=SDPAAttention)
    assert chosen == "triton"
    assert "'flashinfer' of the draft is wrong on this GPU (by " in said
    assert said.endswith("rounding explains 0.05): trying 'triton'")


def test_one_that_does_not_build(trying):
    chosen, (first, second) = trying(
        ("triton", "flashinfer", "sdpa"), flashinfer=DoesNotBuild, triton=WRONG["no numbers"]
    )
    assert chosen == "sdpa"
    assert "(by nan, " in first
    assert "(RuntimeError: Ninja build failed): trying 'sdpa'" in second


@pytest.mark.parametrize("fault", [DoesNotBuild, WRONG["one entry more"]])
def test_one_that_the_user_named(trying, fault):
    assert trying(["sdpa"]) == ("sdpa", []), "the reference needs no trial"
    assert trying(["flashinfer"], flashinfer=SDPAAttention) == ("flashinfer", [])
    with refused() as error:
        trying(["flashinfer"], flashinfer=fault)
    said = str(error.value)
    assert said.startswith("tree_backend 'flashinfer' (an option, or SSD_TREE_DECODE_BACKEND) ")
    assert "on this GPU (" in said and said.endswith(": write 'auto' or 'sdpa'")


@pytest.mark.parametrize(
    "hip, known, hints",
    [
        (None, {"uniform_q_len", "disable_split_kv"}, {"uniform_q_len", "disable_split_kv"}),
        (None, {"disable_split_kv"}, {"disable_split_kv"}),
        ("7.2", {"uniform_q_len", "disable_split_kv"}, {"uniform_q_len"}),
        ("7.2", set(), set()),
    ],
)
def test_arguments_that_flashinfer_is_given(monkeypatch, hip, known, hints):
    """AMD's builds may list ``disable_split_kv``, and raise where it is True."""
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip=hip))
    assert plan_hints(256, known).keys() == hints
