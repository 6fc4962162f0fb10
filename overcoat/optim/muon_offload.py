"""Muon's matrices with states in host memory (offload.py): each round takes momentum in before Newton-Schulz, and the
remainders after it, so that a round's states need not fit into the staging buffers together.

    copy-in stream    [momentum 0][remainder 0]    [momentum 1] ...
    current stream                [momentum 0][Newton-Schulz 0][weights 0][momentum 1] ...
    copy-out stream                           [momentum 0]                [remainder 0] ...

A copy waits for its staging buffer alone, so that the next ones pass during Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from overcoat.kernels.adamw import Piece, Rows
from overcoat.kernels.adamw_step import StepTensors
from overcoat.kernels.muon import Part, Passes
from overcoat.optim.muon_step import MuonStepGroup
from overcoat.optim.offload import Chunk, Staging, cut


class MatrixChunk(Chunk):
    """A chunk of a round; parts: of the round, one for each piece that is in it or begins in an earlier chunk.

    Attributes: parts, by number of the piece; passes: over the staged states.
    """

    def __init__(self, whole: StepTensors, pieces: list[Piece], staging: Staging, parts: Sequence[Part]) -> None:
        super().__init__(whole, pieces, staging)
        self.parts = []
        for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
            rows, columns = piece.stop - piece.start, piece.layout.columns
            own = Piece(number, 0, rows, Rows(rows, columns, piece.layout.groups))
            self.parts.append(Part(own, part.offset + (piece.start - part.piece.start) * columns, part.ratio))
        self.passes = Passes(self.tensors, self.parts, pieces) if whole.kernel_runs() else None


class OffloadedMuonStepGroup(MuonStepGroup):
    """A step group of matrices with states in host memory; other arguments as in `StepGroup`."""

    def __init__(self, staging: Staging, *args: Any) -> None:
        self.staging = staging
        super().__init__(*args)

    def _prepare_passes(self) -> None:
        whole = self.with_states()
        remainder = {name: of for name, of in whole.states.items() if name == "remainder"}
        momentum = {name: of for name, of in whole.states.items() if name not in remainder}
        both = {"momentum": whole._replace(states=momentum), "remainder": whole._replace(states=remainder)}
        self.chunks = [{states: self._chunks(of, round.parts) for states, of in both.items()} for round in self.rounds]

    def _chunks(self, whole: StepTensors, parts: list[Part]) -> list[MatrixChunk]:
        """Return the chunks of some parts' states, which are those of `whole`."""
        first = {(part.piece.owner, part.piece.start): part for part in parts if part.numel}
        found: list[MatrixChunk] = []
        part: Any = None
        for pieces in cut(whole, [part.piece for part in first.values()], self.staging.size):
            # A piece begins a part, or continues the one before.
            of = [part := first.get((piece.owner, piece.start), part) for piece in pieces]
            found.append(MatrixChunk(whole, pieces, self.staging, of))
        return found

    def held(self, number: int, states: str) -> Iterator[MatrixChunk]:
        for chunk in self.chunks[number][states]:
            with self.staging.holding(chunk):
                yield chunk
