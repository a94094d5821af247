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

    from tests.support.sentences import one_sentence
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
    def lost_swap_kernel(words, found):
        """What a swap is worth on a bus without atomic operations."""
        tl.store(found, tl.load(words))

    @pytest.fixture
    def table(tmp_path):
        return SpeculationTable.create(tmp_path / "table", TableShape(slots=1, k=2, branches=2))

    @pytest.fixture
    def driver(monkeypatch):
        driver = Driver()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
        return driver

    def test_a_swap_returns_what_was_there():
        words, found = torch.tensor([7, 8]), torch.zeros(1, dtype=torch.int64)
        pages.swap_kernel[(1,)](words, found)
        assert (words.tolist(), found.tolist()) == ([1, 8], [7])

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

    def test_swaps_that_do_not_arrive(table, driver, monkeypatch):
        monkeypatch.setattr(pages, "swap_kernel", lost_swap_kernel)
        with pytest.raises(OSError) as error:
            pages.register(table, CPU)
        assert "does not pass PCIe atomics through" in one_sentence(error)
        assert driver.registered == []

    @pytest.mark.parametrize("driver_refuses", [False, True])
    def test_what_the_draft_says(table, driver, monkeypatch, driver_refuses):
        if driver_refuses:
            driver.error, why = 801, "cudaHostRegister: operation not supported"
        else:
            monkeypatch.setattr(pages, "swap_kernel", lost_swap_kernel)
            why = "PCIe atomics"
        with pytest.raises(OSError) as error:
            DevicePublisher(table.shape, CPU).join(table)
        said = one_sentence(error)
        assert why in said and '"tree_backend":"sdpa"' in said

else:

    def test_pages_in_the_interpreter():
        interpreter.run_again(__file__)
