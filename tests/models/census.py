"""Census of transformers' causal language models: how `convert` takes each kind, built small. Not a test by itself.

    python -m tests.models.census [model_type ...] [--train]

A line a kind: whole, in part or not at all, with the reasons, and how closely its layers agree with their blocks;
--train: also a step in FP8 beside one in BF16.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import overcoat
from overcoat.models.report import Report
from tests.models.zoo import VOCAB, make_batch, trained, unevenly

# By any of the names that configurations have for it.
SIZES: dict[int, tuple[str, ...]] = {
    64: ("hidden_size", "n_embd", "d_model", "embedding_size", "head_dim_total", "dim"),
    96: ("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
    4: ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_key_value_heads"),
    16: ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim", "mamba_head_dim"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "rotary_dim_"),
    VOCAB: ("vocab_size",),
    256: ("max_position_embeddings", "n_positions", "max_seq_len"),
    -4: ("num_experts", "num_local_experts", "n_routed_experts"),
    -2: ("num_experts_per_tok", "moe_topk", "num_experts_per_token"),
}
MOST = 30_000_000  # parameters of a model that this machine builds at once
# What kinds want beside them.
MORE: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_of(model_type: str, **fields: Any) -> Any:
    """Return a small configuration of a kind."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    config = cls(**{**_small(cls()), **MORE.get(model_type, {}), **fields})
    for part in vars(config).values():
        for name, value in _small(part).items() if hasattr(part, "_attn_implementation") else ():
            setattr(part, name, value)
    config._attn_implementation = "sdpa"
    return config


def _small(config: Any) -> dict[str, Any]:
    small = {name: abs(size) for size, names in SIZES.items() for name in names if _is_number(config, name)}
    if hasattr(config, "qk_rope_head_dim") or isinstance(getattr(type(config), "head_dim", None), property):
        small.pop("head_dim", None)
    small |= {name: 0.0 for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    small |= {name: place for place, name in enumerate(TOKENS) if getattr(config, name, None) is not None}
    return small


def _is_number(config: Any, name: str) -> bool:
    value = getattr(config, name, None)
    return isinstance(value, int) and not isinstance(value, bool) and name not in getattr(config, "attribute_map", {})


def build(model_type: str, seed: int = 0, **fields: Any) -> nn.Module:
    """Return a small BF16 model of a kind, with uneven norms and biases."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.manual_seed(seed)
    config = config_of(model_type, **fields)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    try:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, AttributeError):
        module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
        cls = getattr(module, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    except ValueError as error:
        if "attention" not in str(error):
            raise
        config._attn_implementation, count = "eager", 0
    if count > MOST:
        raise ValueError(f"{count / 1e6:.0f} M parameters: not small")
    model = cls(config)
    model = unevenly(model.to(torch.bfloat16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # weights of transformers' 0.02 hide faults of all but norms
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(2)
    return model


def kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def treated(report: Report) -> str:
    """Return what became of the layers."""
    count, total = len(report.converted), len(report.layers)
    return "whole" if count == total else "in part" if count else "left alone"


def decibels(found: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))


def row(model_type: str, train: bool) -> tuple[str, str]:
    """Return what `convert` makes of a kind, and the details."""
    try:
        model = build(model_type)
    except Exception as error:
        return "not built", f"{error!r:.120}"
    inputs = make_batch(length=24)
    try:
        exact = trained(copy.deepcopy(model), {**inputs, "use_cache": False})
    except Exception as error:
        return "fails by itself", f"{error!r:.120}"
    start = time.perf_counter()
    try:
        report = overcoat.convert(model)
    except ValueError as error:
        return "refused", f"{error!s:.160}"
    except Exception as error:
        return "ERROR", f"{error!r:.160}"
    details = [f"{time.perf_counter() - start:.1f} s"]
    worst = [each.decibels for each in report.verified.values()]
    details += [f"{min(worst):.0f} dB"] if worst and None not in worst else ["UNVERIFIED"] if worst else []
    details += list(dict.fromkeys(report.left_alone.values()))
    if report.head is not None and not report.head.converted:
        details.append(f"head: {report.head.detail}")
    if train and report.converted:
        details.append(_trained(model, inputs, exact, report))
    return treated(report), "; ".join(details)


def _trained(model: nn.Module, inputs: dict[str, Any], exact: dict[str, Tensor], report: Report) -> str:
    try:
        found = trained(model, inputs)
    except Exception as error:
        return f"TRAIN {error!r:.160}"
    ran = Counter(report.running().values())
    missing = exact.keys() ^ found.keys()
    error = abs(float(found.pop("loss") - exact["loss"]))
    grads = [(decibels(x.float(), exact[name].float()), name) for name, x in found.items() if name in exact]
    return f"loss +-{error:.4f}, worst gradient {min(grads)[0]:.1f} dB {min(grads)[1]} {missing or ''} {dict(ran)}"


def census(chosen: list[str], train: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, treatment, details)."""
    logging.disable(logging.WARNING)
    for kind in chosen:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield kind, *row(kind, train)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for kind, treatment, details in census(options.kinds or kinds(), options.train):
        counts[treatment] += 1
        print(f"{kind:26s} {treatment:16s} {details}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
