"""Where a kernel finds the fields of the speculation table, computed from the table's own types."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from vllm_ssd.table.schema import TableShape
from vllm_ssd.table.speculation_table import SpeculationTable

_RECORDS = ("outcome", "prediction", "fallback")


@dataclass(frozen=True, eq=False)
class KernelLayout:
    """Numbers for kernels, as attributes; a kernel takes one as a constant, usually called ``AT``.

    slots, slot_size: where the first slot begins, and the size of one. state, tail: fields of a
    slot. outcome, prediction, fallback: the first of a slot's two records of this kind, with
    ``_size`` the size of one, and with the name of a field (``outcome_stamp``) where it is in the
    record. All of these are in 4-byte words; a field of 8 bytes is a word of an int64 view as well.
    counter_ and the name of a counter of the target: in 8-byte words from the first one.
    k, branches, top_m: as in ``TableShape``; tail_size: its ``tail``. token_lanes, branch_lanes,
    prob_lanes: the powers of two from k, branches and top_m up.

    Two layouts are equal if they are one object, which ``of`` sees to; so a launch costs no
    comparison of all numbers.
    """

    numbers: tuple[tuple[str, int], ...]

    def __getattr__(self, name: str) -> int:
        for known, number in self.__dict__.get("numbers", ()):
            if known == name:
                return int(number)
        raise AttributeError(name)

    @staticmethod
    @functools.cache
    def of(shape: TableShape) -> KernelLayout:
        """The layout of tables of a shape."""
        slot, counters = shape.slot_dtype(), shape.target_dtype()
        start = SpeculationTable.slots_offset(shape)
        assert start % 8 == 0 and slot.itemsize % 8 == 0
        numbers = {"slots": start // 4, "slot_size": slot.itemsize // 4, **_words(slot)}
        for name in _RECORDS:
            record = slot[name].base
            numbers[f"{name}_size"] = record.itemsize // 4
            numbers |= {f"{name}_{field}": word for field, word in _words(record).items()}
        numbers |= {f"counter_{name}": word // 2 for name, word in _words(counters).items()}
        numbers |= {
            "k": shape.k,
            "branches": shape.branches,
            "top_m": shape.top_m,
            "tail_size": shape.tail,
            "token_lanes": _power_of_2(shape.k),
            "branch_lanes": _power_of_2(shape.branches),
            "prob_lanes": _power_of_2(max(shape.top_m, 1)),
        }
        # One load of 16 bytes shows whether anything of a record is new.
        for name in ("prediction", "fallback"):
            assert numbers[f"{name}_stamp"] == 0 and numbers[f"{name}_depth"] < 4
        return KernelLayout(tuple(numbers.items()))


def _words(record: np.dtype) -> dict[str, int]:
    """Where each field of a record begins, in 4-byte words."""
    assert record.fields is not None
    words = {}
    for name, (kind, offset, *_) in record.fields.items():
        assert offset % kind.base.alignment == 0 and record.itemsize % record.alignment == 0
        words[name] = offset // 4
    return words


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
