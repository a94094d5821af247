"""Compiles kernels for AMD's GPUs on any machine, as Triton's wheel has the compiler for them.

The project's own launches are made, with tensors on the CPU, and only compile: signatures,
constants and options are those of a real launch. Nothing runs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# The GPUs and their local memory, in bytes of a compute unit.
LOCAL_MEMORY = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}


@contextmanager
def only_compiling(arch: str) -> Iterator[list[Any]]:
    """Launches compile for this GPU, and the list gets what they compile: Triton's
    ``CompiledKernel``, each once."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if all(kernel is not other for other in compiled):
            compiled.append(kernel)
        return kernel

    no_gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", arch, 64),
        get_current_device=lambda: arch,  # under which Triton caches kernels
        get_current_stream=lambda device=None: 0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", no_gpu)
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled


def spills(kernel: Any) -> int:
    """Vector registers that did not fit."""
    found = re.search(r"\.vgpr_spill_count:\s+(\d+)", kernel.asm["amdgcn"])
    assert found is not None
    return int(found[1])


def _looking_loops(kernel: Any) -> list[list[str]]:
    """For every loop with volatile loads: those loads, each as a line of Triton's code."""
    loops: list[list[str]] = []
    regions: list[list[str] | None] = []  # open ones; None: not a loop
    for line in kernel.asm["ttir"].splitlines():
        if line.strip() == "} do {":  # from a loop's condition to its body
            continue
        if line.lstrip().startswith("}"):
            loads = regions.pop()
            loops += [loads] if loads else []
        if _is_volatile(line):
            for region in regions:
                if region is not None:
                    region.append(line)
        if line.endswith("{"):
            regions.append([] if re.search(r"\bscf\.(while|for)\b", line) else None)
    assert not regions
    return loops


def lost_reads(kernel: Any) -> str | None:
    """What became of volatile loads that the GPU's code lacks, merged, moved out of their loop or
    answered by a cache; None if all are there."""
    wanted = sum(map(_is_volatile, kernel.asm["ttir"].splitlines()))
    wanted_in_loops = sum(map(len, _looking_loops(kernel)))
    places = [in_loop for in_loop, line in _in_loops(kernel) if _is_past_caches(line)]
    if len(places) < wanted:
        return f"{len(places)} loads past the caches for {wanted} volatile ones"
    if sum(places) < wanted_in_loops:
        return f"{sum(places)} loads in loops for {wanted_in_loops} volatile ones"
    return None


def _is_volatile(line: str) -> bool:
    return "tt.load" in line and "isVolatile = true" in line


def _is_past_caches(line: str) -> bool:
    return re.search(r"\b(?:global|buffer|flat)_load_\w+ .*\bsc0 sc1\b", line) is not None


def _in_loops(kernel: Any) -> Iterator[tuple[bool, str]]:
    """The GPU's code, each line with whether it is in a loop. LLVM says so where a block begins."""
    in_loop = False
    for line in kernel.asm["amdgcn"].splitlines():
        if re.match(r"\.LBB|; %bb\.", line):
            in_loop = False
        in_loop = in_loop or re.search(r";.*\bLoop\b.*\bDepth=", line) is not None
        yield in_loop, line
