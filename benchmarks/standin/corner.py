"""Small matrices placed in a corner of larger ones, along the axes of a Llama."""

import math
from dataclasses import dataclass

import torch

from benchmarks.standin.shapes import Shape

# Odd, so that neighbouring rows of a tiled matrix differ.
_BLOCK = 2**22 - 1
_SCALE = 0.02


@dataclass(frozen=True)
class Axis:
    """A dimension of a large matrix: its size, and where the small model's indices go (int64)."""

    size: int
    places: torch.Tensor


class Corner:
    """Makes the large tensors of one stand-in, in one dtype and on one device.

    Its axes are `hidden` [H], `neurons` [F], `queries` [heads * D] and `keys` [kv heads * D], the
    last also for values. A weight of None stands for a layer that the small model does not have.
    """

    def __init__(
        self, small: Shape, large: Shape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.hidden = Axis(large.hidden, torch.arange(small.hidden, device=device))
        self.neurons = Axis(large.intermediate, torch.arange(small.intermediate, device=device))
        # A query head keeps its key/value head; groups start further apart where they have grown.
        head = torch.arange(small.heads, device=device)
        group, member = head // small.queries_per_kv, head % small.queries_per_kv
        self._query_heads = group * large.queries_per_kv + member
        self.queries = _head_axis(self._query_heads, small, large, large.heads)
        kv_head = torch.arange(small.kv_heads, device=device)
        self.keys = _head_axis(kv_head, small, large, large.kv_heads)
        self._small, self._large = small, large
        generator = torch.Generator(device).manual_seed(0)
        self._block = torch.randn(_BLOCK, generator=generator, dtype=dtype, device=device) * _SCALE

    def reading(self, rows: Axis, columns: Axis, weight: torch.Tensor | None) -> torch.Tensor:
        """Return a matrix [rows, columns] that reads the residual stream: filler off the corner.

        Filler, the same in every matrix, is tiled from one block: drawing it all would take
        longer than everything else.
        """
        numbers = self._block.new_empty(rows.size * columns.size)
        for start in range(0, len(numbers), _BLOCK):
            part = numbers[start : start + _BLOCK]
            part.copy_(self._block[: len(part)])
        return _put(numbers.view(rows.size, columns.size), rows, columns, weight)

    def writing(self, rows: Axis, columns: Axis, weight: torch.Tensor | None) -> torch.Tensor:
        """Return a matrix [rows, columns] that writes the residual stream: zero off the corner."""
        return _put(self._block.new_zeros(rows.size, columns.size), rows, columns, weight)

    def query(self, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the q projection [heads * D, H]."""
        matrix = self.reading(self.queries, self.hidden, None)
        if weight is None:
            return matrix
        # Between the small head's dimensions the keys are filler, which zeros here cancel.
        by_head = matrix.view(self._large.heads, self._large.head_dim, self.hidden.size)
        by_head[self._query_heads, :, : self._small.hidden] = 0
        scale = math.sqrt(self._large.head_dim / self._small.head_dim)
        return _put(matrix, self.queries, self.hidden, weight * scale)

    def norm(self, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the weights of an RMSNorm [H]."""
        vector = self._block.new_ones(self.hidden.size)
        if weight is not None:
            scale = math.sqrt(self._small.hidden / self._large.hidden)
            vector[self.hidden.places] = (weight * scale).to(vector.dtype)
        return vector


def _put(
    matrix: torch.Tensor, rows: Axis, columns: Axis, weight: torch.Tensor | None
) -> torch.Tensor:
    """Copy the small model's weight to its places in `matrix`, and return `matrix`."""
    if weight is not None:
        matrix[rows.places[:, None], columns.places] = weight.to(matrix.dtype)
    return matrix


def _head_axis(heads: torch.Tensor, small: Shape, large: Shape, count: int) -> Axis:
    """Return the axis of `count` large heads, where small head i becomes number `heads[i]`.

    Dimensions p and p + d/2 of a head are a rotary pair whose frequency depends on p/d only: in a
    head of D dimensions it is that of pair p * D/d.
    """
    pair = torch.arange(small.head_dim // 2, device=heads.device)
    first = pair * (large.head_dim // small.head_dim)
    dimension = torch.cat([first, first + large.head_dim // 2])
    places = heads[:, None] * large.head_dim + dimension
    return Axis(count * large.head_dim, places.flatten())
