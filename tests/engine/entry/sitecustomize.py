"""Python runs this first in each process that an engine test starts. Until vLLM is imported
(``tests/support/shared_cores.py``), the process rarely looks for garbage: an import leaves little,
and to look for it takes a fifth of the import's time."""

import gc

gc.set_threshold(20_000)
