"""MkDocs hook: fills what the code itself knows into the pages.

    {{ support_matrix }}   models.md: what `overcoat.convert` says of each model type in MODEL_TYPES
    {{ tested_versions }}  models.md: of transformers
    {{ encoders }}         models.md: the encoders and vision-language models that the package knows
    {{ configuration }}    configuration.md: every key of overcoat/train/config.py

A page with another marker of this form fails the build. A line that only links to a file of the repository (as
GitHub shows it) becomes the file itself.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# transformers' model types that the page answers for, supported or not: `convert` is asked.
MODEL_TYPES = (
    *("llama", "mistral", "ministral", "ministral3", "cwm", "qwen2", "qwen3", "starcoder2", "olmo", "olmo2", "olmo3"),
    *("gemma", "gemma2", "gemma3_text", "phi3", "glm", "glm4", "cohere", "cohere2", "granite", "gpt_neox", "gpt2"),
    *("smollm3", "seed_oss", "ernie4_5", "helium", "exaone4", "arcee", "mixtral", "qwen3_moe", "olmoe", "gpt_oss"),
    *("phi", "stablelm", "nemotron", "hunyuan_v1_dense", "apertus"),
    *("qwen2_5_vl", "qwen3_vl"),  # whose text layers are classes of their own
)
TINY = {
    # Experts below 256 columns stay as they are.
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256),
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("attention_dropout", "residual_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
}


def support_matrix() -> str:
    """A table of the model types whose layers have a family, and lists of some others.

    Raises:
        ValueError: a supported decoder layer belongs to none of MODEL_TYPES.
    """
    lines = [
        "| model | model_type | decoder layer | in FP8 | kept | loss without logits |",
        "|---|---|---|---|---|---|",
    ]
    proposed, partly, others, seen = [], [], [], set()
    for model_type in MODEL_TYPES:
        title, report = conversion(model_type)
        if report is None or not report.converted:
            others.append(title)
            continue
        head = "yes" if report.head is not None and report.head.converted else "no"
        kind = report.layers[-1].kind  # the text's, which comes after a tower's
        seen.add(kind)
        family = family_of_layer(kind)
        if family is None:
            (partly if report.in_part else proposed).append(title)
            continue
        has_experts = "experts in FP8" in report.layers[-1].detail
        parts = "all but the router" if has_experts else "all"
        lines.append(f"| {title} | `{model_type}` | `{kind}` | {parts} | {kept(family)} | {head} |")
    if missing := supported_layers() - seen:
        raise ValueError(f"docs/generate.py: add the model types of {', '.join(sorted(missing))} to MODEL_TYPES")
    named = {"Found by their structure": proposed, "in part": partly, "running their own forward": others}
    rest = "; ".join(f"{title}: {', '.join(kinds)}" for title, kinds in named.items() if kinds)
    return "\n".join(lines) + f"\n\n{rest}."


def supported_layers() -> set[str]:
    """Names of the decoder layers that the package knows, of text models."""
    from overcoat.models.family import families

    return {family.layer for family in families() if family.causal and not family.encoder}


def family_of_layer(kind: str) -> Any:
    """The family of a decoder layer's class name, or None."""
    from overcoat.models.family import families

    return next((family for family in families() if family.layer == kind), None)


def kept(family: Any) -> str:
    """U that a layer keeps, of the family's first sample."""
    from docs.kept_units import kept_units

    return f"{kept_units(family, next(iter(family.samples))):.1f} U"


def tested_versions() -> str:
    """Of transformers: the oldest that is supported, and the one that this page was made with."""
    from importlib.metadata import requires, version

    (lower,) = {
        match[1] for line in requires("overcoat") or () if (match := re.match(r"transformers\b.*>=([0-9.]+)", line))
    }
    return f"{lower} to {version('transformers')}"


def encoders() -> str:
    """A list of encoders' layers with what they keep, and one of vision-language models."""
    from overcoat.models.family import VISION_LANGUAGE, families

    layers = ", ".join(f"`{family.layer}` ({kept(family)})" for family in families() if family.encoder)
    models = ", ".join(f"`{whole.name}`" for whole in VISION_LANGUAGE)
    return f"Layers: {layers}.\n\nVision-language models: {models}."


def conversion(model_type: str) -> tuple[str, Any | None]:
    """The model's name, and the report of `convert` on one without data; None if there is nothing to convert."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    import overcoat

    config_class = CONFIG_MAPPING[model_type]
    sees = "vision_config" in config_class.sub_configs
    config = config_class(text_config=TINY) if sees else config_class(**TINY)
    with torch.device("meta"):
        model_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = model_class.from_config(config, dtype=torch.bfloat16)
    title = re.sub("ForCausalLM|LMHeadModel|ForConditionalGeneration", "", type(model).__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers left alone: the page says it
        try:
            return title, overcoat.convert(model)
        except ValueError:
            return title, None


def configuration() -> str:
    """A table of keys for each section."""
    from overcoat.train.config import Config

    sections = typing.get_type_hints(Config)
    return "\n".join(section_table(field.name, sections[field.name]) for field in dataclasses.fields(Config))


def section_table(section: str, cls: Any) -> str:
    """The keys of one section: type, default, meaning."""
    hints = typing.get_type_hints(cls)
    lines = [f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        cells = f"`{type_name(hints[field.name])}`", f"`{written(default)}`", field.metadata["help"]
        lines.append(f"| `{section}.{field.name}` | " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def type_name(hint: Any) -> str:
    """A type as a user of TOML reads it: "int or "auto"", "list of float"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in parts if part is not type(None))
    if origin is list:
        return f"list of {type_name(parts[0])}"
    return {str: "text", float: "number"}.get(hint) or ("table" if origin is dict else hint.__name__)


def written(default: Any) -> str:
    """A default as TOML writes it; an option that replaces nothing is unset."""
    if default is None:
        return "unset"
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else str(default)


def file(link: re.Match[str]) -> str:
    """A file of the repository as a block of code."""
    language = {"py": "python"}.get(link[2], link[2])
    return f"```{language}\n{(ROOT / link[1]).read_text(encoding='utf-8')}```"


MARKERS = {
    "support_matrix": support_matrix,
    "tested_versions": tested_versions,
    "encoders": encoders,
    "configuration": configuration,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page.

    Raises:
        KeyError: a marker that nothing fills.
        FileNotFoundError: a link to no file.
    """
    markdown = re.sub(r"^\[.*\]\((?:\.\./)+(\S+\.(py|toml))\)$", file, markdown, flags=re.MULTILINE)
    return re.sub(r"\{\{ (\w+) \}\}", lambda marker: MARKERS[marker[1]](), markdown)
