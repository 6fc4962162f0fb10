"""Parameters cut into pieces that are stepped like parameters of their own, bit for bit.

A piece is some rows of a parameter of two or more dimensions, or some groups of a vector: groups of codes are never
cut, and with the number of its first group a piece draws the same random numbers as in the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from overcoat.host import ALIGNMENT, packed
from overcoat.kernels.adamw import rows_of
from overcoat.optim.arguments import Arguments


class Layout(NamedTuple):
    """A parameter as units that are not cut: rows, or the groups of a vector."""

    is_matrix: bool
    numel: int
    units: int
    elements: int  # of one unit
    groups: int  # of one unit

    @classmethod
    def of(cls, param: Tensor, group_size: int) -> Layout:
        rows, columns, groups = rows_of(param.shape, group_size)
        if param.dim() > 1:
            return cls(True, param.numel(), rows if columns else 0, columns, groups)
        return cls(False, param.numel(), groups, group_size, 1)


class Piece(NamedTuple):
    """Units `start` to `stop` of the parameter with the number `owner`."""

    owner: int
    layout: Layout
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.layout.units

    @property
    def first_group(self) -> int:
        return self.start * self.layout.groups

    @property
    def first_element(self) -> int:
        return self.start * self.layout.elements

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a contiguous tensor with one element for each of the parameter, or for each group."""
        flat = tensor.view(-1)
        if tensor.numel() == self.layout.numel:
            part = flat[self.first_element : self.stop * self.layout.elements]
        else:
            part = flat[self.first_group : self.stop * self.layout.groups]
        return part.view(self.stop - self.start, -1) if self.layout.is_matrix else part


def states_of(arguments: Arguments) -> dict[str, list[Tensor]]:
    """The lists of states that are there, without the step counts."""
    return {name: tensors for name, tensors in arguments.states.items() if tensors and name != "step"}


def cut(arguments: Arguments, size: int) -> Iterator[list[Piece]]:
    """All parameters in chunks whose states take at most `size` bytes, packed; as few chunks as possible.

    Raises:
        ValueError: the states of a single row are larger.
    """
    pieces: list[Piece] = []
    room = size
    for owner, param in enumerate(arguments.params):
        layout = Layout.of(param, arguments.group_size)
        states = [tensors[owner] for tensors in states_of(arguments).values()]

        def size_of(piece: Piece, states: list[Tensor] = states) -> int:
            return packed([piece.of(state).nbytes for state in states])[1]

        rest = Piece(owner, layout, 0, layout.units)
        while rest.start < rest.stop:
            piece = rest
            if size_of(rest) > room:
                unit = sum(rest._replace(stop=rest.start + 1).of(state).nbytes for state in states)
                units = max(room - ALIGNMENT * len(states), 0) // unit
                piece = rest._replace(stop=min(rest.start + units, rest.stop))
            if piece.start < piece.stop:
                pieces.append(piece)
                room -= size_of(piece)
                rest = rest._replace(start=piece.stop)
            elif pieces:
                yield pieces
                pieces, room = [], size
            else:
                raise ValueError(
                    f"offload: the states of one row of a parameter of shape {tuple(param.shape)} take {unit} bytes, a "
                    f"staging buffer has {size}; raise offload_buffer"
                )
    if pieces:
        yield pieces
