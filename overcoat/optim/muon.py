"""`Muon`: matrices step by their orthogonalized momentum, all other parameters by AdamW, in one optimizer.

    optimizer = overcoat.Muon(overcoat.muon_groups(model), lr=0.02, adamw_lr=3e-4)
    loss.backward()
    optimizer.step(clip_grad_norm=1.0)

The maths is in `overcoat.kernels.muon`. It is `AdamW` with a second kind of parameter group: one step, one state dict,
one norm of all gradients. State of a matrix: AdamW's first moment and its remainder. How matrices are stepped, by one
process or several: `overcoat.optim.muon_step`.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

from torch import Tensor, nn

from overcoat.optim.adamw import AdamW
from overcoat.optim.muon_offload import OffloadedMuonStepGroup
from overcoat.optim.muon_step import MuonStepGroup
from overcoat.optim.state import MUON
from overcoat.optim.step import StepGroup

# Code of a matrix's momentum, by the name of the state.
MOMENTUM = {"8bit": "sqrt8", "fp8": "e4m3x", "bf16": "bf16", "fp32": "fp32"}
# Codes that a group's "moments" may have: those of a signed moment that need no second one.
SIGNED = ("e4m3", "e5m2", "de8", "sqrt8", "bf16", "fp32", "e4m3x", "e5m2x", "de8x")
SCALES = ("spectral", "match_rms_adamw")
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
        betas, eps: of AdamW's groups. master, group_size, seed, check_finite, clip_grad_norm, offload, offload_buffer:
            as in `AdamW`.

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
        offload: bool = False,
        offload_buffer: int = 192 * 2**20,
    ) -> None:
        if state not in MOMENTUM:
            raise ValueError(f"state {state!r} must be one of {', '.join(MOMENTUM)}")
        self._added = {"momentum": momentum, "nesterov": nesterov, "scale": scale, "steps": steps}
        self._added |= {"splits": None, "transposed": False}
        self._adamw_lr, self._state = adamw_lr, state
        super().__init__(
            params, lr, betas, eps, weight_decay, moments=state, master=master, group_size=group_size, seed=seed,
            check_finite=check_finite, clip_grad_norm=clip_grad_norm, offload=offload, offload_buffer=offload_buffer,
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
        if not self.offload:
            return MuonStepGroup(weakref.proxy(self), group, params, indices)
        return OffloadedMuonStepGroup(self.staging_on(params[0].device), weakref.proxy(self), group, params, indices)


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
