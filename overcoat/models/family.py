"""The registry of model families: the `FAMILIES` of this folder's files, each of which says what its layers compute.

A family is recognised by the name and module of transformers' class. Layers of other classes get one that is proposed
from their structure and verified by numbers (propose.py), as an attribute of the object. `convert`, the head, the
estimate, the benchmarks and the tests iterate over `families()`; olmo2.py shows what a file holds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

from torch import nn

from overcoat.block.spec import RowPermutation


def never(layer: Any) -> None:
    """`Family.refused` of most; like the next a function of this file, by whose name layers are pickled."""


def one(model: Any) -> float:
    """`Family.logit_scale` of most."""
    return 1.0


class Argument(NamedTuple):
    """An argument of a module that runs as it is: its name (None: by its place), and the layer's argument that it gets.

    source: the layer's name for it; INPUT: what the module reads of the stream; REST: all that the layer got beyond its
        own names; None: always `value`, which else stands for an argument that the layer did not get.
    """

    name: Optional[str]
    source: Optional[str]
    value: Any = None


INPUT, REST = "", "**"


class Modules(NamedTuple):
    """One residual branch of a layer, in modules; `block.spec.Branch` has its parameters.

    mixer: `Attention`, `Mlp`, or None where the owner runs as it is, with the arguments in `call`; `results` as a
        layer's (`Family`).
    owner: the module whose forward the mixer and its linear layers stand in for.
    qk_norm: the norms of q and of k, None where there is none. pre, post: the norms before and after, or None.
    layer_scale: what each column of the result is multiplied with before it is added: a module, and the name of its
        parameter. sinks: the name of attention's (num_q,) in the owner. Parameters are named, not held, since FSDP2
        puts others in their place.
    norm_after_residual: whether `post` is of the sum.
    around: further modules whose forward this stands in for.
    orders: of `in_proj`, and scale of `out_proj`, so before `post`: as `block.spec.Linear` has them.
    """

    mixer: Any
    owner: Any
    in_proj: tuple[Any, ...]
    out_proj: Any
    qk_norm: tuple[Any, ...] = ()
    pre: Any = None
    post: Any = None
    layer_scale: Any = None
    norm_after_residual: bool = False
    around: tuple[Any, ...] = ()
    orders: tuple[Optional[RowPermutation], ...] = ()
    scale: float = 1.0
    sinks: Optional[str] = None
    call: tuple[Argument, ...] = (Argument(None, INPUT),)
    results: int = 0


class Family(NamedTuple):
    """Description of a family of transformers models: a proposal that the conversion verifies.

    Attributes:
        module: its modeling module. layer, causal, norm: names of the layer's class in it, of the model's (a causal
            one, an encoder, or with backbone="" the text of a vision-language model), and of the norm's; norm is None
            where norms are PyTorch's LayerNorm.
        centered: the norm subtracts the mean. plus_one: it multiplies by 1 + weight instead of weight.
        branches: the decoder layer and the batch size -> its branches, in the order in which they are computed.
        samples: small configurations for the tests, by name: fields beside those that all families share.
        parallel: whether all branches of a layer read its input, instead of each the sum so far.
        encoder: whether a token sees those after it, too. rotary: whether layers are given cos and sin.
        refused: a layer -> the reason why it cannot be converted all the same, or None.
        q_scale: a layer, position ids -> what q is multiplied by after the rotation, in their shape.
        logit_scale: a causal model -> what its logits are multiplied by.
        backbone, stack: where the causal model keeps its layers' owner, and that one the layers.
        tables: what layers are given as position_embeddings -> cos and sin, if these are not the same.
        results: how many a layer returns in a tuple, of which all but the first are None; 0: no tuple.
        proposed: whether it was proposed for a layer of another class (propose.py). given: the arguments that such a
            layer was verified with; columns: of its cos and sin; without: its arguments that were None.
        factor: what a layer multiplies its result with: the name of its buffer or parameter; "": nothing.
        parts: of a layer that is not transformers': the modules that its parts' classes are in.
        inputs: of such a layer: itself, its input and its other arguments -> the arguments of transformers' layers.
    """

    module: str
    layer: str
    causal: str
    norm: Optional[str]
    branches: Callable[[Any, int], tuple[Modules, ...]]
    samples: dict[str, dict[str, Any]]
    centered: bool = False
    plus_one: bool = False
    parallel: Optional[Callable[[Any], bool]] = None
    encoder: bool = False
    rotary: bool = True
    refused: Callable[[Any], Optional[str]] = never
    q_scale: Optional[Callable[[Any, Any], Any]] = None
    logit_scale: Callable[[Any], float] = one
    backbone: str = "model"
    stack: str = "layers"
    parts: tuple[str, ...] = ()
    inputs: Optional[Callable[[Any, Any, dict[str, Any]], dict[str, Any]]] = None
    tables: Optional[Callable[[Any], Any]] = None
    results: int = 0
    proposed: bool = False
    given: tuple[str, ...] = ()
    columns: int = 0
    factor: str = ""
    without: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model_type: str, name: str, branches: Any, samples: dict[str, dict[str, Any]], **options: Any
    ) -> Family:
        """A family of transformers whose classes' names begin with `name`, but for those in `options`."""
        names = {"layer": f"{name}DecoderLayer", "causal": f"{name}ForCausalLM", "norm": f"{name}RMSNorm"}
        module = f"transformers.models.{model_type}.modeling_{model_type}"
        return cls(module=module, branches=branches, samples=samples, **{**names, **options})


