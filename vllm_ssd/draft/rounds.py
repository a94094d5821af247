"""Branches that grow together, and the programs they take turns on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_ssd.draft.attention.masks import Tree
from vllm_ssd.draft.place import Place
from vllm_ssd.draft.programs import Grow

if TYPE_CHECKING:
    from vllm_ssd.draft.request import DraftRequest


class Round:
    """A tree for each of some requests, grown in lockstep.

    rows: the requests, None where one has left. step: steps started. places: where each row
    publishes. tips: int64 [rows * branches], the tokens the trees begin with.
    """

    def __init__(
        self,
        program: Grow,
        rows: list[DraftRequest | None],
        trees: list[Tree | None],
        places: list[Place],
        tips: torch.Tensor,
    ):
        self.rows = rows
        self.step = 0
        self._program = program
        self._trees = trees
        self._places = places
        self._tips = tips
        self._loaded = False

    @property
    def empty(self) -> bool:
        return all(row is None for row in self.rows)

    def leave(self, request: DraftRequest) -> None:
        """The request's row becomes padding: its KV blocks may go to another, its slot too."""
        for index, row in enumerate(self.rows):
            if row is request:
                self.rows[index] = self._trees[index] = None
                self._places[index] = Place()
                self._keep()

    def grow(self) -> None:
        """Start the next step."""
        program = self._program
        if not self._loaded:
            if isinstance(program.owner, Round):
                program.owner._keep()
            program.load(self._trees, self._places, self.step, self._tips)
            program.owner = self
            self._loaded = True
        program.run()
        self.step += 1

    def _keep(self) -> None:
        """Take the newest tokens out of the program, to load it again later."""
        if self._loaded:
            self._tips = self._program.tips.clone()
            self._loaded = False
