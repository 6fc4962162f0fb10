"""Inputs for the tests of Muon's kernels: awkward shapes as two parts each, and both passes over them."""

from __future__ import annotations

import copy

import torch

from overcoat.kernels import muon
from overcoat.kernels.adamw import Piece, rows_of, step_coefficients
from overcoat.kernels.adamw_step import StepTensors
from overcoat.kernels.multi_tensor import Gradients
from overcoat.optim.state import init_state
from tests.kernels.adamw_cases import gradients
from tests.kernels.compare import DEVICE

# Whole groups, ragged rows (aligned to 16 and not), rows shorter than half a group, batches.
SHAPES = ((4, 256), (3, 144), (5, 130), (6, 20), (2, 3, 144), (3, 5, 24))


def tensors_of(code: str, master: str, shapes=SHAPES, device: torch.device = DEVICE) -> StepTensors:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    group = {"moments": (code,), "group_size": 128, "master": "auto" if master == "fp32" else master}
    states = [init_state(param, group) for param in params]
    lists = {name: [state[name] for state in states] for name in states[0]}
    return StepTensors(params, lists, list(range(7, 7 + len(shapes))), [3 * i for i in range(len(shapes))], 128)


def parts_of(tensors: StepTensors) -> tuple[list[muon.Part], int]:
    """Every parameter as two parts, its first row and the rest; and their elements."""
    parts, offset = [], 0
    for owner, param in enumerate(tensors.params):
        layout = rows_of(param.shape, tensors.group_size)
        for rows in ((0, 1), (1, layout.rows)):
            part = muon.Part(Piece(owner, *rows, layout), offset, 0.5 + owner)
            parts.append(part)
            offset += part.numel + 16
    return parts, offset


def passes(tensors: StepTensors, options: muon.MuonHyper, skip: torch.Tensor, by_kernel: bool, steps: int = 2):
    """Take steps with u itself as the update, and return all tensors."""
    tensors = copy.deepcopy(tensors)
    parts, size = parts_of(tensors)
    device = tensors.params[0].device
    lr, factor = torch.tensor(1e-2, device=device), torch.tensor(0.5, device=device)
    updates = torch.zeros(size, dtype=torch.bfloat16, device=device)
    made = muon.Passes(tensors, parts)
    for step in range(steps):
        grads = gradients(tensors.params, step)
        counts = torch.arange(len(grads), dtype=torch.float32, device=device) + step + 1
        counted = counts, step_coefficients(counts, lr, *options[:4])
        if by_kernel:
            table = Gradients([grad.numel() for grad in grads], device)
            table.set(grads)
            made.momentum(table.addresses, table.dtype, updates, counts, factor, skip, options)
            made.apply(updates, counted, skip, options)
        else:
            muon.reference_momentum(tensors, parts, grads, updates, counts, factor, skip, options)
            muon.reference_apply(tensors, parts, updates, *counted, skip, options)
    return [updates, *tensors.params, *(value for of in tensors.states.values() for value in of)]


def muon_step():
    """Launch every kernel of a step, on CPU tensors."""
    device = torch.device("cpu")
    options = muon.hyper(0.95, True, 0.1, "e4m3x", "bf16+8", 128, 5)
    passes(tensors_of("e4m3x", "bf16+8", device=device), options, torch.tensor(False), by_kernel=True, steps=1)
    for shape in ((48, 48), (48, 128), (130, 48)):
        muon.orthogonalize_by_kernels(torch.zeros(1, *shape, dtype=torch.bfloat16, device=device), 5)
