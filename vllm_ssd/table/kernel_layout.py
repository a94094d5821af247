"""Offsets of the speculation table's fields for kernels, computed from the table's dtypes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import triton

from vllm_ssd.table.schema import WAIT_COUNTERS, TableShape


@dataclass(frozen=True, eq=False)
class KernelLayout:
    """Offsets and sizes for kernels, as attributes; a kernel takes a layout as its constant ``AT``.

    In 4-byte words: slots: offset of the first slot in the table; slot_size: size of a slot. state,
    tail, outcome, prediction: offsets of a slot's fields. The last two have two records each, and
    the offset is the first one's. outcome_size etc.: size of one record. outcome_stamp
    etc.: a field's offset in its record. Word w of the table is in word w // 2 of its int64 view.
    In 8-byte words: counter_rounds etc.: a counter's offset from the target's first one.
    Counts: k, branches, top_m, tail_size: numbers of ``TableShape``. wait_counters: counters of
    waits, by duration. token_lanes, branch_lanes, prob_lanes, wait_lanes: k, branches, top_m and
    wait_counters, rounded up to a power of two.

    ``of`` makes one layout per shape, so layouts are compared by identity. A launch compares its
    constants with those of earlier launches; comparing all numbers would take longer.
    """

    numbers: tuple[tuple[str, int], ...]

    def __getattr__(self, name: str) -> int:
        for known, number in self.__dict__.get("numbers", ()):
            if known == name:
                return number
        raise AttributeError(name)

    @staticmethod
    @functools.cache
    def of(shape: TableShape) -> KernelLayout:
        """The layout of tables of a shape."""
        slots, slot = shape.parts["slots"], shape.parts["slots"].dtype
        assert slots.offset % 8 == 0 and slot.itemsize % 8 == 0
        numbers = {"slots": slots.offset // 4, "slot_size": slot.itemsize // 4, **_words(slot)}
        for name in ("outcome", "prediction"):
            record = slot[name].base
            numbers[f"{name}_size"] = record.itemsize // 4
            numbers |= {f"{name}_{field}": word for field, word in _words(record).items()}
        counters = _words(shape.target_dtype())
        numbers |= {f"counter_{name}": word // 2 for name, word in counters.items()}
        numbers |= {
            "k": shape.k,
            "branches": shape.branches,
            "top_m": shape.top_m,
            "tail_size": shape.tail,
            "wait_counters": WAIT_COUNTERS,
            "wait_lanes": triton.next_power_of_2(WAIT_COUNTERS),
            "token_lanes": triton.next_power_of_2(shape.k),
            "branch_lanes": triton.next_power_of_2(shape.branches),
            "prob_lanes": triton.next_power_of_2(max(shape.top_m, 1)),
        }
        # ``read_head`` looks for news of a record in its first 16 bytes.
        assert numbers["prediction_stamp"] == 0 and numbers["prediction_depth"] < 4
        # ``find`` reads two numbers of a prediction together.
        assert numbers["prediction_depth"] == numbers["prediction_count"] + 1
        return KernelLayout(tuple(numbers.items()))


def _words(record: np.dtype) -> dict[str, int]:
    """The offset of each field of a record, in 4-byte words."""
    assert record.fields is not None
    words = {}
    for name, (kind, offset, *_) in record.fields.items():
        assert offset % kind.base.alignment == 0 and record.itemsize % record.alignment == 0
        words[name] = offset // 4
    return words
