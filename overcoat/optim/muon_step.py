"""Muon's step groups: matrices are worked on in rounds, alone or by several processes.

A step group's matrices are worked on in rounds, so that temporary memory does not grow with the model: momentum of a
round's matrices, Newton-Schulz, weights. Of a sharded parameter (FSDP2) every process holds rows; Newton-Schulz needs
whole matrices. They are dealt to the processes, balanced by work; in each round every process sends its rows of u to
the matrices' owners, in one all-to-all, and gets its rows of the result by another, while other rounds compute:

    this process' rows: momentum, u -> all-to-all -> whole matrices: Newton-Schulz -> all-to-all -> its rows: weights

The bits are those of one process: momentum and weights are per element, and Newton-Schulz sees the same matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from overcoat.formats.masters import resolve_master
from overcoat.kernels import muon as kernels
from overcoat.kernels.adamw import Piece, Rows, rows_of
from overcoat.kernels.adamw_step import StepTensors, step_coefficients
from overcoat.kernels.muon import MuonHyper, Part, Passes
from overcoat.optim.sharding import first_row, is_cut, local
from overcoat.optim.step import StepGroup

# Elements of a round, unless one matrix has more: of u in BF16 32 MiB.
ROUND = 2**24
# Matrices of a round: a launch's grid has at most 65,535 programs along its second axis.
MOST = 2**15


class Matrix(NamedTuple):
    """One matrix: rows from `start` on of parameter number `owner`, viewed as (rows, columns); sizes of the matrix.

    bounds: the rows of it that each process holds, (start, stop).
    """

    owner: int
    start: int
    rows: int
    columns: int
    bounds: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for matrices that can be orthogonalized together."""
        return self.rows, self.columns, self.bounds


class Mesh(NamedTuple):
    """The processes that share the matrices of a step group, and this one's number; alone: group None."""

    group: Optional[dist.ProcessGroup]
    rank: int
    size: int


def mesh_of(param: Tensor) -> Mesh:
    """Return the processes that hold rows of a matrix; of batches of matrices each process holds whole ones."""
    if is_cut(param) and param.dim() == 2:
        for dim, placement in enumerate(param.placements):
            if placement == Shard(0) and param.device_mesh.size(dim) > 1:
                return Mesh(param.device_mesh.get_group(dim), param.device_mesh.get_local_rank(dim),
                            param.device_mesh.size(dim))  # fmt: skip
    return Mesh(None, 0, 1)


