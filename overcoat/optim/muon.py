"""`Muon`: matrices step by their orthogonalized momentum, all other parameters by AdamW, in one optimizer.

    optimizer = overcoat.Muon(overcoat.muon_groups(model), lr=0.02, adamw_lr=3e-4)
    loss.backward()
    optimizer.step(clip_grad_norm=1.0)

The maths is in `overcoat.kernels.muon`. It is `AdamW` with a second kind of parameter group: one step, one state dict,
one norm of all gradients. State of a matrix: AdamW's first moment and its remainder.

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
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from overcoat.formats.masters import resolve_master
from overcoat.kernels import muon as kernels
from overcoat.kernels.adamw import Piece, Rows, rows_of
from overcoat.kernels.adamw_step import step_coefficients
from overcoat.kernels.muon import MuonHyper, Part, Passes
from overcoat.optim.adamw import AdamW
from overcoat.optim.sharding import first_row, is_cut, local
from overcoat.optim.state import MUON
from overcoat.optim.step import StepGroup

# Code of a matrix's momentum, by the name of the state.
MOMENTUM = {"8bit": "sqrt8", "fp8": "e4m3x", "bf16": "bf16", "fp32": "fp32"}
# Codes that a group's "moments" may have: those of a signed moment that need no second one.
SIGNED = ("e4m3", "e5m2", "de8", "sqrt8", "bf16", "fp32", "e4m3x", "e5m2x", "de8x")
SCALES = ("spectral", "match_rms_adamw")
# Elements of a round, unless one matrix has more: of u in BF16 32 MiB.
ROUND = 2**24
# Matrices of a round: a launch's grid has at most 65,535 programs along its second axis.
MOST = 2**15
# Components of a parameter's name that is no matrix of a hidden layer: embeddings and heads, routers and gates of
# experts, convolutions.
_NOT_HIDDEN = re.compile(
    r"(^|\.)([^.]*(embed|router|conv)[^.]*|wte|wpe|lm_head|head|score|classifier|gate|[^.]*_gate)(\.|$)|^output\."
)


class Muon(AdamW):
    """Muon for the matrices of hidden layers, AdamW for all other parameters, with 8-bit states and 24-bit weights.

    Args:
        params: `overcoat.muon_groups(model)`; or `model.named_parameters()`, divided by name and shape
            (`is_hidden_matrix`); or parameter groups with `"algorithm": "muon"` or `"adamw"`. Matrices have 2
            dimensions, or 3: then they are a batch of matrices (experts).
        lr: learning rate of the matrices.
        momentum, nesterov, steps: as in torch.optim.Muon (there ns_steps).
        weight_decay: decoupled, of all groups that have none of their own.
        adamw_lr: learning rate of AdamW's groups that have none of their own; None: `lr`, which
            scale="match_rms_adamw" makes right for both.
        state: "8bit" (default), "fp8", "bf16" or "fp32": codes of momentum and of AdamW's moments.
        scale: factor of the learning rate by a matrix's shape: "spectral" sqrt(max(1, rows / columns)), or
            "match_rms_adamw" 0.2 sqrt(max(rows, columns)), the update's RMS of AdamW.
        betas, eps: of AdamW's groups. master, group_size, seed, check_finite, clip_grad_norm: as in `AdamW`.

    A group may override any option but `state`, and give "splits": numbers of rows, such as those of q, k and v in a
    fused weight, that are orthogonalized apart; and "transposed": True if rows are a layer's inputs, so that `scale`
    counts its columns as rows. Attributes: as of `AdamW`.

    Raises:
        ValueError: as `AdamW`; or matrices are given without names and without an "algorithm".
    """

    algorithms = ("adamw", MUON)

    def __init__(
        self,
        params: Iterable[Any],
        lr: Union[float, Tensor] = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        *,
        adamw_lr: Optional[float] = None,
        state: str = "8bit",
        master: str = "auto",
        scale: str = "spectral",
        steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        group_size: int = 128,
        seed: int = 0,
        check_finite: bool = True,
        clip_grad_norm: Optional[float] = None,
    ) -> None:
        if state not in MOMENTUM:
            raise ValueError(f"state {state!r} must be one of {', '.join(MOMENTUM)}")
        self._added = {"momentum": momentum, "nesterov": nesterov, "scale": scale, "steps": steps}
        self._added |= {"splits": None, "transposed": False}
        self._adamw_lr, self._state = adamw_lr, state
        super().__init__(
            params, lr, betas, eps, weight_decay, moments=state, master=master, group_size=group_size, seed=seed,
            check_finite=check_finite, clip_grad_norm=clip_grad_norm,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ("_added", "_adamw_lr", "_state")}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for group in divided(param_group):
            if group["algorithm"] == MUON:
                group = {**self._added, **group}
                group.setdefault("moments", (MOMENTUM[self._state],))
                check_muon_options(group)
                check_matrices(group)
            elif group["algorithm"] == "adamw" and "lr" not in group:
                group["lr"] = self._lr_of_adamw()
            super().add_param_group(group)

    def _lr_of_adamw(self) -> Any:
        if self._adamw_lr is None and self._added["scale"] != "match_rms_adamw":
            raise ValueError(
                f"scale={self._added['scale']!r}: lr {self.defaults['lr']!r} is Muon's, and too large for AdamW; give "
                "adamw_lr=3e-4, or scale='match_rms_adamw' with one lr for all"
            )
        return self.defaults["lr"] if self._adamw_lr is None else self._adamw_lr

    def begin_step(self) -> None:
        for group in self.param_groups:
            if group["algorithm"] == MUON:
                check_muon_options(group)
        super().begin_step()

    def step_group_of(self, group: dict[str, Any], params: list[Tensor], indices: list[int]) -> StepGroup:
        if group["algorithm"] != MUON:
            return super().step_group_of(group, params, indices)
        for param, index in zip(params, indices, strict=True):
            self._place_state(group, param, index)
        self._owners = list(self.state)
        return MuonStepGroup(weakref.proxy(self), group, params, indices)


# ---- which parameters are matrices ------------------------------------------------------------------------------


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """True if a parameter, by name and shape, is a matrix of a hidden layer or a batch of them.

    Not embeddings, heads, norms, biases, routers and convolutions, and nothing with a single row or column.
    """
    is_matrix = param.dim() in (2, 3) and min(param.shape[-2:]) > 1
    return is_matrix and not name.endswith("bias") and not _NOT_HIDDEN.search(name)


def divided(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a parameter group as groups with an "algorithm". ValueError: it has matrices without names."""
    if isinstance(group["params"], set):  # torch refuses it
        return [{"algorithm": "adamw", **group}]
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if "algorithm" in group:
        return [{**group, "params": params}]
    of: dict[str, list[Any]] = {MUON: [], "adamw": []}
    for entry in params:
        name, param = entry if isinstance(entry, tuple) else ("", entry)
        if not isinstance(entry, tuple) and isinstance(param, Tensor) and param.dim() > 1:
            raise ValueError(
                f"overcoat.Muon got a parameter of shape {tuple(param.shape)} without a name, and cannot tell a hidden "
                "matrix from an embedding: give it overcoat.muon_groups(model), model.named_parameters(), or groups "
                'with "algorithm": "muon" or "adamw"'
            )
        of[MUON if isinstance(param, Tensor) and is_hidden_matrix(name, param) else "adamw"].append(entry)
    return [{**group, "params": of[name], "algorithm": name} for name in of if of[name]] or [
        {**group, "params": [], "algorithm": "adamw"}
    ]


