"""Every kernel compiled for AMD's GPUs: it compiles, it fits, and none of its reads of the table is
lost. That the GPUs compute the right thing, this does not show."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

import vllm_ssd

if interpreter.HERE:

    def test_in_a_process_that_compiles():
        interpreter.run_again(__file__)

else:
    import torch
    import triton
    import triton.language as tl

    from tests.support.amd_compiler import LOCAL_MEMORY, lost_reads, only_compiling, spills
    from tests.support.kernel_launches import launches
    from vllm_ssd.table.kernel_access import read

    _MOST_SPILLS = 32  # vector registers; a few cost nothing

    @pytest.fixture(scope="module", params=LOCAL_MEMORY)
    def compiled(request, tmp_path_factory) -> SimpleNamespace:
        """All launches for one GPU. kernels: each with the name of its launch. errors: of launches
        that do not compile."""
        found = SimpleNamespace(arch=request.param, kernels=[], errors=[])
        of_all = found.arch == "gfx942"  # which has the least local memory
        for title, launch in launches(tmp_path_factory.mktemp("tables"), of_all):
            with only_compiling(found.arch) as kernels:
                try:
                    launch()
                except Exception as error:  # of any stage of the compiler
                    found.errors.append(f"{title}: {error.__cause__ or error}")
            found.kernels += [(title, kernel) for kernel in kernels]
        return found

    def launched() -> set[str]:
        """The kernels that the package launches: what is called as ``kernel[grid](...)``."""
        return {
            call.func.value.id
            for path in Path(vllm_ssd.__file__).parent.rglob("*.py")
            for call in ast.walk(ast.parse(path.read_text()))
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Subscript)
            and isinstance(call.func.value, ast.Name)
        }

    def test_every_kernel_compiles(compiled):
        assert not compiled.errors
        assert {kernel.metadata.name for _, kernel in compiled.kernels} == launched()

    def test_every_kernel_fits(compiled):
        for title, kernel in compiled.kernels:
            assert kernel.metadata.shared <= LOCAL_MEMORY[compiled.arch], title
            assert spills(kernel) <= _MOST_SPILLS, title

    def test_no_read_of_the_table_is_lost(compiled):
        for title, kernel in compiled.kernels:
            assert lost_reads(kernel) is None, title

    @triton.jit
    def _spin(stamps, state, limit, found, READS_STATE: tl.constexpr):
        """Waits for a change of a block of stamps, or of the state."""
        lane = tl.arange(0, 4)
        looks = 0
        waiting = True
        while waiting & (looks < limit):
            waiting = tl.max(read(stamps + lane)) == 0
            if READS_STATE:
                waiting = waiting & (read(state) == 0)
            looks += 1
        tl.store(found, looks)

    @pytest.mark.parametrize("arch", LOCAL_MEMORY)
    def test_a_loop_without_such_a_read_is_found_out(arch):
        zeros = torch.zeros(4, dtype=torch.int64)
        with only_compiling(arch) as kernels:
            for reads_state in (True, False):
                _spin[(1,)](zeros, zeros, 1000, zeros, reads_state, num_warps=1)
        sound, broken = kernels
        assert lost_reads(sound) is None
        assert lost_reads(broken) == "0 loads in loops for 1 volatile ones"
