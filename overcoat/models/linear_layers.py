"""The linear grade: a layer runs its own forward, and its large linear layers compute in FP8 (block/linear_layer.py).

For decoder layers that no verified block stands in for: other mixers (Gated DeltaNet, Mamba, latent attention),
dropout, hooks, modules around experts. Nothing about the layer needs to be known: a linear layer is one wherever it
stands. Left as they are: small ones, whose time is that of launches; routers and gates of experts, whose choices jump;
sizes that FP8 GEMMs do not take. Wide RMSNorms among them save their input in 8 bits, too, where transformers' save it
in FP32; which module is one, its numbers say.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overcoat.block.linear_layer import SharedInput, linear_layer
from overcoat.block.norm import norm_forward
from overcoat.block.spec import Norm
from overcoat.models.decoder import norm_eps
from overcoat.models.experts import convert_experts, restore_experts
from overcoat.models.family import Mixin, mixed, original_class
from overcoat.models.fingerprint import why_mode
from overcoat.models.lora import why_not_plain
from overcoat.models.verify import is_rms_norm
from overcoat.recipe import Recipe

LARGE, NARROW, MULTIPLE = 2**16, 256, 16  # weights; and of K and N: the least, and what both are multiples of
ROUTERS = ("gate", "router")
# What nn.Linear computes with: where it is replaced later, the replacement runs.
_OWN = (F.linear, nn.Linear.forward)


class SavingNorm(Mixin):
    """Mixin before an RMSNorm's own class: in `train()` mode what it saves for the backward is in 8 bits."""

    overcoat_recipe: Optional[Recipe]
    overcoat_plus_one: bool
    overcoat_forward: Any  # the class's, whose numbers were compared
    overcoat_eval: bool = False
    weight: nn.Parameter

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """x (..., H) -> (..., H)."""
        is_on = (self.training or self.overcoat_eval) and x.numel() > 0 and not isinstance(self.weight, DTensor)
        is_same = original_class(self).forward is self.overcoat_forward and x.dtype == self.weight.dtype
        has_mode = not torch.compiler.is_compiling() and why_mode()
        if self.overcoat_recipe is None or not is_on or not is_same or has_mode or args or kwargs:
            return super().forward(x, *args, **kwargs)
        weight = 1.0 + self.weight.float() if self.overcoat_plus_one else self.weight
        return norm_forward(x, Norm(weight, None, norm_eps(self)), self.overcoat_recipe)


class Fp8Linear(nn.Linear):
    """nn.Linear that computes in FP8 in `train()` mode (`eval_fp8`: always); parameters and names as they were."""

    overcoat_recipe: Optional[Recipe]  # None: its own forward
    overcoat_shared: SharedInput  # of all linear layers of a decoder layer
    overcoat_eval: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """input (..., K) -> (..., N)."""
        is_on = (self.training or self.overcoat_eval) and input.numel() > 0 and not isinstance(self.weight, DTensor)
        if (
            self.overcoat_recipe is None
            or not is_on
            or (F.linear, nn.Linear.forward) != _OWN
            or (not torch.compiler.is_compiling() and why_mode())
        ):
            return super().forward(input)
        return linear_layer(input, self.weight, self.bias, self.overcoat_recipe, self.overcoat_shared)


def large_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a module that can compute in FP8 and gain by it, by name."""
    found = {}
    for name, module in layer.named_modules():
        if type(module) not in (nn.Linear, Fp8Linear) or name.rpartition(".")[2] in ROUTERS:
            continue
        sizes = (module.in_features, module.out_features)
        fits = min(sizes) >= NARROW and sizes[0] * sizes[1] >= LARGE and not any(size % MULTIPLE for size in sizes)
        is_here = module.weight.numel() == sizes[0] * sizes[1]  # ZeRO-3 takes it away
        if fits and is_here and why_not_plain(module) is None and "forward" not in vars(module):
            found[name] = module
    return found


def convert_linears(layer: nn.Module, recipe: Recipe, eval_fp8: bool) -> dict[str, nn.Module]:
    """Let the large linear layers and the experts (experts.py) of a module compute in FP8, in place, and return them by
    name: no linear layer where nn.Linear does not compute x W^T + b, because something else stands in its place."""
    shared, found = SharedInput(), large_linears(layer)
    experts = convert_experts(layer, recipe, eval_fp8, shared)
    if not found or _why_not_linear() is not None:
        return experts
    for module in found.values():
        module.__class__ = Fp8Linear
        vars(module).update(overcoat_recipe=recipe, overcoat_shared=shared, overcoat_eval=eval_fp8)
    for norm, plus_one in _wide_norms(layer):
        original = original_class(norm)
        norm.__class__ = mixed(SavingNorm, original)
        named = {"overcoat_plus_one": plus_one, "overcoat_forward": original.forward}
        vars(norm).update(overcoat_recipe=recipe, overcoat_eval=eval_fp8, **named)
    return {**found, **experts}


def _wide_norms(layer: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the modules of a layer that compute an RMSNorm of `NARROW` columns or more, and whether by 1 + weight."""
    found = []
    for module in layer.modules():
        weight = module._parameters.get("weight")
        is_alone = weight is not None and len(module._parameters) == 1 and not module._modules
        if weight is None or not is_alone or weight.dim() != 1 or len(weight) < NARROW or "forward" in vars(module):
            continue
        if type(module) not in (original_class(module), mixed(SavingNorm, original_class(module))):
            continue
        plus_one = next((each for each in (False, True) if is_rms_norm(module, each)), None)
        if plus_one is not None:
            found.append((module, plus_one))
    return found


def restore_linears(layer: nn.Module) -> None:
    """Undo `convert_linears`."""
    restore_experts(layer)
    for module in layer.modules():
        if type(module) is Fp8Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
            for name in ("overcoat_recipe", "overcoat_shared", "overcoat_eval"):
                vars(module).pop(name, None)
        elif isinstance(module, SavingNorm) and type(module) is mixed(SavingNorm, original_class(module)):
            module.__class__ = original_class(module)
            for name in ("overcoat_recipe", "overcoat_plus_one", "overcoat_forward", "overcoat_eval"):
                vars(module).pop(name, None)
        elif isinstance(module, (Fp8Linear, SavingNorm)):  # wrapped since: parametrized, or by FSDP2
            module.overcoat_recipe = None


def _why_not_linear() -> Optional[str]:
    """Return how far nn.Linear's own forward is from x W^T + b, or None where they agree to FP32's rounding."""
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 48), (32, 48), (32,)))
    module: Any = nn.Linear(48, 32, device="meta")
    module.weight, module.bias = (nn.Parameter(each, requires_grad=False) for each in (weight, bias))
    with torch.device("cpu"), torch._C.DisableTorchFunction():
        found, expected = nn.Linear.forward(module, x), x @ weight.t() + bias
    error = (found - expected).norm() / expected.norm()
    return f"nn.Linear is off by {float(error):.1e}" if not error <= 1e-5 else None
