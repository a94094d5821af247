"""All branches that grow, of any request, round and target: one batch, which trees enter and leave
between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssd.draft.growing_tree import GrowingTree
from vllm_ssd.draft.program_cache import ProgramCache
from vllm_ssd.draft.programs import Grow
from vllm_ssd.draft.spec import DraftPolicy


class RunningBatch:
    """A step is one forward over the branches of all trees, and each tree has a step of its own.
    The first k steps of a tree give each branch a token, and one more shows the model the last of
    these. If the trees do not all fit one forward, those go first whose target may wait, then those
    with the fewest tokens."""

    def __init__(self, programs: ProgramCache, policy: DraftPolicy):
        self._programs = programs
        self._policy = policy
        self._trees: list[GrowingTree] = []
        self._running: list[GrowingTree] = []  # those in the program
        self._program: Grow | None = None

    def add(self, trees: Sequence[GrowingTree]) -> None:
        """Grow these, too."""
        self._trees = [tree for tree in self._trees if not tree.ended] + [*trees]

    @property
    def is_waited_for(self) -> bool:
        """Whether a target may wait for more tokens."""
        return any(not tree.awaited and self._lacks_tokens(tree) for tree in self._trees)

    @property
    def lacks_tokens(self) -> bool:
        """Whether a step would give a branch a token that may be of use."""
        return any(map(self._lacks_tokens, self._trees))

    @property
    def can_grow(self) -> bool:
        """Whether a step may be of use."""
        return any(map(self._is_wanted, self._trees))

    def _lacks_tokens(self, tree: GrowingTree) -> bool:
        return tree.step < self._policy.k and self._is_wanted(tree)

    def _is_wanted(self, tree: GrowingTree) -> bool:
        """A target that never waits has no use for tokens after the outcome has come."""
        return not tree.ended and (tree.awaited or self._policy.fallbacks)

    def grow(self) -> None:
        """Start a step."""
        wanted = [tree for tree in self._trees if self._is_wanted(tree)]
        if wanted != self._running:
            self._fill(wanted)
        assert self._program is not None
        self._program.run()
        for tree in self._running:
            tree.step += 1
            tree.ended |= tree.step == self._policy.tree_steps

    def _fill(self, wanted: list[GrowingTree]) -> None:
        """Choose the trees of the next steps, and tell the program."""
        self._running = wanted
        if self._programs.fitting(_branches(wanted)) < len(wanted):
            wanted = sorted(wanted, key=lambda tree: (tree.awaited, tree.step))
            self._running = wanted[: self._programs.fitting(_branches(wanted))]
        sampled = any(tree.temperature for tree in self._running)
        self._program = self._programs.grow(_branches(self._running), sampled)
        self._program.fill(self._running)


def _branches(trees: Sequence[GrowingTree]) -> list[int]:
    """The number of branches of each tree."""
    return [tree.tree.branches for tree in trees]