# Whose layers and models these are; a family of torchtitan's has no model here.
LIBRARIES = ("transformers.", "torchtitan.models.")


# Files of families/, imported when the first model is looked at.
MODULES = ("encoders", "experts", "gemma", "gpt2", "llama", "neox", "olmo2", "torchtitan_llama3")


@functools.cache
def families() -> tuple[Family, ...]:
    """All families, in the order of transformers' modules."""
    modules = [importlib.import_module(f"{__package__}.families.{name}") for name in MODULES]
    found = [family for module in modules for family in module.FAMILIES]
    return tuple(sorted(found, key=lambda family: (family.module, family.layer)))


def original_class(module: nn.Module | type[nn.Module]) -> Any:
    """A module's transformers class, whatever was mixed in (by this package or by FSDP2); else its own."""
    cls = module if isinstance(module, type) else type(module)
    for base in cls.__mro__:
        # A mixed class has the original's name and module (`mixed`).
        if base.__module__.startswith(LIBRARIES) and not _is_mixed(base):
            return base
    return cls


def family_of(module: nn.Module | type[nn.Module]) -> Optional[Family]:
    """The family whose decoder layer or causal model this is, or None; a proposed one is the object's own."""
    if not isinstance(module, type) and (own := vars(module).get("overcoat_family")) is not None:
        proposed: Family = own
        return proposed
    original = original_class(module)
    for family in families():
        if original.__module__ == family.module and original.__name__ in (family.layer, family.causal):
            return family
    return None


LAYERS = (
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
    ("torchtitan.models.common.decoder", "TransformerBlock"),
)


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All layers of a model by name, converted or not, of a known family or another: libraries' word for a layer is its
    base class, whatever the class itself is called. Of layers inside each other the outer ones."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_layer = any((cls.__module__, cls.__name__) in LAYERS for cls in type(module).__mro__)
        if is_layer and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = module
    return found


def class_name(module: nn.Module) -> str:
    """A module's class as errors name it: with its module, unless PyTorch's own or transformers'."""
    cls = type(module)
    return (
        cls.__name__ if cls.__module__.startswith(("torch.nn", "transformers.")) else f"{cls.__module__}.{cls.__name__}"
    )


def mixed(mixin: Any, original: Any) -> Any:
    """`original` with `mixin` before it, under the original's name and module: Accelerate finds layers by the name, and
    config.json and peft's adapter_config.json record them, for others to import."""
    return _mixed(mixin, original)


@functools.cache
def _mixed(mixin: Any, original: Any) -> Any:
    names = {
        "__module__": original.__module__,
        "overcoat_mixin": mixin,
        "__qualname__": f"{mixin.__name__}[{original.__name__}]",
    }
    return type(original.__name__, (mixin, original), names)


