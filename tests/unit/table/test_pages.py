"""What is tried and said when the table's pages become a GPU's: the kernel in Triton's
interpreter, the driver a list of what is registered."""

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

if interpreter.HERE:
    import gc

    import torch
    import triton
    import triton.language as tl

    from tests.support.sentences import refused
    from vllm_ssd.table import SpeculationTable, TableShape, pages
    from vllm_ssd.table.device_publisher import DevicePublisher

    CPU = torch.device("cpu")

    class Driver:
        """As torch gives it. error: what every registration ends with."""

        def __init__(self, error=0):
            self.error = error
            self.registered = []

        def cudaHostRegister(self, pointer, size, flags):
            if not self.error:
                self.registered.append(pointer)
            return self.error

        def cudaHostUnregister(self, pointer):
            self.registered.remove(pointer)

        def cudaGetErrorString(self, error):
            return "operation not supported"

    @triton.jit
    def lost_swap_kernel(where, found):
        """What a swap is worth on a bus without atomic operations."""
        there = tl.load(tl.load(where).to(tl.pointer_type(tl.int64)))
        tl.store(found, there)
        tl.store(found + 1, there)

    class FailingKernel:
        """As torch reports a kernel that used an address which the GPU does not have."""

        def __getitem__(self, grid):
            return self._launch

        def _launch(self, *arguments):
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nCompile with ...")

    @pytest.fixture
    def table(tmp_path):
        return SpeculationTable.create(tmp_path / "table", TableShape(slots=1, k=2, branches=2))

    @pytest.fixture
    def driver(monkeypatch):
        driver = Driver()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        return driver

    def test_a_swap_returns_what_was_there():
        words, found = torch.tensor([7, 8]), torch.zeros(2, dtype=torch.int64)
        where = torch.tensor([pages.device_address(words, CPU)])
        pages.swap_kernel[(1,)](where, found)
        assert (words.tolist(), found.tolist()) == ([1, 8], [7, 7])

    def test_only_the_table_stays_registered_and_as_long_as_it_lives(tmp_path, driver):
        table = SpeculationTable.create(tmp_path / "table", TableShape(slots=1, k=2, branches=2))
        before = bytes(table.pages)
        pages.register(table, CPU)
        assert driver.registered == [pages.memory_of(table, "u1").data_ptr()]
        assert bytes(table.pages) == before, "each word of the table is somebody's"
        del table
        gc.collect()
        assert driver.registered == []

    def test_a_table_that_leaves_is_registered_no_longer(table, tmp_path, driver):
        other = SpeculationTable.create(tmp_path / "other", table.shape)
        publisher = DevicePublisher(table.shape, CPU)
        for one in (table, other):
            publisher.join(one)
        publisher.leave(table)
        assert driver.registered == [pages.memory_of(other, "u1").data_ptr()]
        publisher.join(table)
        assert len(driver.registered) == 2

    def refuse(driver, monkeypatch):
        driver.error = 801
        return "cudaHostRegister: operation not supported"

    def lose_swaps(driver, monkeypatch):
        monkeypatch.setattr(pages, "swap_kernel", lost_swap_kernel)
        return "does not pass PCIe atomics through"

    def lead_elsewhere(driver, monkeypatch):
        """The GPU has another address for the page than the host, and other memory there."""
        elsewhere = torch.zeros(8, dtype=torch.int64)
        monkeypatch.setattr(pages, "device_address", lambda *_: elsewhere.data_ptr())
        return "do not find host memory at the address that the driver gives"

    def fail(driver, monkeypatch):
        monkeypatch.setattr(pages, "swap_kernel", FailingKernel())
        return "its kernels fail there: CUDA error: an illegal memory access)"

    @pytest.mark.parametrize("fault", [refuse, lose_swaps, lead_elsewhere, fail])
    def test_what_the_draft_says(table, driver, monkeypatch, fault):
        why = fault(driver, monkeypatch)
        with refused(why, '"tree_backend":"sdpa"', kind=OSError):
            DevicePublisher(table.shape, CPU).join(table)
        assert driver.registered == []

else:

    def test_pages_in_the_interpreter():
        interpreter.run_again(__file__)
