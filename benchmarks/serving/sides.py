"""The servers that are compared: vLLM's arguments and environment of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.common.models import Model
from benchmarks.common.sides import engine_environment
from benchmarks.serving.records import OURS, Kind, Side
from benchmarks.standin.head import head_options
from vllm_ssd.config.default_drafts import default_k_and_f


@dataclass(frozen=True)
class Plan:
    """What to compare.

    engine: arguments of all servers. drafts: models of ssd and draft_model, each a side of its own,
    as is each k and f of ssd, None = its default. ssd-f0 has the same k if one is given;
    draft_model, ngram and eagle3, whose head is ``eagle3``, have ``other_k``. accepted: tokens a
    round that a head without weights is given, each a side. options: further ones of ssd, each
    combination a side. gpus: visible ones, 0 on CPUs.
    """

    engine: dict[str, Any]
    kinds: Sequence[Kind]
    drafts: Sequence[Model]
    k: Sequence[int | None]
    f: Sequence[int | None]
    other_k: Sequence[int]
    gpus: int
    options: Sequence[dict[str, Any]] = ({},)
    eagle3: str | None = None
    accepted: Sequence[float] = ()

    def sides(self) -> list[Side]:
        """Those that this machine can run, in the order of the table."""
        return [side for side in self._all() if self._obstacle(side) is None]

    def left_out(self) -> list[str]:
        """What the others need, a phrase each."""
        return [obstacle for side in self._all() if (obstacle := self._obstacle(side))]

    def _all(self) -> list[Side]:
        return [
            self._side(name, kind, speculation)
            for kind in self.kinds
            for name, speculation in self._of_kind(kind)
        ]

    def _obstacle(self, side: Side) -> str | None:
        if side.gpus > self.gpus:
            return f"{side.name} needs {side.gpus} GPUs of {self.gpus}"
        if side.kind == "eagle3" and self.accepted and not self.gpus:
            return f"{side.name} needs a GPU: vLLM gives no acceptance on CPUs"
        return None

    def _of_kind(self, kind: Kind) -> list[tuple[str, dict[str, Any] | None]]:
        """(name, --speculative-config) of all sides of a kind."""
        if kind == "plain":
            return [(kind, None)]
        if kind in OURS:
            return self._ours(kind)
        if kind == "draft_model":
            models = [(draft.path, self._of(draft)) for draft in self.drafts]
            return self._vllms(kind, [({"model": path}, told) for path, told in models])
        if kind == "eagle3":
            head = {"model": self.eagle3}
            given = [({**head, **head_options(n)}, f" given {n:g}") for n in self.accepted]
            return self._vllms(kind, given or ([(head, "")] if self.eagle3 else []))
        return self._vllms(kind, [({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, "")])

    def _vllms(
        self, method: str, variants: Sequence[tuple[dict[str, Any], str]]
    ) -> list[tuple[str, dict[str, Any] | None]]:
        """Sides with a method of vLLM's. variants: (further options, what tells them apart)."""
        return [
            (f"{method} k={k}{told}", {"method": method, **own, "num_speculative_tokens": k})
            for own, told in variants
            for k in self.other_k
        ]

    def _ours(self, kind: Kind) -> list[tuple[str, dict[str, Any] | None]]:
        fixed: dict[str, Any] = {"method": "ssd"}
        if kind == "ssd-f0":
            # As ordinary speculation does; "auto" would do without drafts where they cost more.
            fixed["on_miss"] = "wait"
        found: list[tuple[str, dict[str, Any] | None]] = []
        for draft, further, k in product(self.drafts, self.options, self.k):
            for f in [0] if kind == "ssd-f0" else self.f:
                own = {name: n for name, n in (("k", k), ("f", f)) if n is not None} | further
                all_verified = further.get("enable_adaptive_verification") is False
                usual = default_k_and_f(k, f, not self.gpus, all_verified)
                known = dict(zip("kf", usual)) | further
                shown = (f" {name}={n}" for name, n in known.items() if (name, n) != ("f", 0))
                told = "".join([kind, *shown, self._of(draft)])
                found.append((told, {**fixed, "model": draft.path, **own}))
        return found

    def _of(self, draft: Model) -> str:
        """What tells sides with several drafts apart."""
        return f" draft={draft.name}" if len(self.drafts) > 1 else ""

    def _side(self, name: str, kind: Kind, speculation: dict[str, Any] | None) -> Side:
        has_draft = kind in OURS
        engine, tp = {**self.engine}, self.engine.get("tensor_parallel_size", 1)
        if speculation is not None:
            engine["speculative_config"] = speculation
        environment = engine_environment(self.gpus > 0, has_draft, tp)
        ranks = tp * self.engine.get("data_parallel_size", 1)
        ranks *= self.engine.get("pipeline_parallel_size", 1)
        # A draft_device that is named may be one of the target's.
        named = str((speculation or {}).get("draft_device"))
        has_gpu = has_draft and named not in map(str, range(ranks))
        gpus = ranks + has_gpu if self.gpus else 0
        return Side(name, kind, gpus, engine, environment)
