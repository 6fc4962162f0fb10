"""The end of a converted model: `model(input_ids, labels=...)` computes its loss without ever holding the logits.

The models end alike: final norm, `lm_head` (a linear layer, perhaps tied to the embedding), perhaps a soft cap,
`ForCausalLMLoss` on shifted labels; family.py says where these are. The model, its lm_head and its final norm get
subclasses of their own classes, as the layers do (convert.py), with the same parameters and names:

    LeanLossModel    forward(labels=...) in `train()` mode gives the labels to lm_head and runs the model's own forward,
                     whose loss function then returns the loss that lm_head made. The result has no `logits`
                     (output.py).
    LossHead         lm_head(hidden) returns logits, or the loss in chunks (block/loss.py) if it was given labels. The
                     call goes through the module, so that FSDP2 may wrap lm_head by itself.
    FinalNorm        RMSNorm as one op in these forwards; else its original forward, so that logits are what they were,
                     bit for bit. LayerNorm needs nothing: PyTorch's is fused.

`Recipe.z_loss` is added to that loss in `train()` mode, nowhere else: in `eval()` the loss is the cross-entropy.

Everything else is the original forward: without labels, in `eval()`, with `output_logits=True` or `logits_to_keep`,
with another loss function, and when lm_head was replaced or hooked since.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any, Callable, Optional, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overcoat.block.loss import final_norm, linear_cross_entropy
from overcoat.models.family import (
    Family,
    Mixin,
    ModelSpec,
    class_name,
    families,
    family_of,
    logit_cap,
    mixed,
    model_spec_of,
    original_class,
)
from overcoat.models.fingerprint import (
    CALLED,
    HARMLESS_HOOKS,
    VALUES,
    Checked,
    Fingerprint,
    called_by_name,
    has_hooks,
    methods_of,
    names_in,
    why_mode,
)
from overcoat.models.images import without_waiting
from overcoat.models.masks import causal_mask, mask_makers, owners_of
from overcoat.models.output import REMEDY, refuse_second_call, without_logits
from overcoat.models.refusals import why_partitioned
from overcoat.models.verify import is_rms_norm
from overcoat.models.verify_loss import verify_loss
from overcoat.recipe import Recipe


class LossHead(nn.Linear):
    """lm_head with a second face: given `overcoat_loss`, the loss of its logits instead of the logits."""

    # hidden (..., H), the weight and the bias -> the loss, 0-d FP32; set while the model runs for its loss alone.
    overcoat_loss: Optional[Callable[[Tensor, Tensor, Optional[Tensor]], Tensor]] = None

    def forward(self, input: Tensor) -> Tensor:
        """input (..., H) -> logits (..., V), or their loss."""
        if self.overcoat_loss is None:
            return super().forward(input)
        loss, self.overcoat_loss = self.overcoat_loss, refuse_second_call
        return loss(input, self.weight, self.bias)


class FinalNorm(Mixin):
    """Mixin before an RMSNorm's own class, switched on for the loss without logits."""

    weight: nn.Parameter
    variance_epsilon: float
    overcoat_fused = False
    overcoat_plain = True  # whether its own forward still computes this (`_check_loss`)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states (..., H) -> (..., H)."""
        # With a weight of another dtype the original returns that of both.
        if not self.overcoat_fused or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return final_norm(hidden_states, self.weight, float(self.variance_epsilon))


