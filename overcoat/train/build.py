"""The model, the recipe and the optimizer, from their sections of the configuration; and the loss of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import sys
import warnings
from pathlib import Path
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overcoat
from overcoat.estimate.dry_run import META, LossOf
from overcoat.extras import load_extra, load_pretrained
from overcoat.models.family import tower_path
from overcoat.models.head import LeanLossModel
from overcoat.models.shapes import MOST_LAYERS
from overcoat.optim.sharding import local
from overcoat.train.adapters import add_adapters, base_name, load_adapters, num_trained_rows
from overcoat.train.config import ADAPTERS, Config, ModelConfig, OptimizerConfig, RecipeConfig, error_context, require
from overcoat.train.data import IGNORED, Batch
from overcoat.train.files import RECORD
from overcoat.train.process import choose_device, gather, is_first, memory_of, share
from overcoat.train.quantized import COMPANIONS, check_quantized, has_frozen_codes, loading_options
from overcoat.train.routing import Routing
from overcoat.train.vocabulary import embedding_of, resize, rows_of

MODEL_TYPES = "transformers.models.auto.modeling_auto"
CPU = torch.device("cpu")
# Files of folders that are no models, and what their user should name instead.
NOT_MODELS = {
    ADAPTERS: "holds adapters without their model: merge them into it first (the training command again with "
    "lora.merge=true, or save the result of peft's merge_and_unload()), and name that folder; overcoat train takes "
    "them as model.name",
    "config.toml": "is the folder of a run: name its export/",
    RECORD: "is a checkpoint: name its run's export/, or continue it with train.resume",
}


def check_config(config: Config) -> None:
    """Refuse a device, recipe, optimizer or model that cannot work, before any data are read."""
    device = choose_device(config.train.device)
    make_recipe(config.recipe)
    require(
        config.train.compile != "graphs" or device.type == "cuda",
        f"train.compile = 'graphs' records CUDA graphs, and train.device = {config.train.device!r} is a CPU here: set "
        "train.compile to 'layers' or 'none'",
    )
    with error_context("[optimizer]: "):
        make_optimizer(nn.Linear(1, 1, dtype=getattr(torch, config.model.dtype)), config.optimizer, config.train.seed)
    if config.model.name:
        name = base_name(config)
        check_is_model(name)
        kind = load_pretrained("AutoConfig", "model.name =", name, config.model.trust_remote_code)
        check_quantized(kind, name, config.model.dequantize, keeps_codes(config))
    else:
        check_builds(config.model, CPU if config.train.stream else device, make_recipe(config.recipe))


def build_model(config: Config, tokenizer: Any | None, device: torch.device = CPU) -> Any:
    """Return the transformers model on `device` in `model.dtype`, with weights from `model.name` or drawn from the
    seed.

    No parameter exists twice during loading, neither on the host nor on the device. Random weights are drawn on the
    device, so a seed gives other weights on a GPU than on a CPU; on the meta device `overcoat.stream` draws them.
    """
    transformers = load_extra("transformers", "hf", "building the model")
    transformers.utils.logging.disable_progress_bar()  # it would cut through ours at every checkpoint
    settings = model_settings(config.model)
    if config.model.name:
        named = config.model
        model = load_model(
            base_name(config), device, settings, named.trust_remote_code, "model.name =", named.dequantize,
            keeps_codes(config),
        )  # fmt: skip
        new = config.tokenizer.add_tokens if tokenizer is not None else []
        if tokenizer is not None:
            trained = num_trained_rows(named.name) if named.holds_adapters else 0
            resize(model, tokenizer, len(new) + trained, config.train.seed)
        if named.holds_adapters:
            model = load_adapters(model, named.name, config.lora.merge_start)
            if not config.lora.merge_start:
                return model
        freeze(model, config.model.freeze)
        if not config.lora.rank:
            is_trained = any(parameter.requires_grad for parameter in model.parameters())
            require(is_trained, f"model.freeze = {config.model.freeze}: nothing is left to train, name less")
            return model
        rows = rows_of(model, tokenizer, new) if new else None
        return add_adapters(model, config.lora, config.train.seed, config.model.freeze, rows)
    model_config = inline_config(config.model, tokenizer, config.data.sequence_length)
    torch.manual_seed(config.train.seed)
    with device:
        return transformers.AutoModelForCausalLM.from_config(model_config, **settings)


def check_is_model(name: str, what: str = "model.name =") -> None:
    """Refuse a folder of adapters, a run or a checkpoint instead of a model. what: the option, for the message."""
    folder = Path(name)
    for file, why in NOT_MODELS.items():
        is_model = file == "config.toml" and (folder / "config.json").is_file()  # with a file of the user's
        require(is_model or not (folder / file).is_file(), f"{what} {name!r} {why}")


def keeps_codes(config: Config) -> bool:
    """True if FP8 codes of the model to load, where it has such, stay what they are, as frozen weights."""
    recipe, merges = make_recipe(config.recipe), config.model.holds_adapters and config.lora.merge_start
    is_held = recipe.fp8 and recipe.frozen_weights == "fp8" and recipe.linear_scaling == "block"
    return is_held and not config.model.dequantize and not merges


def start_of(config: Config) -> str:
    """Return what a run starts from."""
    model, parts = config.model, [config.model.name or "random weights"]
    if model.holds_adapters:
        how = "merged into" if config.lora.merge_start else "trained on in"
        parts[0] += f", adapters {how} {base_name(config)}"
    return ", ".join([*parts, *([f"dequantized to {model.dtype}"] if model.dequantize else [])])


@torch.no_grad()
def check_weights(model: nn.Module, where: str) -> None:
    """Refuse NaN or infinite weights, in every process; the message names the first tensor. where: their source, for
    the message."""
    named = [(name, local(each)) for name, each in model.named_parameters()]
    named = [(name, each) for name, each in named if each.is_floating_point() and each.itemsize > 1 and each.numel()]
    if named:
        place = named[-1][1].device  # the head's: streamed weights are on the host
        # One tensor is read at once, and the host waits once. NaN makes both ends NaN.
        ends = [torch.stack(torch.aminmax(each.detach())).float().to(place) for _, each in named]
        finite = torch.isfinite(torch.stack(ends)).all(dim=1).tolist()
    wrong = [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite] if named else []
    everywhere = gather(wrong)  # filled in the first process
    wrong = share(lambda: list(dict.fromkeys(name for names in everywhere for name in names)))
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    require(
        not wrong,
        f"{where} holds weights that are NaN or infinite, in {' '.join(wrong[:1])}{more}: they cannot be trained; load "
        "a sound copy",
    )


def freeze(model: nn.Module, names: list[str]) -> None:
    """Freeze the parameters of modules with one of these names: "vision_tower" matches model.vision_tower."""
    for name in names:
        found = [each for key, each in model.named_parameters() if f".{name}." in f".{key}"]
        require(bool(found), f"model.freeze: {type(model).__name__} has no parameters of a module {name!r}")
        for parameter in found:
            parameter.requires_grad_(False)


def base_model(model: Any) -> Any:
    """Return the transformers model, also if it is wrapped in `PeftModel` (adapters are parts of its layers)."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the options that transformers makes and loads the model with."""
    return {"dtype": getattr(torch, model.dtype), "attn_implementation": model.attention}


