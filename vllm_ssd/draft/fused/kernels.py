"""A decoder layer's products, for so few tokens that reading the weights takes most of the time.

A program multiplies some rows of a weight with all tokens, up to ROWS of them. So weights are read
once, a tile of CHUNK columns at a time. A program fetches the first AHEAD columns before their
inputs are there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_ssd.draft.overlap import fetch, let_next_begin, wait_for_last


@triton.jit
def project_kernel(
    inputs,  # [rows, INPUTS]
    weight,  # [OUTPUTS, INPUTS]
    parts,  # float32 [SPLITS, rows, OUTPUTS]: each of a part of INPUTS
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,  # outputs of a program
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a product in parts, which a kernel of ``token_kernels.py`` adds up."""
    output = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    split = tl.program_id(1)
    PART: tl.constexpr = INPUTS // SPLITS
    fetch(weight, output, INPUTS, split * PART, AHEAD, OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.arange(0, ROWS)
    real = (token < rows)[None, :]
    total = tl.zeros([WIDTH, ROWS], tl.float32)
    for start in range(0, PART, CHUNK):
        column = split * PART + start + tl.arange(0, CHUNK)
        weights = tl.load(weight + output[:, None] * INPUTS + column[None, :])
        at = inputs + token[None, :] * INPUTS + column[:, None]
        seen = tl.load(at, mask=real, other=0)
        total = tl.dot(weights, seen, total, input_precision="ieee")
    let_next_begin(OVERLAP)
    row = split * rows + token
    tl.store(parts + row[None, :] * OUTPUTS + output[:, None], total, mask=real)


@triton.jit
def gate_kernel(
    inputs,  # [rows, CHANNELS]
    weight,  # [2 * INNER, CHANNELS]: of gates, then of what passes them
    out,  # [rows, INNER]
    rows,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,  # outputs of a program
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute the first half of a feed-forward with SiLU."""
    inner = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    fetch(weight, inner, CHANNELS, 0, AHEAD, OVERLAP)
    fetch(weight, inner + INNER, CHANNELS, 0, AHEAD, OVERLAP)
    wait_for_last(OVERLAP)
    token = tl.arange(0, ROWS)
    real = (token < rows)[None, :]
    gates = tl.zeros([WIDTH, ROWS], tl.float32)
    passing = tl.zeros([WIDTH, ROWS], tl.float32)
    for start in range(0, CHANNELS, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        of_gates = tl.load(weight + inner[:, None] * CHANNELS + channel[None, :])
        of_passing = tl.load(weight + (inner[:, None] + INNER) * CHANNELS + channel[None, :])
        at = inputs + token[None, :] * CHANNELS + channel[:, None]
        seen = tl.load(at, mask=real, other=0)
        gates = tl.dot(of_gates, seen, gates, input_precision="ieee")
        passing = tl.dot(of_passing, seen, passing, input_precision="ieee")
    let_next_begin(OVERLAP)
    passed = gates * tl.sigmoid(gates) * passing
    at = out + token[None, :] * INNER + inner[:, None]
    tl.store(at, passed.to(out.dtype.element_ty), mask=real)


@triton.jit
def likeliest_kernel(
    hidden,  # [rows, CHANNELS]
    weight,  # [vocabulary, CHANNELS]: of the output layer
    best,  # int64 [ROWS], LEAST before and after
    parts,  # float32 [2, programs, ROWS]: each program's largest logit, and its sum (see below)
    arrived,  # int32 [1], 0 before and after
    tokens,  # int64 [rows]
    probs,  # float32 [rows]: of these tokens
    rows,
    vocabulary,
    programs,
    multiplier,  # factor on logits
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,  # tokens of the vocabulary at a time
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,  # programs whose sums are added up at a time
    OVERLAP: tl.constexpr,
):
    """Find the token with the largest logit, the first if several have it, and its probability,
    without writing logits to memory. Each program has every ``programs``-th tile of the vocabulary.
    It adds up ``exp(logit - its largest logit)``. The last program to arrive writes the result."""
    first = tl.program_id(0)
    fetch(weight, first * WIDTH + tl.arange(0, WIDTH), CHANNELS, 0, AHEAD, OVERLAP)
    wait_for_last(OVERLAP)
    row = tl.arange(0, ROWS)
    real = row < rows
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    token = tl.zeros([ROWS], tl.int32)
    sum_of_exp = tl.zeros([ROWS], tl.float32)
    for tile in range(first, tl.cdiv(vocabulary, WIDTH), programs):
        output = tile * WIDTH + tl.arange(0, WIDTH)
        known = (output < vocabulary)[:, None]
        total = tl.zeros([WIDTH, ROWS], tl.float32)
        for start in range(0, CHANNELS, CHUNK):
            column = start + tl.arange(0, CHUNK)
            at = weight + output.to(tl.int64)[:, None] * CHANNELS + column[None, :]
            weights = tl.load(at, mask=known, other=0)
            at = hidden + row[None, :] * CHANNELS + column[:, None]
            seen = tl.load(at, mask=real[None, :], other=0)
            total = tl.dot(weights, seen, total, input_precision="ieee")
        rounded = total.to(hidden.dtype.element_ty).to(tl.float32) * multiplier
        logits = tl.where(known, rounded, float("-inf"))
        top, place = tl.max(logits, axis=0, return_indices=True)
        token = tl.where(top > highest, tile * WIDTH + place, token)
        higher = tl.maximum(top, highest)
        sum_of_exp *= tl.exp(highest - higher)
        sum_of_exp += tl.sum(tl.exp(logits - higher[None, :]), axis=0)
        highest = higher
    let_next_begin(OVERLAP)
    tl.store(parts + first * ROWS + row, highest)
    tl.store(parts + (programs + first) * ROWS + row, sum_of_exp)
    # One number for a logit and its token, so that an atomic operation finds the largest of all
    # programs: the logit's bits in the order of its value, then how early the token comes.
    bits = highest.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.atomic_max(best + row, key, mask=real, sem="relaxed")
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    tl.debug_barrier()
    if last:
        key = tl.load(best + row, mask=real, other=0, cache_modifier=".cg")
        tl.store(tokens + row, 0x7FFFFFFF - (key & 0x7FFFFFFF), mask=real)
        bits = (key >> 32).to(tl.int32)
        highest = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        sum_of_exp = tl.zeros([ROWS], tl.float32)
        for start in range(0, programs, PARTS):
            part = start + tl.arange(0, PARTS)
            at = parts + part[:, None] * ROWS + row[None, :]
            there = (part < programs)[:, None] & real[None, :]
            tops = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(at + programs * ROWS, mask=there, other=0, cache_modifier=".cg")
            sum_of_exp += tl.sum(sums * tl.exp(tops - highest[None, :]), axis=0)
        tl.store(probs + row, 1 / sum_of_exp, mask=real)
        tl.store(best + row, tl.full([ROWS], LEAST, tl.int64))
        tl.store(arrived, 0)
