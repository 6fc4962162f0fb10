"""`context_parallel`: train on rows longer than one GPU holds by splitting them between the processes of a group.

In `train()` mode each process takes its part of the rows (block/context.py), of positions and of shifted labels, and
returns the loss of the whole rows, over all their labels. A process' gradient is that of its own tokens times the
number of processes in the group, so that the mean over processes, which FSDP2 and DDP take, is the gradient of the
loss. In `eval()` mode rows are not split.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overcoat.block.attention import Attention
from overcoat.block.context import own_part
from overcoat.distributed.fp8_all_gather import fsdp_params
from overcoat.models.decoder import Fp8DecoderLayer, attention_of
from overcoat.models.family import decoder_layers, find_causal_model
from overcoat.models.head import LeanLossModel, shifted, why_head_replaced
from overcoat.models.masks import nothing_hidden
from overcoat.models.refusals import branches_of


class _Sum(torch.autograd.Function):
    """A sum over processes whose gradient is summed, too. PyTorch's own function for this warns since 2.13."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Any) -> Tensor:
        ctx.group, summed = group, loss.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        return _Sum.apply(dloss, ctx.group), None


TAKEN = {"input_ids", "inputs_embeds", "labels", "shift_labels", "num_items_in_batch", "ignore_index", "return_dict"}


def context_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split each row between the processes of `mesh` while the model trains. Call it in each process.

    Args:
        model: a causal model of transformers, converted; sharded by `fully_shard` before or after, or not.
        mesh: of one dimension. Its processes get the same rows, of a multiple of 2 C tokens for C processes.

    Raises:
        ValueError: a part of the model needs whole rows other than for causal attention. The first training pass checks
            again, and compares the processes' rows.
    """
    found = find_causal_model(model)
    causal: Any = model if found is None else found[1]
    _refuse(causal, _why_not(causal))
    group = mesh.get_group()
    causal.overcoat_context = Context(group)
    for layer in decoder_layers(causal).values():
        vars(layer)["overcoat_context"] = group


class Context:
    """The process group that shares rows; a causal model's handle for splitting inputs and summing losses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.is_checked = group, False

    def cut(self, model: Any, labels: Tensor, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return this process' inputs: its part of the rows (B, S), with labels shifted before the split."""
        others = sorted(
            name for name in inputs.keys() - TAKEN if inputs[name] is not None and inputs[name] is not False
        )
        if others:
            raise ValueError(
                f"{others[0]} cannot be cut between processes (overcoat.context_parallel): leave it out. Rows are "
                "plainly causal, without packed documents; padding on the right needs no mask, its labels are -100"
            )
        length, count = labels.shape[1], self.group.size()
        window = getattr(model.config, "sliding_window", None)
        if length % (2 * count) or (window is not None and window < length):
            wrong = f"a window of {window}" if length % (2 * count) == 0 else f"{2 * count} chunks"
            raise ValueError(f"rows of {length} tokens cannot be cut between {count} processes: {wrong}")
        if not self.is_checked:
            self._check(model, labels)
        targets, ignore_index = shifted(labels, inputs)
        if inputs.get("num_items_in_batch") is None:
            inputs["num_items_in_batch"] = (targets != ignore_index).sum()
        for name in ("input_ids", "inputs_embeds"):
            if inputs.get(name) is not None:
                inputs[name] = own_part(inputs[name], self.group)
        positions = torch.arange(length, device=labels.device).unsqueeze(0)
        cut = {"shift_labels": own_part(targets, self.group), "position_ids": own_part(positions, self.group)}
        # Layers that do not support this mask raise an error.
        return {**inputs, **cut, "attention_mask": nothing_hidden(labels.device)}

    def sum(self, loss: Tensor) -> Tensor:
        """Return the loss of the whole rows; its gradient is summed over the processes, too."""
        summed: Tensor = _Sum.apply(loss, self.group)
        return summed

    def _check(self, model: Any, labels: Tensor) -> None:
        reason = _why_not(model)
        ranks = set(dist.get_process_group_ranks(self.group))
        for param, _ in fsdp_params(model).values():
            if not ranks <= set(param.mesh_info.mesh.mesh.flatten().tolist()):
                reason = "fully_shard sums gradients over fewer processes; shard over all that share rows"
        differs = torch.tensor([labels.numel(), -labels.numel()], device=labels.device)
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=self.group)
        if not differs.sum():
            first = labels.contiguous().clone()
            dist.broadcast(first, group=self.group, group_src=0)
            differs[0] += int(not torch.equal(first, labels))
            dist.all_reduce(differs, group=self.group)
        if differs.sum():
            reason = "its processes were given different rows; give the same to all that share them"
        _refuse(model, reason)
        self.is_checked = True


def _refuse(model: Any, reason: Optional[str]) -> None:
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot train on parts of rows (overcoat.context_parallel): {reason}")


def _why_not(model: Any) -> Optional[str]:
    if not isinstance(model, LeanLossModel):
        return "overcoat.convert has not given it a loss without logits"
    if model.overcoat_spec.vision:
        return "images lie in its rows"
    if not model.overcoat_spec.shifts:
        return "it computes its loss by itself, of labels that it does not shift"
    if (reason := why_head_replaced(model)) is not None:
        return reason
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        return f"its rotation depends on how long a row is (rope_type {kind!r})"
    for name, layer in decoder_layers(model).items():
        if not isinstance(layer, Fp8DecoderLayer):
            return f"{name} is not converted"
        if layer.overcoat_mode is not None:
            return f"{name} is compiled"
        branches, why = branches_of(layer, layer.overcoat_family)
        if branches is None:
            return f"{name}: {why}"
        own = [type(branch.owner).__name__ for branch in branches if branch.mixer is None]
        if own and attention_of(branches) is None:
            return f"{name}: its {own[0]} runs as it is, and would see one process' tokens alone"
        for heads in [branch.mixer.heads for branch in branches if isinstance(branch.mixer, Attention)]:
            if heads.softcap or not heads.causal:
                return f"{name}: its attention is " + ("capped" if heads.softcap else "not causal")
    return None