def auto_class(kind: type) -> Any:
    """Return the transformers auto class for a configuration class: of image-text models, or of text models."""
    transformers = load_extra("transformers", "hf", "loading the model")
    text, both = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_seeing = kind in both and kind not in text
    return transformers.AutoModelForImageTextToText if is_seeing else transformers.AutoModelForCausalLM


def load_model(
    name: str,
    device: torch.device,
    settings: dict[str, Any],
    trust_remote_code: bool = False,
    what: str = "model.name =",
    dequantize: bool = False,
    keep_codes: bool = False,
) -> Any:
    """Return the causal model of a checkpoint folder or name on `device`. Tensors are mapped, converted and moved one
    by one. ValueError: weights are missing or have another shape.

    dequantize: its weights are quantized, and become plain. keep_codes: but for FP8 codes that can be frozen weights;
        of weights that are quantized so, if they are quantized at all.
    """
    check_is_model(name, what)
    options = {"device_map": {"": device}, "output_loading_info": True, "ignore_mismatched_sizes": True}
    kind = load_pretrained("AutoConfig", what, name, trust_remote_code)
    dequantize = dequantize or (keep_codes and has_frozen_codes(kind, name))
    auto = auto_class(type(kind))
    options |= loading_options(kind, name, keep_codes) if dequantize else {}
    model, info = load_pretrained(auto.__name__, what, name, trust_remote_code, **settings, **options)
    wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    wrong += [f"{key} is {tuple(found)}, not {tuple(needed)}" for key, found, needed in info["mismatched_keys"]]
    if not dequantize:
        companions = sorted(key for key in info["unexpected_keys"] if key.endswith(COMPANIONS))
        wrong += [f"{key} belongs to quantized weights" for key in companions]
    if wrong:
        # transformers makes up random weights for these, or takes codes for weights, and trains on.
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ValueError(f"{what} {name!r} does not hold the weights of a {type(model).__name__}: {listed}")
    return model.to(device)


