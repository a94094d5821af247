"""The draft's GPU kernels in Triton's interpreter, against what runs on the host."""

import pytest

from tests.support import interpreter

pytest.importorskip("triton")

if interpreter.HERE:
    import numpy as np
    import torch

    from tests.support.attention_cases import Pair, prompts_and_trees
    from tests.support.branch_tokens import alike
    from tests.support.publishing_cases import SIZES, DeviceMemory, publishing_leaves_the_same_bytes
    from vllm_ssd.draft.attention import triton as triton_attention
    from vllm_ssd.draft.attention.base import AttentionShape
    from vllm_ssd.draft.attention.kernels import pack_tree_masks
    from vllm_ssd.draft.attention.masks import tree_mask
    from vllm_ssd.draft.attention.sdpa import SDPAAttention
    from vllm_ssd.draft.attention.triton import TritonAttention
    from vllm_ssd.table import FALLBACK, SpeculationTable, TableShape, make_stamp, pages
    from vllm_ssd.table.device_publisher import DevicePublisher
    from vllm_ssd.table.publisher import HostPublisher, PredictedOutcomes

    CPU = torch.device("cpu")

    @pytest.mark.parametrize(
        "group, contexts, odd",
        [
            (1, [33], {}),
            (3, [1, 70], {}),
            (1, [5, 150], {"window": 40}),  # whole blocks of KV are out of sight
            (3, [33], {"window": 2, "sinks": True, "widest": 99}),  # and a part of the branch
            (3, [70], {"soft_cap": 1.0, "widest": 99}),
            (3, [1, 70], {"widest": 5, "window": 40, "sinks": True}),  # tiles for narrow trees
            (3, [1, 70], {"widest": 5, "kv_heads": 13}),  # whose KV is not split
            (71, [5], {"kv_heads": 1}),  # a tile of one branch
        ],
    )
    def test_tree_attention(group, contexts, odd, monkeypatch):
        monkeypatch.setattr(triton_attention, "ENOUGH_PROGRAMS", 12)  # each takes long here
        monkeypatch.setattr(triton_attention, "_FEW_ROWS", 6)  # two texts have large tiles
        odd = {"kv_heads": 2, "steps": 4, **odd}
        prompts_and_trees(Pair(TritonAttention, group, 16, contexts, 5, torch.float32, CPU, **odd))

    @pytest.mark.parametrize("top_m, branches", SIZES)
    def test_publishing_leaves_the_same_bytes(tmp_path, top_m, branches):
        publishing_leaves_the_same_bytes(tmp_path, CPU, top_m, branches)

    def test_a_gpu_may_have_the_tables_at_other_addresses(tmp_path, monkeypatch):
        """As on ROCm: all that is published is where the GPU has the tables, and nothing else."""
        memory = DeviceMemory()
        monkeypatch.setattr(pages, "address_kernel", memory)
        tables = publishing_leaves_the_same_bytes(tmp_path, CPU, *SIZES[1], memory.read)
        for table in tables:
            untouched = SpeculationTable.create(tmp_path / f"new{table.shape.slots}", table.shape)
            assert bytes(table.pages) == bytes(untouched.pages)

    @pytest.mark.parametrize("kind", ["device", "host"])
    def test_what_a_draft_that_hung_publishes_late_changes_nothing(tmp_path, kind):
        """Another draft has predicted outcomes of later generations; or has withdrawn them."""
        shape = TableShape(slots=3, k=3, branches=2, tail=16, top_m=2)
        table = SpeculationTable.create(tmp_path / "t", shape)
        publisher = DevicePublisher(shape, None) if kind == "device" else HostPublisher()
        rows = torch.tensor([*publisher.join(table)[:2], 0])
        probs = torch.randint(0, 2**62, (3, 2, 2))

        def stamps(generation):
            """One of them is a fallback's."""
            of_rows = make_stamp(generation, 3), make_stamp(generation, 4) | FALLBACK, 0
            return torch.tensor([int(stamp) for stamp in of_rows])

        def extend(generation, *steps):
            for step in steps:
                tokens = torch.randint(0, 100, (3, 2))
                certain = torch.rand(3, 2)
                publisher.extend(alike(rows, stamps(generation), tokens, certain, step, probs))

        def predict(generation):
            outcomes = torch.randint(0, 4, (3, 2)), torch.randint(0, 100, (3, 2))
            publisher.predict(PredictedOutcomes(rows, stamps(generation), *outcomes))

        predict(7)
        extend(7, 0)
        predict(8)
        extend(8, 0)
        before = bytes(table.pages)
        extend(7, 1)
        predict(7)
        extend(7, 0)
        assert bytes(table.pages) == before
        extend(8, 1)
        assert table.slots["prediction"]["depth"].max() == 2
        table.slots["prediction"]["stamp"] = 0
        before = bytes(table.pages)
        extend(7, 1)
        assert bytes(table.pages) == before

    def test_packed_masks():
        """Of trees that differ in length, branches and step; lengths are no multiples of 8."""
        cpu = SDPAAttention(AttentionShape(1, 1, 1, 8, 1.0, torch.float32, CPU), 11, 16, 60)
        plan, steps, row_bytes = cpu.tree_plan(10, 3), [2, 0, 1], 8
        texts, parents = [10, 33, 21], [[1, 9, 10, 4, 7], [33], [20, 3]]
        trees = [
            tree
            for own, length, lengths in zip((range(4), range(4, 8), range(8, 11)), texts, parents)
            for tree in cpu.plant([own], [length], np.array([lengths]), 3)
        ]
        plan.fill(trees, steps)
        packed = torch.full((10 * row_bytes,), 255, dtype=torch.uint8)
        pack_tree_masks(packed, plan.inputs.device, row_bytes)
        row = 0
        for tree, step in zip(trees, steps):
            count = tree.branches
            of_tree = (torch.full((count,), n) for n in (tree.linear_len, count))
            own = torch.from_numpy(tree.parents), torch.arange(count), torch.full((count,), step)
            mask = tree_mask((*of_tree, *own), tree.kv_len)
            bits = np.packbits(mask.numpy().reshape(-1), bitorder="little")
            begin = row * row_bytes
            assert packed[begin : begin + len(bits)].tolist() == bits.tolist()
            row += count

else:

    def test_the_draft_kernels_in_the_interpreter():
        interpreter.run_again(__file__)
