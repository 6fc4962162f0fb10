"""Where the parts of a whole model lie: of a family's causal model, or of a vision-language model.

The layers of the latter are other families', found one by one; what it needs here is the end, and names for the report.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from torch import nn

from overcoat.models.family import families, original_class


class Whole(NamedTuple):
    """A model's class, and the paths of its parts: the text layers' owner (with the final norm `norm`), the last linear
    layer, the vision tower and what leads from there to the text ("" where there is none); what the owner calls its
    layers; and whether the model looks into its attention_mask before the text's owner gets it."""

    module: str
    name: str
    text: str
    head: str
    vision: str = ""
    connector: str = ""
    stack: str = "layers"
    reads_mask: bool = False


def _of(
    model_type: str,
    name: str,
    vision: str = "model.vision_tower",
    connector: str = "model.multi_modal_projector",
    text: str = "model.language_model",
    reads_mask: bool = True,
) -> Whole:
    module = f"transformers.models.{model_type}.modeling_{model_type}"
    name = f"{name}ForConditionalGeneration"
    return Whole(module, name, text, "lm_head", vision, connector, reads_mask=reads_mask)


VISION_LANGUAGE = (
    _of("llava", "Llava", reads_mask=False),
    _of("llava_onevision", "LlavaOnevision", reads_mask=False),
    _of("qwen2_5_vl", "Qwen2_5_VL", "model.visual", "model.visual.merger"),
    _of("qwen3_vl", "Qwen3VL", "model.visual", "model.visual.merger"),
    _of("idefics3", "Idefics3", "model.vision_model", "model.connector", "model.text_model"),
    _of("smolvlm", "SmolVLM", "model.vision_model", "model.connector", "model.text_model"),
    _of("paligemma", "PaliGemma"),
    _of("internvl", "InternVL", reads_mask=False),
    _of("mistral3", "Mistral3", reads_mask=False),
)


def wholes() -> tuple[Whole, ...]:
    """All models whose loss can do without logits."""
    causal = [
        Whole(f.module, f.causal, f.trunk, "lm_head", stack=f.stack) for f in families() if not f.encoder and f.causal
    ]
    return (*causal, *VISION_LANGUAGE)


def whole_of(model: nn.Module | type[nn.Module]) -> Optional[Whole]:
    """What is known of a model's class, whatever was mixed in, or None."""
    original = original_class(model)
    found = (each for each in wholes() if (each.module, each.name) == (original.__module__, original.__name__))
    return next(found, None)