def check_tables(model: Any, num_ids: int, config: Config) -> None:
    """Refuse token ids and positions beyond the model's embedding tables: an IndexError on the CPU, an assertion on the
    GPU. Warn of rows longer than the rotary embedding was trained for. num_ids: token ids are below it."""
    size, length, most = embedding_of(model).num_embeddings, config.data.sequence_length, num_positions(model)
    what, remedy = (
        (f"data.files hold the token id {num_ids - 1}",
         f"it must be at least {num_ids}, unless data.token_dtype is not the files' own")
        if config.data.is_tokens
        else (f"the tokenizer has {num_ids} tokens", "use the model's own tokenizer, or a smaller tokenizer.vocab_size")
    )  # fmt: skip
    require(num_ids <= size, f"{what}, but the model's vocabulary (model.config.vocab_size) is {size}: {remedy}")
    require(length <= most, f"data.sequence_length = {length}: the model has {most} positions; lower it to that")
    if made_for(model) < length and is_first():
        unless = ", unless all documents are shorter" if config.data.masks_documents else ""
        warnings.warn(
            f"data.sequence_length = {length}: the model was made for {made_for(model)} positions; lower it{unless}, "
            "or raise max_position_embeddings in its configuration if it takes more",
            stacklevel=2,
        )


def made_for(model: Any) -> int:
    """Return max_position_embeddings; sys.maxsize if the model has none, or scales its rotary angles beyond it."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {each.get("rope_type", "default") for each in (rope, *rope.values()) if isinstance(each, dict)}
    return sys.maxsize if kinds - {"default"} else getattr(text, "max_position_embeddings", None) or sys.maxsize


def num_positions(model: Any) -> int:
    """Return the rows of the model's position table (embeddings, or GPT-J's buffer); sys.maxsize if positions are
    computed (rotary)."""
    most, tower = made_for(model), tower_path(model)
    named = [(f"{path}.", module) for path, module in model.named_modules()]
    parts = [part for path, part in named if not (tower and path.startswith(tower))]  # what sees has its own
    embeddings = [part.weight for part in parts if isinstance(part, nn.Embedding)]
    tables = [*embeddings, *(table for part in parts for table in part._buffers.values() if table is not None)]
    words = embedding_of(model).weight
    # OPT's has two rows more.
    sizes = {table.shape[0] for table in tables if table.dim() == 2 and table is not words}
    return most if sizes & {most, most + 2} else sys.maxsize


def _inline(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return the model type of [model.config] and its other values. ValueError: an unknown model type or key."""
    transformers = load_extra("transformers", "hf", "building the model")
    supported = list(load_extra(MODEL_TYPES, "hf", "building the model").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    values = dict(model.config)
    model_type = values.pop("model_type", "")
    if model_type not in supported:
        near = difflib.get_close_matches(str(model_type), supported, n=1) or ["llama"]
        raise ValueError(
            f"model.config.model_type = {model_type!r}: no causal language model of transformers; "
            f"did you mean {near[0]!r}?"
        )
    known = transformers.AutoConfig.for_model(model_type).to_dict().keys() | {"rope_theta"}
    for key in values.keys() - known:
        if _shapes(model_type, values) not in (None, _shapes(model_type, values, key)):
            continue  # read by the model's own code: Qwen3-MoE's head_dim
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean model.config.{near[0]}?" if near else ""
        raise ValueError(f"unknown key model.config.{key} for a {model_type} model{hint}")
    return model_type, values


def _shapes(model_type: str, values: dict[str, Any], without: str = "") -> Optional[list[torch.Size]]:
    """Return the shapes of the parameters that values of [model.config] give, or None if they make no model."""
    transformers = load_extra("transformers", "hf", "building the model")
    given = {key: value for key, value in values.items() if key != without}
    with torch.device("meta"), contextlib.suppress(Exception):  # `check_builds` says what is wrong with a value
        config = transformers.AutoConfig.for_model(model_type, **given)
        return [p.shape for p in transformers.AutoModelForCausalLM.from_config(config).parameters()]
    return None


def _own_name(model_type: str, key: str) -> str:
    """Return a model type's own name of a configuration key: GPT-2's n_layer for num_hidden_layers."""
    config = load_extra("transformers", "hf", "building the model").AutoConfig.for_model(model_type)
    return str(config.attribute_map.get(key, key))


def check_builds(model: ModelConfig, device: torch.device, recipe: overcoat.Recipe) -> Any:
    """Return the converted model of [model.config], on the meta device. ValueError: its values make no model, the
    weights alone exceed the memory of `device`, or `recipe` cannot train it."""
    transformers = load_extra("transformers", "hf", "building the model")
    model_type, values = _inline(model)
    if "vocab_size" not in values:  # the tokenizer will say; it has the ids that are given
        ids = [value for key, value in values.items() if key.endswith("_token_id") and isinstance(value, int)]
        values["vocab_size"] = max([2, *ids]) + 1
    key = _own_name(model_type, "num_hidden_layers")
    depth, known = values.get(key), memory_of(device)
    is_possible = not isinstance(depth, int) or 1 <= depth <= MOST_LAYERS
    require(is_possible, f"model.config.{key} = {depth}: from 1 to {MOST_LAYERS} layers can be trained")
    # Of any kind: from a check of transformers, or from PyTorch when layers are made.
    failing = error_context(f"[model.config] and model.attention make no {model_type} model: ", Exception)
    with failing, torch.device("meta"):
        config = transformers.AutoConfig.for_model(model_type, **values)
        made = transformers.AutoModelForCausalLM.from_config(config, **model_settings(model))
    overcoat.convert(made, recipe, strict=True)
    needed = sum(parameter.nbytes for parameter in made.parameters())
    where = "the GPU" if device.type == "cuda" else "the host"
    require(
        needed <= known,
        f"[model.config] makes a model whose weights alone take {needed / 2**30:.1f} GiB, and {where} has "
        f"{known / 2**30:.1f} GiB of memory: make it smaller",
    )
    return made


def inline_config(model: ModelConfig, tokenizer: Any | None, length: int) -> Any:
    """Return [model.config] as a transformers configuration; the tokenizer sets the vocabulary and `length` the
    positions unless given."""
    transformers = load_extra("transformers", "hf", "building the model")
    model_type, values = _inline(model)
    if tokenizer is not None:
        size = values.setdefault("vocab_size", len(tokenizer))
        require(
            size >= len(tokenizer),
            f"model.config.vocab_size = {size}: the tokenizer has {len(tokenizer)} tokens; raise it to that, or leave "
            "it out",
        )
        # Not the padding token, which is EOS: nn.Embedding would never train its row.
        for name in ("bos_token_id", "eos_token_id"):
            values.setdefault(name, getattr(tokenizer, name))
    require("vocab_size" in values, "model.config.vocab_size: needed for token binaries without a tokenizer")
    values.setdefault(_own_name(model_type, "max_position_embeddings"), length)
    return transformers.AutoConfig.for_model(model_type, **values)


def make_recipe(section: RecipeConfig) -> overcoat.Recipe:
    """Return the `Recipe` of [recipe]: the named one with the given fields replaced."""
    changes = {key: value for key, value in dataclasses.asdict(section).items() if key != "name" and value is not None}
    for key in ("checkpoint", "head"):
        if changes.get(key) == "none":
            changes[key] = None
    return overcoat.Recipe.from_name(section.name, **changes)


def make_optimizer(model: nn.Module, section: OptimizerConfig, seed: int) -> overcoat.AdamW:
    """Return the optimizer of the trained parameters. Weight decay applies to matrices only, stacked ones (experts)
    too: norm weights and biases should not shrink."""
    if section.name == "muon":
        return make_muon(model, section, seed)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # biases of experts are stacked, too
            (decayed if parameter.ndim > 1 and not name.endswith("bias") else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return overcoat.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        moments=section.codes,
        master=section.master,
        group_size=section.group_size,
        offload=section.offload,
        seed=seed,
    )


def make_muon(model: nn.Module, section: OptimizerConfig, seed: int) -> overcoat.Muon:
    """Return Muon over the trained parameters."""
    return overcoat.Muon(
        overcoat.muon_groups(model, qkv=section.qkv, adamw_weight_decay=section.weight_decay),
        lr=section.lr,
        momentum=section.momentum,
        nesterov=section.nesterov,
        weight_decay=section.weight_decay,
        adamw_lr=section.peak_lr("adamw"),
        state=str(section.moments),
        master=section.master,
        scale=section.scale,
        steps=section.newton_schulz_steps,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        group_size=section.group_size,
        offload=section.offload,
        seed=seed,
    )


def summed_loss(model: Any, batch: Batch, routing: Routing | None = None) -> Tensor:
    """Return the cross-entropy summed over the batch's labels, () fp32, in training plus the recipe's z-loss and, of a
    model with `output_router_logits`, the auxiliary loss for each label; without materializing logits if the model's
    head is converted. routing: counts what the routers chose."""
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False, **batch.images}
    model = base_model(model)
    if isinstance(model, LeanLossModel) and model.overcoat_spec.shifts:
        # The labels are shifted already; divided by one item, the loss is the sum.
        labels = {"labels": batch.labels, "shift_labels": batch.labels, "num_items_in_batch": 1}
        return model(**inputs, **labels, cu_seq_lens_q=batch.document_starts, output_logits=False).loss
    outputs = model(**inputs)  # logits (B, T, V)
    log_probabilities = F.log_softmax(outputs.logits.flatten(0, 1), dim=-1, dtype=torch.float32)
    loss = F.nll_loss(log_probabilities, batch.labels.flatten(), reduction="sum")
    aux_loss = getattr(outputs, "aux_loss", None)
    if isinstance(aux_loss, Tensor) and model.training:
        config = model.config.get_text_config()
        loss = loss + config.router_aux_loss_coef * aux_loss * (batch.labels != IGNORED).sum()
        if routing is not None:
            routing.add(outputs, config)
    return loss


def loss_for_estimates(document_mask: bool) -> LossOf:
    """Return the loss of a step for `overcoat.estimate.Predictor`: the mean over token ids on the meta device."""

    def loss(model: Any, batch: int, sequence: int) -> Tensor:
        ids = torch.empty((batch, sequence), dtype=torch.int64, device=META)
        places = torch.empty_like(ids) if document_mask else None
        return summed_loss(model, Batch(ids, torch.empty_like(ids), places)) / ids.numel()

    return loss
