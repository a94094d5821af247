"""The engines that are compared, as vLLM's arguments and environment."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.records import OURS, Kind, Load, Side
from benchmarks.standin import environment
from vllm_ssd.service.cores import available_cores

# Both would compile kernels for minutes and change nothing measurable.
GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# How `counters` learns which table is an engine's own.
_TELL_RUN_DIR = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def engine_environment(on_gpus: bool, has_draft: bool, tensor_parallel: int) -> dict[str, str]:
    """What an engine's processes get in addition. What the user has set stays, except that vLLM
    must find the load format. has_draft: beside the target, as method ssd has it."""
    defaults = dict(GPU_ENVIRONMENT if on_gpus else CPU_ENVIRONMENT)
    if not on_gpus and not has_draft and tensor_parallel == 1:
        # vLLM's own choice would leave a core to its other processes, and a draft gets that.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, available_cores()))
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**chosen, **environment()}


@dataclass(frozen=True)
class Plan:
    """What to compare. engine: arguments of all engines. ssd: (k, f) of each; sd: k of each with
    f=0; draft_model: k of vLLM's own. options: further ones of method ssd, with f=0 too; each is a
    side of its own. The side "away" is ssd at each k, with the first options, once its draft is
    gone for good."""

    engine: dict[str, Any]
    draft: str
    tensor_parallel: int
    on_gpus: bool
    load: Load
    kinds: Sequence[Kind]
    draft_model: Sequence[int]
    sd: Sequence[int]
    ssd: Sequence[tuple[int, int]]
    options: Sequence[dict[str, Any]]

    def sides(self) -> list[Side]:
        """In the order of the table. The verify step alone is measured on GPUs only, at each k."""
        engine = self._engine()
        ours = {"method": "ssd", "model": self.draft}
        sides = [self._side("ar", "ar", 0, engine)]
        if self.on_gpus:
            for k in dict.fromkeys(k for k, _ in self.ssd):
                ngram = {"method": "ngram_gpu", "num_speculative_tokens": k}
                sides.append(self._side(f"verify k={k}", "verify", k, engine, ngram))
        for k in self.draft_model:
            own = {"method": "draft_model", "model": self.draft, "num_speculative_tokens": k}
            sides.append(self._side(f"draft_model k={k}", "draft_model", k, engine, own))
        for further in self.options:
            told = "".join(f" {name}={value}" for name, value in further.items())
            for k in self.sd:
                # As ordinary speculation does; "auto" would do without drafts where they cost more.
                options = {**ours, "k": k, "f": 0, "on_miss": "wait", **further}
                sides.append(self._side(f"sd k={k}{told}", "sd", k, engine, options))
            for k, f in self.ssd:
                options = {**ours, "k": k, "f": f, **further}
                sides.append(self._side(f"ssd k={k} f={f}{told}", "ssd", k, engine, options))
        for k, f in dict(self.ssd).items():
            options = {**ours, "k": k, "f": f, **self.options[0], "max_restarts": 0}
            sides.append(self._side(f"away k={k}", "away", k, engine, options))
        return [side for side in sides if side.kind in self.kinds]

    def _engine(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tensor_parallel,
            "disable_log_stats": False,
            **self.engine,
        }

    def _side(
        self,
        name: str,
        kind: Kind,
        k: int,
        engine: dict[str, Any],
        speculative: dict[str, Any] | None = None,
    ) -> Side:
        has_draft = kind in OURS
        gpus = self.tensor_parallel + has_draft if self.on_gpus else 0
        if speculative is not None:
            engine = {**engine, "speculative_config": speculative}
        added = engine_environment(self.on_gpus, has_draft, self.tensor_parallel)
        return Side(name, kind, k, gpus, engine, {**added, **_TELL_RUN_DIR}, self.load)
