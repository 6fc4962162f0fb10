"""The end of a converted model: `model(input_ids, labels=...)` computes its loss without ever holding the logits.

The families' models end alike: final norm, `lm_head` (a linear layer without bias, perhaps tied to the embedding),
`ForCausalLMLoss` on shifted labels. The model, its lm_head and its final norm get subclasses of their own classes, as
the decoder layers do (convert.py), with the same parameters and names:

    LossHead         lm_head(hidden) gives logits as ever; lm_head(hidden, labels) their loss, in chunks
                     (block/loss.py). The call goes through the module, so that FSDP2 may wrap lm_head by itself.
    LeanLossModel    forward(labels=...) calls it so in `train()` mode and leaves `logits` out of its result (None).
    FinalNorm        RMSNorm as one op while it does; else its original forward, so that logits are what they were, bit
                     for bit. LayerNorm needs nothing, PyTorch's is fused.

`Recipe.z_loss` is added to that loss in `train()` mode, nowhere else: in `eval()` the loss is the cross-entropy.

Everything else is the original forward: without labels, in `eval()`, with `output_logits=True` or `logits_to_keep`,
with another loss function, and when lm_head was replaced or hooked since.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Optional, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overcoat.block.loss import final_norm, linear_cross_entropy
from overcoat.models.causal import causal_mask
from overcoat.models.decoder import HARMLESS_HOOKS, has_hooks
from overcoat.models.family import Mixin, class_name, families, family_of, mixed, original_class
from overcoat.recipe import Recipe


class LossHead(nn.Linear):
    """lm_head with a second face: given labels, the loss of its logits instead of the logits."""

    def forward(self, input: Tensor, labels: Optional[Tensor] = None, **options: Any) -> Tensor:
        """input (..., H) -> logits (..., V); with labels (...) the loss, 0-d FP32; options: `linear_cross_entropy`."""
        if labels is None:
            return super().forward(input)
        return linear_cross_entropy(input, self.weight, labels, **options)


class FinalNorm(Mixin):
    """Mixin before an RMSNorm's own class, switched on for the loss without logits."""

    weight: nn.Parameter
    variance_epsilon: float
    overcoat_fused = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., H) -> (..., H)."""
        # With a weight of another dtype the original returns that of both.
        if not self.overcoat_fused or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return final_norm(hidden_states, self.weight, float(self.variance_epsilon))


class LeanLossModel(Mixin):
    """Mixin before a causal model's own class: the loss without logits while training."""

    overcoat_recipe: Recipe

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        past_key_values: Any = None,
        inputs_embeds: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        use_cache: Optional[bool] = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: Optional[bool] = None,
        **kwargs: Any,
    ) -> Any:
        """The model's own arguments and result (transformers), and one argument more.

        Args:
            labels: (B, S), shifted here. With them and in `train()` mode the result's `logits` are None.
            output_logits: True: logits, whatever the mode; False: none where labels are given, in `eval()` too;
                None: none in `train()` mode.
            kwargs: `num_items_in_batch`, `shift_labels` and `ignore_index` mean what transformers' loss makes of them;
                `cu_seq_lens_q`, int32 (N + 1,), beside packed position_ids: where documents begin among the B * S
                tokens, and the end (every multiple of S among them). Without it the host waits to find out.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        wants_logits = not self.training if output_logits is None else output_logits
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        is_lean = labels is not None and not wants_logits and keeps_all and self.overcoat_recipe.head is not None
        if labels is None or not is_lean or not self._has_lean_head():
            if labels is not None and self.training and self.overcoat_recipe.z_loss:
                raise ValueError(
                    f"Recipe.z_loss = {self.overcoat_recipe.z_loss} is added where the loss needs no logits: leave "
                    " output_logits and logits_to_keep out while training, lm_head and the loss function as they "
                    "were converted, or convert the model again without z_loss"
                )
            return super().forward(**inputs, labels=labels, logits_to_keep=logits_to_keep)
        return self._loss_only(labels, inputs)

    def _has_lean_head(self) -> bool:
        reason = why_head_replaced(self)
        if reason is not None:
            warnings.warn(f"the loss is computed from all logits: {reason}", stacklevel=4)
        return reason is None

    def _loss_only(self, labels: Tensor, inputs: dict[str, Any]) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return_dict = inputs.pop("return_dict", None)
        inputs["attention_mask"] = causal_mask(self, inputs)
        with _fused_final_norm(self):
            outputs = self.get_submodule("model")(**inputs, return_dict=True)
        result = CausalLMOutputWithPast(
            loss=self._loss(outputs.last_hidden_state, labels, inputs),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        if return_dict is None:
            return_dict = cast(Any, self).config.return_dict
        return result if return_dict else result.to_tuple()

    def _loss(self, hidden: Tensor, labels: Tensor, inputs: dict[str, Any]) -> Tensor:
        ignore_index, num_items = inputs.get("ignore_index", -100), inputs.get("num_items_in_batch")
        targets = inputs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = self.get_submodule("lm_head")(
            hidden,
            targets.to(hidden.device).reshape(hidden.shape[:-1]),
            ignore_index=ignore_index,
            reduction="mean" if num_items is None else "sum",
            z_loss=self.overcoat_recipe.z_loss if self.training else 0.0,
            fp8=self.overcoat_recipe.grad_format if self.overcoat_recipe.head == "fp8" else None,
        )
        if num_items is None:
            return loss
        return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


@contextlib.contextmanager
def _fused_final_norm(model: nn.Module) -> Iterator[None]:
    norm = model.get_submodule("model.norm")
    if not isinstance(norm, FinalNorm):
        yield
        return
    norm.overcoat_fused = True
    try:
        yield
    finally:
        norm.overcoat_fused = False


def find_causal_model(model: nn.Module) -> Optional[tuple[str, nn.Module]]:
    """Name and module of transformers' causal model in `model` (itself, or inside a PEFT model, say), or None."""
    for name, module in model.named_modules():
        original = original_class(module)
        if original.__module__.startswith("transformers.") and original.__name__.endswith("ForCausalLM"):
            return name, module
    return None