class LeanLossModel(Mixin):
    """Mixin before a model's own class: the loss without logits while training."""

    overcoat_recipe: Recipe
    overcoat_spec: ModelSpec
    overcoat_family: Optional[Family] = None
    overcoat_checked: Optional[Checked] = None
    overcoat_mask_makers: Any = None  # of whose masks the layers were verified
    # What the last forward in eager mode made: "loss without logits", or "all logits".
    overcoat_ran: Optional[str] = None
    # The processes between which rows are cut in `train()` (distributed/context.py), or None.
    overcoat_context: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        whole = model_spec_of(cls)
        if whole is not None:  # else the object's own (propose.py)
            cls.overcoat_spec, cls.overcoat_family = whole, family_of(cls)
        original = original_class(cls).forward
        names = tuple(inspect.signature(original).parameters)[1:]

        # The signature is the model's own: the HF Trainer drops the columns of a dataset that it has no argument for.
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **inputs: Any) -> Any:
            return self.run_lean(**dict(zip(names, args, strict=False)), **inputs)

        cls.forward = forward

    def run_lean(
        self,
        labels: Optional[Tensor] = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: Optional[bool] = None,
        **inputs: Any,
    ) -> Any:
        """`forward`: the model's own arguments and result (transformers), and one argument more.

        Args:
            labels: (B, S), shifted here. With them and in `train()` mode the result has no `logits`.
            output_logits: True: logits, whatever the mode; False: None where labels are given, in `eval()` too;
                None: in `train()` mode an object in their place whose use raises, as an error names the remedy.
            inputs: `num_items_in_batch`, `shift_labels` and `ignore_index` mean what transformers' loss makes of them;
                `cu_seq_lens_q`, int32 (N + 1,), beside packed position_ids: where documents begin among the B * S
                tokens, and the end (every multiple of S among them). Without it the host waits to find out.
        """
        if getattr(_backbone(self), "overcoat_is_lean", False):  # lm_head would make the other call's loss
            raise ValueError(
                "this model computes a loss in another thread: copy it for each thread (copy.deepcopy), or convert it "
                "with Recipe(head=None)"
            )
        wants_logits = not self.training if output_logits is None else output_logits
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        is_lean = labels is not None and not wants_logits and keeps_all and self.overcoat_recipe.head is not None
        is_lean = is_lean and not inputs.get("output_router_logits") and self._has_lean_head()
        if not torch.compiler.is_compiling():
            self.overcoat_ran = "loss without logits" if is_lean else "all logits"
        if self.training and self.overcoat_context is not None:
            if labels is None or not is_lean:
                raise ValueError(
                    "rows are cut between processes (overcoat.context_parallel): in train() mode the model takes "
                    "labels and gives their loss, no logits"
                )
            inputs = self.overcoat_context.cut(self, labels, inputs)
        if labels is None or not is_lean:
            if labels is not None and self.training and self.overcoat_recipe.z_loss:
                raise ValueError(
                    f"Recipe.z_loss = {self.overcoat_recipe.z_loss} is added where the loss needs no logits: leave "
                    "output_logits and logits_to_keep out while training, lm_head and the loss function as they "
                    "were converted, or convert the model again without z_loss"
                )
            return self._own_forward(**inputs, labels=labels, logits_to_keep=logits_to_keep)
        return self._loss_only(labels, inputs, output_logits is None)

    def _own_forward(self, **inputs: Any) -> Any:
        return original_class(self).forward(self, **inputs)

    def _has_lean_head(self) -> bool:
        reason = why_head_replaced(self)
        if reason is not None:
            warnings.warn(f"the loss is computed from all logits: {reason}", stacklevel=5)
        return reason is None

    # A method: before PyTorch 2.13 Dynamo passes no module to a function whose result is a constant.
    @torch.compiler.assume_constant_result
    def overcoat_loss_reason(self, identity: int) -> Optional[str]:
        """Return why the model's own loss is another one than it was, or None; in compiled code, as it was when that
        was traced.

        identity: the model's id(), which compiled code is guarded by: a copy may have another loss.
        """
        before = self.overcoat_checked
        if before is not None and before.fingerprint.holds() and before.branches == _makers(self):
            return before.reason
        self.overcoat_checked = checked = _check_loss(self, self.overcoat_spec)
        if before is not None and checked.reason is not None:
            changed = before.fingerprint.difference(self) or "its loss function or forward"
            checked.reason = f"{changed} has changed since it was converted, and {checked.reason}"
        return checked.reason

    def _loss_only(self, labels: Tensor, inputs: dict[str, Any], says_so: bool) -> Any:
        as_tuple = inputs.pop("return_dict", None) is False
        if not self.overcoat_spec.reads_mask:
            inputs["attention_mask"] = causal_mask(self, inputs)
        spec = self.overcoat_spec
        images = without_waiting(self) if spec.vision else contextlib.nullcontext()
        # A loss that the model computes by itself takes neither of the others' arguments.
        given = inputs if spec.shifts else {"shift_labels": labels}
        with images, _lean(self, functools.partial(self._loss, labels=labels, inputs=given), labels) as loss_of:
            outputs = self._own_forward(**inputs, labels=labels if spec.shifts else None, return_dict=True)
        loss = outputs.loss if spec.shifts else loss_of(outputs.logits, labels)
        kind: Any = type(outputs)
        if says_so and not torch.compiler.is_compiling():
            kind = without_logits(kind)
        others = {name: value for name, value in outputs.items() if name not in ("loss", "logits")}
        result = kind(loss=loss, **others)
        if not as_tuple:
            return result
        place = [getattr(result, "logits", None)] if says_so else []  # whether compiled or not, others keep theirs
        return (loss, *place, *result.to_tuple()[1:])

    def _loss(
        self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], labels: Tensor, inputs: dict[str, Any]
    ) -> Tensor:
        (targets, ignore_index), num_items = shifted(labels, inputs), inputs.get("num_items_in_batch")
        if targets.numel() != hidden.shape[:-1].numel():
            raise ValueError(
                f"labels of shape {tuple(targets.shape)} for hidden states {tuple(hidden.shape)}: give one per token"
            )
        scale = _logit_scale(self)
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        loss = linear_cross_entropy(
            hidden,
            weight,
            targets.to(hidden.device).reshape(hidden.shape[:-1]),
            ignore_index=ignore_index,
            reduction="mean" if num_items is None else "sum",
            z_loss=self.overcoat_recipe.z_loss if self.training else 0.0,
            fp8=self.overcoat_recipe.grad_format if self.overcoat_recipe.head == "fp8" else None,
            bias=bias,
            softcap=logit_cap(self, self.overcoat_spec),
        )
        if num_items is None:
            return loss
        loss = loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)
        return loss if self.overcoat_context is None or not self.training else self.overcoat_context.sum(loss)


