"""The phases of a training step, as hooks on a transformers model see them begin.

    embedding | block 1 forward ... block L forward | final norm | loss |
    loss backward | block L backward ... block 1 backward | embedding backward | optimizer

The predictor and the measured report watch the same boundaries, so their phases can be compared one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from overcoat.models import family
from overcoat.models.head import find_causal_model

EMBEDDING, NORM, LOSS = "embedding", "final norm", "loss"
LOSS_BACKWARD, EMBEDDING_BACKWARD, OPTIMIZER = "loss backward", "embedding backward", "optimizer"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers in order."""
    return list(family.decoder_layers(model).values())


def forward_of(block: int) -> str:
    """Label of a block's forward; blocks count from 1."""
    return f"block {block} forward"


def backward_of(block: int) -> str:
    """Label of a block's backward."""
    return f"block {block} backward"


def kind_of(label: str) -> str:
    """ "forward", "loss", "backward" or "optimizer"."""
    if label in (LOSS, LOSS_BACKWARD):
        return "loss"
    if label == OPTIMIZER:
        return "optimizer"
    return "backward" if label.endswith("backward") else "forward"


@contextlib.contextmanager
def watch(
    model: nn.Module, mark: Callable[[str], None], flowing: Callable[[Tensor], None] = lambda _: None
) -> Iterator[None]:
    """Inside, `mark(label)` is called wherever a phase of the step begins, all but the optimizer's.

    Args:
        model: a transformers causal model.
        flowing: called with the residual stream and its gradient wherever it passes from block to block.
    """
    found = find_causal_model(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} is not a causal language model of transformers (a *ForCausalLM)")
    causal: Any = found[1]
    layers = decoder_layers(causal)
    handles = [
        causal.register_forward_pre_hook(lambda *_: mark(EMBEDDING)),
        causal.base_model.register_forward_hook(lambda *_: mark(LOSS)),
        causal.register_forward_hook(_watch_result(mark)),
    ]
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(_watch_input(index, mark, flowing)))
        handles.append(layer.register_forward_hook(_watch_output(index, len(layers), mark, flowing)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_input(index: int, mark: Callable[[str], None], flowing: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if index == 0 and args and args[0].requires_grad:
            args[0].register_hook(_on_gradient(EMBEDDING_BACKWARD, mark, flowing))
            flowing(args[0])
        mark(forward_of(index + 1))

    return hook


def _watch_output(
    index: int, count: int, mark: Callable[[str], None], flowing: Callable[[Tensor], None]
) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        flowing(x)
        if x.requires_grad:
            x.register_hook(_on_gradient(backward_of(index + 1), mark, flowing))
        if index + 1 == count:
            mark(NORM)

    return hook


def _watch_result(mark: Callable[[str], None]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        result = output[0]  # the loss, or the logits where there is none
        if result.requires_grad:
            result.register_hook(lambda _: mark(LOSS_BACKWARD))

    return hook


def _on_gradient(label: str, mark: Callable[[str], None], flowing: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook(gradient: Tensor) -> None:
        mark(label)
        flowing(gradient)

    return hook
