"""The speculation table: shared memory through which target and draft meet every round.

``schema.py`` defines its fields and the rules for reading and writing them. Each record has two
modules: one for the host, with its writer and its reader, and one for GPU kernels:

    record       writer -> reader   host             kernels
    outcome      target -> draft    outcomes.py      outcome_kernels.py
    prediction   draft -> target    predictions.py   prediction_kernels.py

``publisher.py`` and ``device_publisher.py`` publish what the draft's programs computed.
``draft_probs.py`` has the format of the distributions that are stored with sampled drafts.
"""

from vllm_ssd.table.schema import (
    ASLEEP,
    DRAFTING,
    FALLBACK,
    FOR_GOOD,
    GIVEN_UP,
    LAST_GENERATION,
    LOST,
    PREPARING,
    RELOADING,
    TableOwner,
    TableShape,
    is_own_draft,
    make_stamp,
    split_stamp,
)
from vllm_ssd.table.speculation_table import SpeculationTable