def shifted(labels: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the target of each position of labels (B, S), as transformers' loss has it, and the ignored index."""
    ignore_index, targets = inputs.get("ignore_index", -100), inputs.get("shift_labels")
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if targets is None else targets, ignore_index


@contextlib.contextmanager
def _lean(model: Any, loss: Callable[..., Tensor], labels: Tensor) -> Iterator[Callable[..., Tensor]]:
    """Make lm_head return `loss` of its input inside, and the final norm run as one op.

    Yields the stand-in for the model's loss function. What it is given as logits is that loss, multiplied or capped by
    the model; it returns the loss as it was.
    """
    head, norm, own = model.get_submodule(model.overcoat_spec.head), _final_norm(model), model.loss_function
    is_set = hasattr(model, "_loss_function")  # else transformers looks it up for each call
    backbone = _backbone(model)
    is_fusable = isinstance(norm, FinalNorm) and norm.overcoat_plain
    scale, cap = _logit_scale(model), logit_cap(model, model.overcoat_spec)
    made: list[Tensor] = []

    def loss_of_head(*args: Any) -> Tensor:
        made.append(loss(*args))
        return made[0]

    def made_by_head(logits: Tensor, given: Optional[Tensor] = None, *_: Any, **others: Any) -> Tensor:
        given = others.get("labels", given)
        if given is not labels and (given is None or given.device == labels.device):
            raise ValueError(f"this model made other labels of those that it was given: {REMEDY}")
        # The model multiplies or caps what it takes for logits; `loss` has been told of that before the product.
        if cap:
            return made[0].to(logits.device)
        return logits if scale == 1.0 else logits / scale

    model.loss_function, head.overcoat_loss, backbone.overcoat_is_lean = made_by_head, loss_of_head, True
    if is_fusable:
        norm.overcoat_fused = True
    try:
        yield made_by_head
    finally:
        model.loss_function, head.overcoat_loss, backbone.overcoat_is_lean = own, None, False
        if not is_set:
            del model._loss_function
        if is_fusable:
            norm.overcoat_fused = False


def _backbone(model: Any) -> Any:
    """Return the layers' owner; what wraps it since (torch.compile, checkpoints) has no attributes of ours."""
    backbone = model.get_submodule(model.overcoat_spec.text)
    if "overcoat_is_lean" in vars(backbone):
        return backbone
    return next((each for each in backbone.modules() if "overcoat_is_lean" in vars(each)), backbone)


def _final_norm(model: Any) -> Any:
    return getattr(_backbone(model), "norm", None)


def _warn_without_z_loss(backbone: Any, _inputs: Any) -> None:
    """Warn if a trainer with a loss of its own runs the layers: without the model's `forward`, or for its logits."""
    if backbone.training and backbone.overcoat_z_loss and not backbone.overcoat_is_lean and torch.is_grad_enabled():
        warnings.warn(
            f"Recipe.z_loss = {backbone.overcoat_z_loss} is not in this loss, which is not the converted model's own "
            "(labels=...): add it there, or convert with z_loss=0",
            stacklevel=2,
        )


def _logit_scale(model: Any) -> float:
    return 1.0 if model.overcoat_family is None else model.overcoat_family.logit_scale(model)


def why_head_unsupported(model: nn.Module) -> Optional[str]:
    """Return the reason why a causal model's loss cannot be computed without logits, or None if it can."""
    original: Any = original_class(model)
    whole = model_spec_of(model)
    if whole is None:
        return f"{original.__name__} is not supported (docs/models.md lists what is)"
    if type(model) is not original and not isinstance(model, LeanLossModel):
        return f"the model is wrapped already, as {type(model).__name__}: convert it before"
    if "forward" in vars(model):
        return "the model's forward was replaced on the object: convert it before"
    head = model.get_submodule(whole.head)
    if type(head) is not nn.Linear and not isinstance(head, LossHead):
        return f"lm_head is a {class_name(head)}, not nn.Linear"
    return _why_not_lean(model, head) or _check_loss(model, whole).reason


def why_head_replaced(model: Any) -> Optional[str]:
    """Return the reason why a converted model's head is not what it was any more; asked at each forward with labels."""
    head = model.get_submodule(model.overcoat_spec.head)
    if not isinstance(head, LossHead):
        return f"lm_head is a {class_name(head)} now; convert the model again if it is nn.Linear"
    if not hasattr(_backbone(model), "overcoat_is_lean"):
        return f"{model.overcoat_spec.text} was replaced since: its layers are as they came; convert the model again"
    return (
        _why_not_lean(model, head)
        or model.overcoat_loss_reason(id(model))
        or (None if torch.compiler.is_compiling() else why_mode())
    )


def _why_not_lean(model: Any, head: Any) -> Optional[str]:
    if "forward" in vars(head) and not (isinstance(head, LossHead) and hasattr(head, "_hf_hook")):
        # By transformers' tp_plan, or who changes logits; accelerate's only moves what LossHead's own returns.
        return "the forward of lm_head was replaced on the object"
    if head.weight.dtype == torch.float16:
        return "lm_head is FP16, in which the gradient of a summed loss may overflow: use BF16"
    if getattr(model.config, "output_router_logits", False):
        return "output_router_logits is True, and the loss without logits has no term for the router"
    if (reason := why_partitioned(head)) is not None:
        return f"lm_head.{reason}"
    if has_hooks(head, HARMLESS_HOOKS):
        return "lm_head has hooks, which would not see logits"
    return None


def _check_loss(model: Any, spec: ModelSpec) -> Checked:
    """Verify the model's own loss and its final norm, and remember what they were made of.

    A loss function that somebody sets on the model may weigh a few tokens differently, which no comparison of some
    labels finds: the model's own forward runs then.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    forward, loss = original_class(model).forward, model.loss_function
    norm = _final_norm(model) if isinstance(model, LeanLossModel) else None
    text = model.config.get_text_config()
    places = [(vars(F), name) for name in (*CALLED, "cross_entropy")] + called_by_name(forward)
    places += called_by_name(loss) if hasattr(inspect.unwrap(loss), "__code__") else []
    places += [(vars(loss), name) for name, x in getattr(loss, "__dict__", {}).items() if isinstance(x, VALUES)]
    for config in {id(each): each for each in (model.config, text)}.values():
        read = [name for name, x in vars(config).items() if name in names_in(forward) and isinstance(x, VALUES)]
        places += [(vars(config), name) for name in read]
    methods = [(nn.Linear, "forward")]
    if isinstance(norm, FinalNorm):
        methods += [(original_class(norm), name) for name in methods_of(original_class(norm))]
        norm.overcoat_plain = is_rms_norm(norm)
    fingerprint = Fingerprint(places=places, methods=methods)
    if (own := vars(model).get("_loss_function")) is not None and own not in LOSS_MAPPING.values():
        return Checked(fingerprint, _makers(model), f"the loss function is {getattr(own, '__name__', own)}")
    family = family_of(model)
    found = verify_loss(model, spec, 1.0 if family is None else family.logit_scale(model), logit_cap(model, spec))
    return Checked(fingerprint, _makers(model), found.difference)


def _makers(model: Any) -> tuple[Any, ...]:
    return original_class(model).forward, model.loss_function


def install_head(model: Any, recipe: Recipe) -> None:
    """Give a supported model this loss, in place; again to change the recipe, even when wrapped by FSDP2 since."""
    if not isinstance(model, LeanLossModel):
        model.__class__ = mixed(LeanLossModel, original_class(model))
    head = model.get_submodule(model.overcoat_spec.head)
    if not isinstance(head, LossHead):
        head.__class__ = LossHead
    norm = _final_norm(model)
    plain = [(each.module, each.norm) for each in families() if not each.centered and not each.plus_one]
    is_own = (type(norm).__module__, type(norm).__name__) in plain
    if is_own and "forward" not in vars(norm) and not isinstance(norm, FinalNorm) and is_rms_norm(norm):
        norm.__class__ = mixed(FinalNorm, type(norm))
    model.overcoat_recipe, backbone = recipe, _backbone(model)
    model.overcoat_mask_makers = mask_makers(owners_of(model))
    model.overcoat_checked = _check_loss(model, model.overcoat_spec)
    if recipe.z_loss and not hasattr(backbone, "overcoat_z_loss"):
        backbone.register_forward_pre_hook(_warn_without_z_loss)
    backbone.overcoat_z_loss, backbone.overcoat_is_lean = recipe.z_loss, False


def remove_head(model: Any) -> None:
    """Undo `install_head`; a model that was wrapped since keeps its class and computes its original forward."""
    if not isinstance(model, LeanLossModel):
        return
    norm, head = _final_norm(model), cast(Any, model).get_submodule(model.overcoat_spec.head)
    _backbone(model).overcoat_z_loss = 0.0
    if norm is not None and type(norm) is mixed(FinalNorm, original_class(norm)):
        norm.__class__ = original_class(norm)
    if type(model) is not mixed(LeanLossModel, original_class(model)):
        model.overcoat_recipe = Recipe.bf16()
        return
    model.__class__ = original_class(model)
    if type(head) is LossHead:
        head.__class__ = nn.Linear  # type: ignore[assignment]