def why_head_unsupported(model: nn.Module) -> Optional[str]:
    """The reason why a causal model's loss cannot be computed without logits, or None if it can."""
    original: Any = original_class(model)
    if family_of(model) is None:
        kinds = ", ".join(family.causal for family in families())
        return f"{original.__name__} is not among the supported kinds ({kinds})"
    if type(model) is not original and not isinstance(model, LeanLossModel):
        return f"the model is wrapped already, as {type(model).__name__}: convert it before"
    if "forward" in vars(model):
        return "the model's forward was replaced on the object: convert it before"
    head = model.get_submodule("lm_head")
    if type(head) is not nn.Linear and not isinstance(head, LossHead):
        return f"lm_head is a {class_name(head)}, not nn.Linear"
    return _why_not_lean(model, head)


def why_head_replaced(model: nn.Module) -> Optional[str]:
    """The reason why a converted model's head is not what it was any more; checked at each forward with labels."""
    head = model.get_submodule("lm_head")
    if not isinstance(head, LossHead):
        return f"lm_head is a {class_name(head)} now; convert the model again if it is nn.Linear"
    return _why_not_lean(model, head)


def _why_not_lean(model: Any, head: Any) -> Optional[str]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if head.bias is not None:
        return "lm_head has a bias"
    if head.weight.dtype == torch.float16:
        return "lm_head is FP16, in which the gradient of a summed loss may overflow: use BF16"
    if has_hooks(head, HARMLESS_HOOKS):
        return "lm_head has hooks, which would not see logits"
    if model.loss_function is not ForCausalLMLoss:
        return f"the loss function is {getattr(model.loss_function, '__name__', model.loss_function)}"
    return None


def install_head(model: nn.Module, recipe: Recipe) -> None:
    """Give a supported model the lean loss, in place; again to change the recipe, even when wrapped by FSDP2 since."""
    if not isinstance(model, LeanLossModel):
        model.__class__ = mixed(LeanLossModel, original_class(model))
    head: nn.Module = model.get_submodule("lm_head")
    if not isinstance(head, LossHead):
        head.__class__ = LossHead
    norm: Any = model.get_submodule("model.norm")
    family = family_of(model)
    is_own = family is not None and (type(norm).__module__, type(norm).__name__) == (family.module, family.norm)
    if is_own and "forward" not in vars(norm):
        norm.__class__ = mixed(FinalNorm, type(norm))
    model.overcoat_recipe = recipe  # type: ignore[assignment]


def remove_head(model: nn.Module) -> None:
    """Undo `install_head`; a model that was wrapped since keeps its class and computes its original forward."""
    if not isinstance(model, LeanLossModel):
        return
    norm = model.get_submodule("model.norm")
    if type(norm) is mixed(FinalNorm, original_class(norm)):
        norm.__class__ = original_class(norm)
    if type(model) is not mixed(LeanLossModel, original_class(model)):
        model.overcoat_recipe = Recipe.bf16()
        return
    model.__class__ = original_class(model)
    head: nn.Module = model.get_submodule("lm_head")
    if type(head) is LossHead:
        head.__class__ = nn.Linear  # type: ignore[assignment]
