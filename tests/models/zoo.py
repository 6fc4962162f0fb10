"""Small models of every family in the registry, and batches of every kind of mask. Random weights, no downloads."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from overcoat.models.family import VISION_LANGUAGE, Family, families
from tests.nightly import mostly_nightly

VOCAB = 512
# By name: the family, and what the configuration has beside the fields below; encoders apart.
KINDS: dict[str, tuple[Family, dict[str, Any]]] = {
    name: (family, extra) for family in families() if not family.encoder for name, extra in family.samples.items()
}
# Each wiring, norm, activation, rotation and kind of attention once; in CI slow tests take these alone.
DISTINCT = (
    "llama",
    "cohere2",
    "gemma2",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "ministral3",
    "mixtral",
    "olmo2",
    "qwen3",
)
ENCODERS: dict[str, tuple[Family, dict[str, Any]]] = {
    name: (family, extra) for family in families() if family.encoder for name, extra in family.samples.items()
}


def every_kind(in_ci: tuple[str, ...] = DISTINCT) -> list[Any]:
    """All kinds as parameters of a test; others than `in_ci` are for `make nightly`."""
    return mostly_nightly(KINDS, in_ci)


def make_model(kind: str = "llama", layers: int = 4, seed: int = 0, **overrides: object) -> nn.Module:
    """A BF16 model with grouped-query heads, uneven norm weights and non-zero biases."""
    torch.manual_seed(seed)
    family, extra = KINDS[kind]
    values = dict(  # noqa: C408
        hidden_size=256,
        intermediate_size=304,  # two groups of 128 and a part of one
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        attn_implementation="sdpa",
        attention_dropout=0.0,
    )
    model = _with_loss(family, {**values, **extra, **overrides}).to(torch.bfloat16)
    return unevenly(model, family.plus_one)


def _with_loss(family: Family, fields: dict[str, Any]) -> nn.Module:
    """The text of a vision-language model as this one without its tower."""
    module = importlib.import_module(family.module)
    if family.backbone:
        model_class = getattr(module, family.causal)
        return model_class(model_class.config_class(**fields))
    whole = next(whole for whole in VISION_LANGUAGE if whole.module == family.module)
    model_class = getattr(module, whole.name)
    tower = {"depth": 0, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 64}
    model = model_class(model_class.config_class(text_config=fields, vision_config=tower))
    owner, _, name = whole.vision.rpartition(".")
    delattr(model.get_submodule(owner), name)
    return model


def unevenly(model: nn.Module, plus_one: bool = False) -> nn.Module:
    def drawn(like: Tensor) -> Tensor:  # in FP32: PyTorch 2.11 draws other BF16 numbers than later ones
        return torch.randn(like.shape).to(like.dtype)

    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ and not m._modules for p in m.parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(drawn(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * drawn(parameter))
            elif id(parameter) in norms or "norm" in ".".join(name.split(".")[-2:]) or "lambda" in name:
                parameter.copy_((not plus_one) + 0.3 * drawn(parameter))
    return model.train()


def make_batch(kind: str = "causal", batch: int = 2, length: int = 61, seed: int = 0) -> dict[str, Tensor]:
    """Inputs and labels; `kind` is causal, left-padded, right-padded or packed (position_ids that restart)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind.endswith("padded"):
        mask = torch.ones_like(ids)
        for row in range(batch):
            pad = 5 + 8 * row
            mask[row, slice(0, pad) if kind.startswith("left") else slice(length - pad, None)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
    elif kind == "packed":
        cuts = torch.tensor([0, length // 4, length // 2 + 3, length])
        positions = torch.cat([torch.arange(int(n)) for n in cuts.diff()])
        inputs["position_ids"] = positions.expand(batch, -1).contiguous()
    elif kind != "causal":
        raise ValueError(f"unknown batch kind {kind!r}")
    return inputs


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of all parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """A fresh pass: the loss, and every gradient by the name it has where no layer is compiled."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    found = {name.replace("._orig_mod", ""): grad for name, grad in gradients(model).items()}
    return {"loss": loss.detach(), **found}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, and of the same names."""
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


# ---- encoders --------------------------------------------------------------------------------------------------------

PATCH, SIDE = 4, 28
# Images in one batch, in patches (rows, columns), where a tower takes them of different sizes.
SIZES = [(6, 4), (4, 8), (6, 6)]


def make_encoder(kind: str, layers: int = 2, seed: int = 0, **overrides: object) -> nn.Module:
    """A FP32 encoder, as uneven as `make_model`'s; 128 wide, with heads of 64."""
    torch.manual_seed(seed)
    family, extra = ENCODERS[kind]
    model_class = getattr(importlib.import_module(family.module), family.causal)
    values = dict(  # noqa: C408
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=layers,
        depth=layers,
        num_attention_heads=2,
        num_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        num_patches=64,
        out_hidden_size=64,
        window_size=PATCH * 4,
        vocab_size=VOCAB,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return unevenly(model_class(model_class.config_class(**{**values, **extra, **overrides})))


def make_inputs(kind: str, seed: int = 0) -> dict[str, Any]:
    """An encoder's inputs: text, or images, of different sizes where it takes them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind.endswith("bert"):
        ids = torch.randint(4, VOCAB, (2, 40), generator=generator)
        return {"input_ids": ids, "attention_mask": (torch.arange(40) < torch.tensor([[40], [29]])).long()}
    counts = [rows * columns for rows, columns in SIZES]
    if kind.startswith("qwen"):
        patches = normal(sum(counts), 3 * 2 * PATCH * PATCH)
        return {"hidden_states": patches, "grid_thw": torch.tensor([(1, *size) for size in SIZES])}
    if kind == "siglip2":
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        patches = normal(len(SIZES), max(counts), 3 * PATCH * PATCH)
        return {"pixel_values": patches, "pixel_attention_mask": real, "spatial_shapes": torch.tensor(SIZES)}
    if kind in ("idefics3", "smolvlm"):
        real = torch.ones(2, SIDE // PATCH, SIDE // PATCH, dtype=torch.bool)
        real[1, 4:] = False
        return {"pixel_values": normal(2, 3, SIDE, SIDE), "patch_attention_mask": real}
    if kind == "pixtral":
        sizes = [tuple(PATCH * side for side in size) for size in SIZES]
        return {"pixel_values": normal(len(SIZES), 3, SIDE + 4, SIDE + 4), "image_sizes": sizes}
    return {"pixel_values": normal(2, 3, SIDE, SIDE)}