def matrices_of(owner: int, param: Tensor, splits: Sequence[int] | None, processes: int) -> list[Matrix]:
    """Return the matrices of a parameter: of this process' slices, or of a 2-d one all, with everyone's rows."""
    shape = local(param).shape if param.dim() == 3 else param.shape
    if param.dim() == 3:
        count, rows, columns = shape
        return [Matrix(owner, i * rows, rows, columns, ((0, rows),)) for i in range(count if rows * columns else 0)]
    per_process, start, found = -(-shape[0] // processes), 0, []
    for rows in splits or shape[:1]:
        cuts = [min(max(rank * per_process - start, 0), rows) for rank in range(processes)] + [rows]
        found.append(Matrix(owner, start, rows, shape[1], tuple(itertools.pairwise(cuts))))
        start += rows
    return [matrix for matrix in found if matrix.rows and matrix.columns]


def deal(matrices: Sequence[Matrix], processes: int, steps: int) -> list[list[Matrix]]:
    """Divide matrices between processes so that all have about the same work; the same on every process."""
    hands: list[list[Matrix]] = [[] for _ in range(processes)]
    loads = [0] * processes
    work = {matrix: kernels.flops(matrix.rows, matrix.columns, steps) for matrix in matrices}
    for matrix in sorted(matrices, key=lambda each: (-work[each], each)):
        rank = loads.index(min(loads))
        hands[rank].append(matrix)
        loads[rank] += work[matrix]
    return hands


def chunks(matrices: Sequence[Matrix], most: int) -> list[list[Matrix]]:
    """Return matrices of one kind in lists of at most `most` elements, the largest first."""
    found: list[list[Matrix]] = []
    for matrix in sorted(matrices, key=lambda each: (-each.rows * each.columns, each.kind, each)):
        size = matrix.rows * matrix.columns
        room = found and found[-1][0].kind == matrix.kind and len(found[-1]) < MOST
        if room and (len(found[-1]) + 1) * size <= most:
            found[-1].append(matrix)
        else:
            found.append([matrix])
    return found


class Round:
    """Matrices that are worked on at once: of each process' own a chunk, whose rows are exchanged.

    own: this process' chunk; parts: this process' rows of all chunks, in the order of the chunks.
    """

    def __init__(
        self,
        of: Sequence[Sequence[Matrix]],
        layouts: Sequence[Rows],
        firsts: Sequence[int],
        group: Mapping[str, Any],
        mesh: Mesh,
    ) -> None:
        """layouts: of the parameters' parts in this process; firsts: numbers of their first rows."""
        self.mesh, self.own = mesh, list(of[mesh.rank])
        self.parts: list[Part] = []
        self.sent: list[int] = []  # elements for each process
        offset = 0
        for chunk in of:
            before = offset
            for matrix in chunk:
                piece = self._piece(matrix, layouts[matrix.owner], firsts[matrix.owner])
                part = Part(piece, offset, _ratio(group, matrix))
                self.parts.append(part)
                offset += part.numel
            self.sent.append(offset - before)
        self.numel = offset
        sizes = [stop - start for start, stop in self.own[0].bounds] if self.own else [0] * mesh.size
        self.received = [rows * len(self.own) * (self.own[0].columns if self.own else 0) for rows in sizes]

    def _piece(self, matrix: Matrix, layout: Rows, first: int) -> Piece:
        """Return the rows of this process' part of a parameter, in `layout`, that belong to a matrix."""
        start, stop = (matrix.start + row - first for row in matrix.bounds[self.mesh.rank])
        if start == stop:
            return Piece(matrix.owner, 0, 0, layout)
        # Short rows of 3-d parameters are laid out together: one row of `layout` is then a whole matrix.
        width = layout.columns // matrix.columns
        return Piece(matrix.owner, start // width, stop // width, layout)

    def collect(self, updates: Tensor) -> Exchange:
        """Begin to send this process' rows of u, `updates` (flat BF16), to the matrices' owners."""
        if self.mesh.size == 1:
            return Exchange(updates, updates, None)
        return _all_to_all(updates, self.received, self.sent, self.mesh.group)

    def orthogonalize(self, arriving: Exchange, steps: int) -> Exchange:
        """Orthogonalize this process' matrices, and begin to send the rows of the result, FP16, back."""
        updates = arriving.wait()
        updates = self._divided(kernels.orthogonalize(self._assembled(updates), steps)) if self.own else updates.half()
        if self.mesh.size == 1:
            return Exchange(updates, updates, None)
        return _all_to_all(updates, self.sent, self.received, self.mesh.group)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.own), self.own[0].rows, self.own[0].columns

    @property
    def _is_whole(self) -> bool:
        """True if the rows of all processes, one after the other, are the matrices."""
        return self.mesh.size == 1 or len(self.own) == 1

    def _assembled(self, received: Tensor) -> Tensor:
        """Return whole matrices from each process' rows of all of them."""
        if self._is_whole:
            return received.view(self._shape)
        whole = received.new_empty(self._shape)
        for (start, stop), rows in zip(self.own[0].bounds, received.split(self.received), strict=True):
            whole[:, start:stop] = rows.view(len(self.own), stop - start, self.own[0].columns)
        return whole

    def _divided(self, whole: Tensor) -> Tensor:
        """Undo `_assembled`."""
        if self._is_whole:
            return whole.view(-1)
        return torch.cat([whole[:, start:stop].reshape(-1) for start, stop in self.own[0].bounds])


def round_bytes(matrices: Sequence[Tensor], processes: int = 1) -> int:
    """Return the bytes that the largest round allocates and frees, in a step of all matrices at once."""
    sizes = {(*matrix.shape[-2:],): 0 for matrix in matrices}
    for matrix in matrices:
        sizes[(*matrix.shape[-2:],)] += matrix.shape[0] if matrix.dim() == 3 else 1
    most = max([ROUND, *(rows * columns for rows, columns in sizes)])
    found = [0]
    for (rows, columns), count in sizes.items():
        of_round = min(count, max(most // (rows * columns), 1))
        buffers = 2 if processes == 1 else 6  # u and what it becomes, of this process and as it travels
        found.append(2 * of_round * (buffers * rows * columns + 5 * min(rows, columns) ** 2))
    return max(found)


def _ratio(group: Mapping[str, Any], matrix: Matrix) -> float:
    """Return the factor of the learning rate."""
    if group["scale"] == "spectral":
        ratio = matrix.rows / matrix.columns
        return math.sqrt(max(1.0, 1 / ratio if group["transposed"] else ratio))
    return 0.2 * math.sqrt(max(matrix.rows, matrix.columns))


class Exchange(NamedTuple):
    """Rows on their way between processes: what this one gets and what it sends."""

    result: Tensor
    sent: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Return the result; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def _all_to_all(sent: Tensor, received: list[int], sizes: list[int], group: Optional[dist.ProcessGroup]) -> Exchange:
    """Begin to send `sizes` elements of a flat 16-bit tensor to each process and to get `received` ones of each."""
    result = sent.new_empty(sum(received))
    taken, given = ([2 * size for size in each] for each in (received, sizes))  # bytes, which gloo sends too
    work = dist.all_to_all_single(
        result.view(torch.uint8), sent.view(torch.uint8), taken, given, group=group, async_op=True
    )
    return Exchange(result, sent, work)


class Staged(NamedTuple):
    """States of a round that are on the device; `muon_offload.MatrixChunk` is some that are in host memory.

    tensors, parts: for the reference; passes: over memory, by kernels.
    """

    tensors: StepTensors
    parts: list[Part]
    passes: Optional[Passes]

    def pieces_of(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def of(self, values: Tensor) -> Tensor:
        return values


class MuonStepGroup(StepGroup):
    """A step group of matrices; arguments as in `StepGroup`."""

    def __init__(
        self, optimizer: Any, group: Mapping[str, Any], params: Sequence[Tensor], indices: Sequence[int]
    ) -> None:
        self.group, self.shape_options = group, self._shape_options(group)
        super().__init__(optimizer, group, params, indices)

    @staticmethod
    def _shape_options(group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the options that the rounds are made of."""
        return group["splits"], group["steps"], group["scale"], group["transposed"]

    def holds(self) -> bool:
        return self.shape_options == self._shape_options(self.group) and super().holds()

    def _prepare(self) -> None:
        owners: dict[Mesh, list[int]] = {}
        for owner, param in enumerate(self.params):
            owners.setdefault(mesh_of(param), []).append(owner)
        self.rounds = [round for mesh, of in owners.items() for round in self._rounds(mesh, of)]
        self._prepare_passes()

    def _prepare_passes(self) -> None:
        if self.on_kernel:
            tensors = self.with_states()
            self.passes = [Passes(tensors, round.parts) for round in self.rounds]

    def held(self, number: int, states: str) -> Iterator[Any]:
        """Yield what holds the states of a round, while they are on the device.

        states: "momentum" or "remainder", one for each of the passes over memory.
        """
        if self.on_kernel:
            yield Staged(self.tensors, self.rounds[number].parts, self.passes[number])
        else:
            yield Staged(self.with_states(), self.rounds[number].parts, None)

    def _rounds(self, mesh: Mesh, owners: Sequence[int]) -> list[Round]:
        """Return the rounds of the parameters `owners`, whose matrices these processes share."""
        splits, steps, size = (self.group[name] for name in ("splits", "steps", "group_size"))
        matrices = [matrix for i in owners for matrix in matrices_of(i, self.params[i], splits, mesh.size)]
        most = max([ROUND, *(matrix.rows * matrix.columns for matrix in matrices)])
        hands = [chunks(hand, most) for hand in deal(matrices, mesh.size, steps)]
        layouts = [rows_of(param.shape, int(size)) for param in self.tensors.params]
        firsts = [first_row(param) if mesh.size > 1 else 0 for param in self.params]
        turns = itertools.zip_longest(*hands, fillvalue=())
        return [Round(of, layouts, firsts, self.group, mesh) for of in turns]

    def hyper_of(self, group: Mapping[str, Any]) -> MuonHyper:
        master, size = resolve_master(group["master"], self.dtype), int(group["group_size"])
        momentum, decay, (code,) = group["momentum"], group["weight_decay"], group["moments"]
        return kernels.hyper(momentum, group["nesterov"], decay, code, master, size, group["steps"])

    def _buffer(self, round: Round) -> Tensor:
        return torch.empty(round.numel, dtype=torch.bfloat16, device=self.device)

    def _work_through(self, begin: Callable[[int], Tensor], apply: Callable[[int, Tensor], None], steps: int) -> None:
        """Work on all rounds. begin: computes u of a round; apply: steps the weights by a round's result.

        Of rounds that several processes share, the next one's u and the last one's result travel during Newton-Schulz.
        """
        arriving: dict[int, Exchange] = {}
        leaving: dict[int, Exchange] = {}
        for number, round in enumerate(self.rounds):
            ahead = 2 if round.mesh.size > 1 else 1
            for each in range(number, min(number + ahead, len(self.rounds))):
                if each not in arriving:
                    arriving[each] = self.rounds[each].collect(begin(each))
            leaving[number] = round.orthogonalize(arriving.pop(number), steps)
            for each in list(leaving):
                if each < number or ahead == 1:
                    apply(each, leaving.pop(each).wait())
        for each, exchange in leaving.items():
            apply(each, exchange.wait())

    def _launch(self, counted: tuple[Tensor, Tensor], factor: Tensor, skip: Tensor, hyper: MuonHyper) -> None:
        addresses, dtype = self.gradients.addresses, self.gradients.dtype

        def begin(number: int) -> Tensor:
            updates = self._buffer(self.rounds[number])
            for held in self.held(number, "momentum"):
                held.passes.momentum(addresses, dtype, updates, counted[0], factor, skip, hyper)
            return updates

        def apply(number: int, updates: Tensor) -> None:
            for held in self.held(number, "remainder"):
                held.passes.apply(updates, counted, skip, hyper)

        self._work_through(begin, apply, hyper.steps)

    def _reference(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: MuonHyper) -> None:
        all_counters, skipped = [state["step"] for state in self.states()], skip.expand(len(self.params)).tolist()
        counters = [of for of, is_skipped in zip(all_counters, skipped, strict=True) if not is_skipped]
        if counters:
            torch._foreach_add_(counters, 1.0)
        steps = torch.stack(all_counters)
        coefficients = step_coefficients(steps, lr, *hyper[:4])

        def begin(number: int) -> Tensor:
            updates = self._buffer(self.rounds[number]).zero_()
            for held in self.held(number, "momentum"):
                tensors, parts, of = held.tensors, held.parts, held.of
                of_parts = held.pieces_of(grads)
                kernels.reference_momentum(tensors, parts, of_parts, updates, of(steps), factor, of(skip), hyper)
            return updates

        def apply(number: int, updates: Tensor) -> None:
            for held in self.held(number, "remainder"):
                tensors, parts, of = held.tensors, held.parts, held.of
                kernels.reference_apply(tensors, parts, updates, of(steps), of(coefficients), of(skip), hyper)

        self._work_through(begin, apply, hyper.steps)
