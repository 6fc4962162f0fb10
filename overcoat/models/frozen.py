"""Frozen weights held as FP8 codes alone, 1 byte a weight (`Recipe.frozen_weights = "fp8"`).

A converted layer's GEMMs read E4M3 codes, which are made of the weight for each GEMM. Of a frozen weight they are
always the same: they are made once, with the scales of the recipe (one for a stack, or one for each 128x128 block), and
the weight itself is freed. So the numbers of training do not change by a bit. Codes of a checkpoint with such blocks
(`from_blocks`) are taken as they are; those that no FP8 GEMM reads are decoded.

`FrozenWeight` takes the parameter's place. Whatever else reads it (`eval()`, `generate`, hooks) gets codes * scale in
the weight's dtype, decoded for each use; `state_dict()` has it decoded in host memory. What would write to it is
refused. Of a stack (q, k, v; gate, up) all weights are held so, or none.

FSDP2 (`fully_shard`) cuts the codes by rows and gathers them, 1 byte a weight; every process has all scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from overcoat.block.linear import GatheredWeight
from overcoat.formats import E4M3, Quantized, decode_float8, dequantize_blocks
from overcoat.kernels.blockwise import BLOCK, blocks
from overcoat.kernels.quantize import amax
from overcoat.kernels.weights import block_stack_weights, padded_blocks, stack_weights
from overcoat.models.decoder import Fp8DecoderLayer
from overcoat.models.family import Modules
from overcoat.models.linear_layers import Fp8Linear
from overcoat.models.lora import base_of
from overcoat.recipe import Recipe

_aten = torch.ops.aten
RELEASE = "overcoat.convert(model) holds it in 16 bits again"


class FrozenWeight(GatheredWeight):
    """A frozen parameter (N, K), or rows of one, that is held as codes, with the attributes of `GatheredWeight`.

    Attributes:
        place: [number of the first row], of all that the scales are for; views that begin there share the list.
    """

    def __init__(self, held: Tensor, scale: Optional[Tensor], w_amax: Optional[Tensor], dtype: torch.dtype) -> None:
        super().__init__(held, scale, w_amax, dtype)
        self.place = [0]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> FrozenWeight:
        return FrozenWeight(inner["held"], inner.get("scale"), inner.get("w_amax"), dtype)

    @staticmethod
    def from_blocks(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Optional[FrozenWeight]:
        """Return a checkpoint's E4M3 codes (N, K) and scales (N / 128, K / 128), of any float type, as a weight of
        `dtype`; None if they are no such codes, or N is no multiple of 128."""
        is_e4m3 = codes.dtype == E4M3.dtype and codes.dim() == 2 and codes.shape[0] % BLOCK == 0
        if not is_e4m3 or tuple(scale.shape) != (blocks(codes.shape[0]), blocks(codes.shape[1])):
            return None
        padding = padded_blocks(codes.shape[1]) - scale.shape[1]
        return FrozenWeight(codes.contiguous(), F.pad(scale.float(), (0, padding)).contiguous(), None, dtype)

    @property
    def scaling(self) -> str:
        """Return the `Recipe.linear_scaling` that the codes were made for."""
        return "block" if self.w_amax is None else "tensor"

    def decoded(self) -> Tensor:
        """Return codes * scale in the weight's dtype, a plain tensor."""
        assert self.scale is not None
        if self.held.dim() == 1:
            raise RuntimeError("a frozen weight held in FP8 is read by rows: flatten weight.decoded()")
        (rows, columns), (first,) = self.held.shape, self.place
        if self.w_amax is not None:
            return (decode_float8(self.held) * self.scale).to(self.dtype)
        scale = self.scale[:, : blocks(columns)]
        if not first and blocks(rows) == len(scale):
            return dequantize_blocks(Quantized(self.held, scale), (BLOCK, BLOCK)).to(self.dtype)
        own = torch.arange(first, first + rows, device=scale.device).floor_divide(BLOCK).clamp_max(len(scale) - 1)
        spread = scale[own].repeat_interleave(BLOCK, 1)[:, :columns]  # rows behind the last one are padding
        return (decode_float8(self.held) * spread).to(self.dtype)

    def rows(self, first: int, last: int) -> FrozenWeight:
        """Return the rows from `first` to before `last`, as a view."""
        made = FrozenWeight(self.held[first:last], self.scale, self.w_amax, self.dtype)
        made.place = [self.place[0] + first] if first else self.place
        return made

    # ---- FSDP2's extension points ----------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return what this process sends: its rows, as many as the first process has, and the number of all."""
        missing = -(-outer_size[0] // mesh.size()) - len(self.held)
        return (F.pad(self.held.view(torch.uint8), (0, 0, 0, missing)),), outer_size[0]

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the weight from what all processes have sent, or update `out` with it."""
        held = outputs[0][:metadata].view(E4M3.dtype)
        if out is None:
            return FrozenWeight(held, self.scale, self.w_amax, param_dtype), ()
        out.held = held
        return None

    def _like(self, change: Any, dtype: Optional[torch.dtype] = None) -> FrozenWeight:
        scale, w_amax = (None if each is None else change(each) for each in (self.scale, self.w_amax))
        made = FrozenWeight(change(self.held), scale, w_amax, dtype or self.dtype)
        made.place = self.place
        return made

    def _cut(self, func: Any, args: Any) -> Any:
        """Return the result of the ops by which FSDP2 cuts a parameter (N, K), or NotImplemented."""
        if self.held.dim() == 1:
            return NotImplemented
        count, columns = self.held.shape
        if func is _aten.split.Tensor and not args[2:]:
            return [self.rows(first, min(first + args[1], count)) for first in range(0, count, args[1])]
        if func is _aten.slice.Tensor and len(args) == 4 and args[1] == 0:
            return self.rows(*slice(*args[2:]).indices(count)[:2])
        if func is _aten.new_zeros.default and len(args[1]) == 2 and args[1][1] == columns:
            made = FrozenWeight(
                self.held.view(torch.uint8).new_zeros(args[1]).view(E4M3.dtype), self.scale, self.w_amax, self.dtype
            )
            made.place = [*self.place]
            return made
        if func is _aten.copy_.default and isinstance(args[1], FrozenWeight) and args[1].scale is self.scale:
            self.held.view(torch.uint8).copy_(args[1].held.view(torch.uint8))
            self.place[0] = args[1].place[0]
            return self
        if func is _aten.view.default and tuple(args[1]) == (-1,):  # which FSDP2 keeps, and does not read
            return FrozenWeight(self.held.view(-1), self.scale, self.w_amax, self.dtype)
        is_whole = func is _aten.as_strided.default and tuple(args[1]) == tuple(self.shape)
        return self._like(lambda each: each) if is_whole else NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        weight = args[0] if args and isinstance(args[0], cls) else None
        if weight is not None and func in (_aten.detach.default, _aten.alias.default):
            return weight._like(lambda each: each)
        if weight is not None and func is _aten.clone.default:
            return weight._like(torch.clone)
        if weight is not None and func is _aten._to_copy.default:
            return weight._like(lambda each: each.to(kwargs.get("device"), copy=True), kwargs.get("dtype"))
        if weight is not None and (cut := weight._cut(func, args)) is not NotImplemented:
            return cut
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func} cannot write to a frozen weight that is held in FP8 (Recipe.frozen_weights): {RELEASE}"
            )
        args, kwargs = tree_map_only(cls, cls.decoded, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.setdefault(id(self), nn.Parameter(self._like(torch.clone), requires_grad=False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, (self.held, self.scale, self.w_amax, self.dtype, self.place[0])


def _made(held: Tensor, scale: Tensor, w_amax: Optional[Tensor], dtype: torch.dtype, place: int = 0) -> nn.Parameter:
    weight = FrozenWeight(held, scale, w_amax, dtype)
    weight.place = [place]
    return nn.Parameter(weight, requires_grad=False)


def frozen_of(weight: Any) -> Optional[FrozenWeight]:
    """Return a parameter that is held in FP8, or its rows in this process; None for any other."""
    local = getattr(weight, "_local_tensor", weight)
    return local if isinstance(local, FrozenWeight) else None


def check_scaling(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError if frozen weights are held with other scales than the recipe's: made of their codes, these would
    be of less precision."""
    for name, module in model.named_modules():
        weight = frozen_of(module._parameters.get("weight"))
        if weight is not None and recipe.fp8 and weight.scaling != recipe.linear_scaling:
            raise ValueError(
                f"{name}.weight is held in FP8 with scales for linear_scaling={weight.scaling!r}: load the model "
                f"again to train it with linear_scaling={recipe.linear_scaling!r}"
            )


def weights_to_hold(model: nn.Module, recipe: Recipe) -> list[Tensor]:
    """Return the weights of a converted model that `hold_frozen` holds in FP8, also on the meta device."""
    if not recipe.fp8 or recipe.frozen_weights == "bf16":
        return []
    stacks = [_weights(stack) for stack, reason in _stacks(model, recipe) if reason is None]
    return [weight for weights in stacks if not any(each.requires_grad for each in weights) for weight in weights]


def hold_frozen(model: nn.Module, recipe: Recipe) -> list[str]:
    """Hold the frozen weights of converted layers as the recipe says, in place, and return lines for the report.

    ValueError: they are to be held in FP8, and none is frozen. A model on the meta device stays as it is.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return []
    if not recipe.fp8 or recipe.frozen_weights == "bf16":
        release_frozen(model)
        return []
    held, reasons, stacks = list[Tensor](), dict[str, int](), _stacks(model, recipe)
    for stack, reason in stacks:
        weights = _weights(stack)
        frozen = sum(not weight.requires_grad for weight in weights)
        if frozen < len(weights):
            reason = "other weights of their stack train"
        if reason is None:
            _hold(stack, recipe)
            held += _weights(stack)
        elif frozen:
            reasons[reason] = reasons.get(reason, 0) + frozen
    read = {id(weight) for stack, _ in stacks for weight in _weights(stack)}
    if unread := sum(id(weight) not in read for weight in _found(model)):
        reasons["no FP8 GEMM of a converted layer reads them"] = unread
    named = [each for name, each in model.named_parameters() if ".experts." in f".{name}" and each.dim() == 3]
    if experts := sum(not each.requires_grad for each in named):
        reasons["those of experts are stacked"] = experts
    if not held:
        unfrozen = "none is frozen: add adapters (peft), or requires_grad_(False), before overcoat.convert"
        why = "; ".join(reasons) or unfrozen
        raise ValueError(f"Recipe.frozen_weights = 'fp8': no weight of a converted layer can be held in FP8: {why}")
    release_frozen(model, held)
    size = sum(weight.numel() for weight in held) / 2**30
    lines = [f"{len(held)} frozen weights held in FP8, {size:.2f} GiB"]
    return lines + [f"{count} frozen weights stay in 16 bits: {reason}" for reason, count in reasons.items()]


def release_frozen(model: nn.Module, held: Sequence[Tensor] = ()) -> None:
    """Hold all frozen weights but `held` in their own dtype again, decoded. ValueError: one is sharded."""
    kept = set(map(id, held))
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if frozen_of(weight) is None or id(weight) in kept:
            continue
        if not isinstance(weight, FrozenWeight):
            raise ValueError(f"{name}.weight is held in FP8, and sharded: load the model again for another recipe")
        module._parameters["weight"] = nn.Parameter(weight.decoded(), requires_grad=weight.requires_grad)
        if (handle := vars(module).pop("overcoat_handle", None)) is not None:
            handle.remove()


def _stacks(model: nn.Module, recipe: Recipe) -> list[tuple[list[nn.Module], Optional[str]]]:
    """Return the linear layers of each stack of a GEMM, without their adapters, and why FP8 cannot hold them."""
    found: list[tuple[list[nn.Module], Optional[str]]] = []
    for module in model.modules():
        if isinstance(module, Fp8DecoderLayer) and module.overcoat_checked is not None:
            for branch in module.overcoat_checked.branches or ():
                for stack in (branch.in_proj, (branch.out_proj,)) if branch.mixer is not None else ():
                    bases = [base_of(linear) for linear in stack]
                    found.append((bases, _why_not(bases, branch, recipe)))
        elif isinstance(module, Fp8Linear) and module.overcoat_recipe is not None:
            found.append(([module], _why_not([module], None, recipe)))
    return found


def _found(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and frozen_of(weight) is not None:
            yield weight


def _weights(stack: list[nn.Module]) -> list[Any]:
    return [base._parameters["weight"] for base in stack]


def _why_not(stack: list[nn.Module], branch: Optional[Modules], recipe: Recipe) -> Optional[str]:
    is_output = branch is not None and base_of(branch.out_proj) in stack
    if branch is not None and branch.layer_scale is not None and is_output:
        return "LayerScale multiplies them before they are quantized"
    weights = _weights(stack)
    is_sharded = any(type(weight).__name__ == "DTensor" and frozen_of(weight) is None for weight in weights)
    if is_sharded or len({weight.device for weight in weights}) > 1:
        return "they are spread over devices"
    if recipe.linear_scaling == "block":
        is_turned = branch is not None and any(branch.orders) and not is_output
        if is_turned or not all(isinstance(base, nn.Linear) for base in stack):
            return "their rows are taken in another order, which mixes blocks of 128x128"
        if any(weight.shape[0] % BLOCK for weight in weights):
            return "their rows are no multiple of 128"
    return None


@torch.no_grad()
def _hold(stack: list[nn.Module], recipe: Recipe) -> None:
    """Replace the weights of a stack by their codes, one after the other, unless they are codes."""
    weights = [weight.detach() for weight in _weights(stack)]
    in_codes, top = [frozen_of(weight) is not None for weight in weights], None
    if recipe.linear_scaling == "tensor" and not all(in_codes):
        top, in_codes = torch.stack([amax(weight) for weight in weights]).amax(), [False] * len(weights)
    for base, weight, is_done in zip(stack, weights, in_codes, strict=True):
        if not is_done:
            codes, scale = block_stack_weights([weight], False) if top is None else stack_weights([weight], top, False)
            base._parameters["weight"] = _made(codes, scale, top, weight.dtype)
        if "overcoat_handle" not in vars(base):
            vars(base)["overcoat_handle"] = base.register_state_dict_post_hook(_decode_state)


def _decode_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put the decoded weight into a state dict, in host memory; `keep_vars` asks for the parameter itself."""
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, FrozenWeight) and weight is not module._parameters["weight"]:
        state[f"{prefix}weight"] = weight.decoded().cpu()