def muon_groups(model: nn.Module, *, qkv: str = "split", adamw_weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for `Muon`: matrices, other weights, and vectors without weight decay.

    Trained parameters only. AdamW's are, besides what `is_hidden_matrix` excludes by name and shape: the input and
    output embeddings of a transformers model, weights of nn.Embedding and of convolutions, and routers: weights beside
    experts with as many rows.

    Args:
        qkv: "split": q, k and v of a fused weight (rows: all of q, then all of k, then all of v) are orthogonalized
            apart; "whole": as one matrix. Separate weights of q, k and v are matrices of their own in both.
        adamw_weight_decay: of embeddings, heads and routers.

    ValueError: a fused weight has q, k and v in another order, and qkv is "split".
    """
    if qkv not in ("split", "whole"):
        raise ValueError(f"qkv {qkv!r} must be 'split' or 'whole'")
    others, config = _not_hidden(model), _text_config(model)
    matrices: dict[tuple[tuple[int, ...], bool], list[Tensor]] = {}
    transposed = _transposed(model)
    tables: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        is_hidden = is_hidden_matrix(name, param) and id(param) not in others
        if is_hidden and not _is_router(name, param, model, config):
            splits = _qkv_rows(name, param, model, config) if qkv == "split" else ()
            matrices.setdefault((splits, id(param) in transposed), []).append(param)
        else:
            (vectors if param.dim() < 2 or name.endswith("bias") else tables).append(param)
    groups: list[dict[str, Any]] = [
        {"params": params, "algorithm": MUON, "splits": splits or None, "transposed": is_transposed}
        for (splits, is_transposed), params in matrices.items()
    ]
    groups.append({"params": tables, "algorithm": "adamw", "weight_decay": adamw_weight_decay})
    groups.append({"params": vectors, "algorithm": "adamw", "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters that `muon_groups` gives to Muon."""
    groups = muon_groups(model, qkv="whole")
    return tuple(param for group in groups if group["algorithm"] == MUON for param in group["params"])


def _not_hidden(model: nn.Module) -> set[int]:
    """Return the ids of weights that modules show to be embeddings, heads or convolutions."""
    found: list[Any] = [
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    for name in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, name, lambda: None)()
        found.append(getattr(module, "weight", None))
    return {id(weight) for weight in found if weight is not None}


def _transposed(model: nn.Module) -> set[int]:
    """Return the ids of weights whose rows are inputs: of transformers' Conv1D and of some of its experts."""
    modules = [m for m in model.modules() if type(m).__name__ == "Conv1D" or getattr(m, "is_transposed", False) is True]
    return {id(param) for module in modules for param in module.parameters(recurse=False)}


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_router(name: str, param: Tensor, model: nn.Module, config: Any) -> bool:
    """True if a weight has a row for each expert and lies beside them."""
    counts = {getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")}
    path = name.split(".")
    beside = [model.get_submodule(".".join(path[: max(len(path) - up, 0)])) for up in (1, 2)]
    return param.dim() == 2 and param.shape[0] in counts and any(hasattr(module, "experts") for module in beside)


def _qkv_rows(name: str, param: Tensor, model: nn.Module, config: Any) -> tuple[int, ...]:
    """Return the rows of q, k and v in a fused weight, () if it is not one."""
    found = re.search(r"(?:^|\.)(c_attn|query_key_value|qkv|qkv_proj|Wqkv|in_proj_qkvz?)\.weight$", name)
    if found is None:
        return ()
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    rows = heads * width, kv_heads * width, kv_heads * width
    if found[1] == "in_proj_qkv":  # Gated DeltaNet
        mixer: Any = model.get_submodule(name.rsplit(".", 2)[0])
        rows = mixer.key_dim, mixer.key_dim, mixer.value_dim
    if found[1] not in ("qkv_proj", "Wqkv", "in_proj_qkv") or sum(rows) != param.shape[0]:
        raise ValueError(
            f"muon_groups: {name} of shape {tuple(param.shape)} is not known to hold all of q, then k, then v, by "
            "rows; use qkv='whole', or a group of its own with \"splits\""
        )
    return rows


def check_muon_options(group: Mapping[str, Any]) -> None:
    """Raise ValueError if an option of a group of matrices is out of range."""
    momentum, steps = group["momentum"], group["steps"]
    if not (hasattr(momentum, "__float__") and 0.0 <= momentum < 1.0):
        raise ValueError(f"momentum {momentum!r} must be a number in [0, 1)")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 20:
        raise ValueError(f"steps {steps!r} of Newton-Schulz must be a number from 1 to 20")
    if group["scale"] not in SCALES:
        raise ValueError(f"scale {group['scale']!r} must be one of {', '.join(SCALES)}")
    codes = group["moments"]
    if len(codes) != 1 or codes[0] not in SIGNED:
        raise ValueError(f"moments {codes!r} of a group of matrices must be one code of {', '.join(SIGNED)}")


def check_matrices(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a parameter of a new group of matrices is none, or its rows cannot be divided."""
    splits = group["splits"]
    for entry in group["params"]:
        param = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(param, Tensor) and param.dim() not in (2, 3):
            raise ValueError(
                f'a parameter of shape {tuple(param.shape)} in a group with "algorithm": "muon" is no matrix; put '
                'it into a group with "adamw"'
            )
        if isinstance(param, Tensor) and splits and (param.dim() != 2 or sum(splits) != param.shape[0]):
            raise ValueError(f"splits {splits!r} must add up to the rows of a matrix, not of {tuple(param.shape)}")


# ---- rounds -----------------------------------------------------------------------------------------------------


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
        if self.on_kernel:
            tensors = self.with_states()
            self.passes = [Passes(tensors, round.parts) for round in self.rounds]

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
            self.passes[number].momentum(addresses, dtype, updates, counted[0], factor, skip, hyper)
            return updates

        def apply(number: int, updates: Tensor) -> None:
            self.passes[number].apply(updates, counted, skip, hyper)

        self._work_through(begin, apply, hyper.steps)

    def _reference(self, grads: list[Tensor], lr: Tensor, factor: Tensor, skip: Tensor, hyper: MuonHyper) -> None:
        tensors, skipped = self.with_states(), skip.expand(len(self.params)).tolist()
        counters = [of for of, is_skipped in zip(tensors.states["step"], skipped, strict=True) if not is_skipped]
        if counters:
            torch._foreach_add_(counters, 1.0)
        steps = torch.stack(tensors.states["step"])
        coefficients = step_coefficients(steps, lr, *hyper[:4])

        def begin(number: int) -> Tensor:
            updates, parts = self._buffer(self.rounds[number]).zero_(), self.rounds[number].parts
            kernels.reference_momentum(tensors, parts, grads, updates, steps, factor, skip, hyper)
            return updates

        def apply(number: int, updates: Tensor) -> None:
            parts = self.rounds[number].parts
            kernels.reference_apply(tensors, parts, updates, steps, coefficients, skip, hyper)

        self._work_through(begin, apply, hyper.steps)
