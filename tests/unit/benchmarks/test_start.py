"""What a server's log says of its start."""

from datetime import datetime

from benchmarks.start import stages

LOG = """\
(EngineCore pid=7) INFO 11-24 11:20:20 [core.py:139] Initializing a V1 LLM engine (v0.33.0)
(EngineCore pid=7) INFO 11-24 11:20:31 [default_loader.py:506] Loading weights took 0.47 seconds
(DraftServer pid=9) INFO 11-24 11:20:35 [default_loader.py:506] Loading weights took 0.12 seconds
Capturing CUDA graphs (FULL): 100%
(EngineCore pid=7) INFO 11-24 11:21:02 [model_runner.py:1163] Graph capturing finished in 20 secs
"""


def test_stages_are_told_by_the_first_line_that_ends_them():
    begun = datetime(2026, 11, 24, 11, 20, 0)
    assert stages(LOG, begun) == [
        ("engine core begins", 20),
        ("weights loaded", 31),
        ("graphs and step costs", 62),
    ]