class Mixin(nn.Module):
    """Base of the mixins of transformers classes; objects are pickled as mixin and original."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # `type(model).from_pretrained(...)`, `type(layer)(config, index)`: made anew, it has not been converted.
        super().__init__(*args, **options)
        if _is_mixed(type(self)):
            self.__class__ = original_class(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (_new, type(self).__bases__, *made[2:]) if _is_mixed(type(self)) else made


def _is_mixed(cls: Any) -> bool:
    return "overcoat_mixin" in vars(cls)


def _new(mixin: Any, original: Any) -> Any:
    cls = mixed(mixin, original)
    return cls.__new__(cls)


# ---- whole models ---------------------------------------------------------------------------------------------------


class ModelSpec(NamedTuple):
    """A model's class, and the paths of its parts: the text layers' owner (with the final norm `norm`), the last linear
    layer, the vision tower and what leads from there to the text ("" where there is none); what the owner calls its
    layers; whether the model looks into its attention_mask before the text's owner gets it; whether its loss function
    shifts labels (else it computes its loss by itself, of labels as they are); and the name that the configuration of
    its text has for c, if logits x become c * tanh(x / c)."""

    module: str
    name: str
    text: str
    head: str
    vision: str = ""
    connector: str = ""
    stack: str = "layers"
    reads_mask: bool = False
    shifts: bool = True
    cap: str = "final_logit_softcapping"


def logit_cap(model: Any, spec: ModelSpec) -> float:
    """Return c, or 0 where logits are not capped."""
    return float(getattr(model.config.get_text_config(), spec.cap, None) or 0.0)


def _of(
    model_type: str,
    name: str,
    vision: str = "model.vision_tower",
    connector: str = "model.multi_modal_projector",
    text: str = "model.language_model",
    reads_mask: bool = True,
) -> ModelSpec:
    module = f"transformers.models.{model_type}.modeling_{model_type}"
    name = f"{name}ForConditionalGeneration"
    return ModelSpec(module, name, text, "lm_head", vision, connector, reads_mask=reads_mask)


VISION_LANGUAGE = (
    _of("llava", "Llava", reads_mask=False),
    _of("llava_onevision", "LlavaOnevision", reads_mask=False),
    _of("qwen2_5_vl", "Qwen2_5_VL", "model.visual", "model.visual.merger"),
    _of("qwen3_vl", "Qwen3VL", "model.visual", "model.visual.merger"),
    _of("idefics3", "Idefics3", "model.vision_model", "model.connector", "model.text_model"),
    _of("smolvlm", "SmolVLM", "model.vision_model", "model.connector", "model.text_model"),
    _of("paligemma", "PaliGemma"),
    _of("gemma3", "Gemma3"),
    _of("internvl", "InternVL", reads_mask=False),
    _of("mistral3", "Mistral3", reads_mask=False),
)


def model_specs() -> tuple[ModelSpec, ...]:
    """All models whose loss can do without logits."""
    causal = [
        ModelSpec(f.module, f.causal, f.backbone, "lm_head", stack=f.stack)
        for f in families()
        if f.causal and f.backbone and not f.encoder
    ]
    return (*causal, *VISION_LANGUAGE)


def model_spec_of(model: nn.Module | type[nn.Module]) -> Optional[ModelSpec]:
    """Return the `ModelSpec` of a model's class, whatever was mixed in, or None; a proposed one is the object's own."""
    if not isinstance(model, type) and (own := vars(model).get("overcoat_spec")) is not None:
        proposed: ModelSpec = own
        return proposed
    original = original_class(model)
    found = (each for each in model_specs() if (each.module, each.name) == (original.__module__, original.__name__))
    return next(found, None)


def causal_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of transformers' causal and vision-language models in `model`: itself, one inside a PEFT model,
    or several side by side; of models inside each other the outer ones."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in found):
            continue
        original = original_class(module)
        is_known = model_spec_of(module) is not None  # GPT2LMHeadModel
        is_causal = is_known or original.__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))
        if is_causal and original.__module__.startswith("transformers."):
            found.append(name)
            yield name, module


def find_causal_model(model: nn.Module) -> Optional[tuple[str, nn.Module]]:
    """Name and module of the first of `causal_models`, or None."""
    return next(causal_models(model), None)


def tower_path(model: nn.Module) -> str:
    """Return the prefix of the names of a vision tower's modules, with its dot; "" without a tower."""
    # Up to the first that is known: a step of CUDA graphs asks, and to look at all 423 modules of a Llama takes 60 ms.
    known = ((name, whole) for name, module in model.named_modules() if (whole := model_spec_of(module)) is not None)
    name, whole = next(known, ("", None))
    return f"{name}.{whole.vision}.".removeprefix(".") if whole is not None and whole.vision else ""
