"""A training run in FP64, from its formulas. Nothing of the project is imported: a mistake there is not repeated here.

A Llama in PyTorch's own functions, torch.optim.AdamW, the clip g * min(1, c / |g|), the schedules, and the rows: files
tokenized one by one with the run's tokenizer.json, held out by the smallest CRC-32 of their text, packed in the order
that (seed, epoch) gives.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

Weights = dict[str, Tensor]
SIZES = 64, 96, 320  # hidden, intermediate, vocabulary


@dataclass(frozen=True)
class Options:
    """What decides the numbers of a run."""

    layers: int = 1
    heads: int = 2
    kv_heads: int = 1
    length: int = 16
    steps: int = 6
    batch: int = 2
    accumulation: int = 1
    seed: int = 0
    mask: bool = False
    held_out: float = 0.2
    eval_rows: int = 4
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0
    kind: str = "cosine"
    warmup: int = 1
    final: float = 0.1


# ---- data -----------------------------------------------------------------------------------------------------------


def lost_text(tokenizer: Tokenizer, eos: int, stored: list[list[int]], texts: list[str]) -> str:
    """Describe how stored documents differ from the texts' own tokens, "" if in nothing but order."""
    wanted = [[*tokenizer.encode(text, add_special_tokens=False).ids, eos] for text in texts]
    unread = [text for text, ids in zip(texts, wanted) if tokenizer.decode(ids[:-1]) != text]
    if unread:
        return f"the tokenizer does not give back {unread[0][:60]!r}"
    missing, more = [ids for ids in wanted if ids not in stored], [ids for ids in stored if ids not in wanted]
    if missing or more or len(stored) != len(wanted):
        example = tokenizer.decode((missing or more or [[]])[0])[:60]
        return f"{len(stored)} documents for {len(wanted)} texts, {len(missing)} lost, {len(more)} others: {example!r}"
    return ""


def documents(tokens: np.ndarray, eos: int) -> list[list[int]]:
    """The documents of a stream of tokens, each with its EOS."""
    ends = np.flatnonzero(tokens == eos) + 1
    return [part.tolist() for part in np.split(tokens, ends) if len(part)]


def split(documents: list[list[int]], texts: list[str], options: Options) -> tuple[list[list[int]], list[list[int]]]:
    """Documents to train on and held-out ones; `texts` in the documents' order. Held out are those with the smallest
    CRC-32 of the text until they have the share of the tokens, and a row."""
    wanted = max(options.held_out * sum(map(len, documents)), options.length + 1)
    held, count = set[int](), 0
    for index in sorted(range(len(texts)), key=lambda index: zlib.crc32(texts[index].encode())):
        if count < wanted:
            held.add(index)
            count += len(documents[index])
    assert count <= 2 * wanted, "a large document would be cut: not in this reference"
    return [d for i, d in enumerate(documents) if i not in held], [d for i, d in enumerate(documents) if i in held]


def cut(documents: list[list[int]], length: int) -> np.ndarray:
    """Rows of `length` inputs and one label more, (R, T + 1)."""
    stream = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in documents])
    return np.stack([stream[at : at + length + 1] for at in range(0, len(stream) - length, length)])


def endless_rows(documents: list[list[int]], options: Options) -> Iterator[np.ndarray]:
    """Rows in the order of each epoch."""
    epoch = 0
    while True:
        generator = np.random.default_rng([options.seed, epoch])
        rows = cut([documents[index] for index in generator.permutation(len(documents))], options.length)
        yield from rows[generator.permutation(len(rows))]
        epoch += 1


# ---- model ----------------------------------------------------------------------------------------------------------


def begin(options: Options, tied: bool, seed: int) -> Weights:
    """Random weights of BF16's values in FP32, named as transformers names them."""
    generator, (width, inner, vocab) = torch.Generator().manual_seed(seed), SIZES
    head = width // options.heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, width), "model.norm": (width,)}
    for layer in range(options.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (options.kv_heads * head, width),
            "self_attn.v_proj": (options.kv_heads * head, width), "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
        }.items()}  # fmt: skip
    if not tied:
        shapes["lm_head"] = (vocab, width)
    return {
        f"{name}.weight": ((len(shape) == 1) + 0.1 * torch.randn(shape, generator=generator)).bfloat16().float()
        for name, shape in shapes.items()
    }


def write_model(folder: Path, weights: Weights, options: Options) -> None:
    """A folder that transformers reads as a Llama."""
    folder.mkdir()
    width, inner, vocab = SIZES
    about = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": options.layers, "num_attention_heads": options.heads, "vocab_size": vocab,
        "num_key_value_heads": options.kv_heads, "tie_word_embeddings": "lm_head.weight" not in weights,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of (B, H, T, D), theta 10,000."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), rates)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def summed_loss(w: Weights, rows: np.ndarray, eos: int, options: Options) -> tuple[Tensor, int]:
    """The sum of -log p over the labels of rows (B, T + 1), and how many labels. Rotary scores depend on distances
    alone, so that documents in a row need no positions of their own."""
    inputs, labels = (torch.from_numpy(part.copy()) for part in (rows[:, :-1], rows[:, 1:]))
    shape = (len(rows), options.length, -1, w["model.embed_tokens.weight"].shape[1] // options.heads)
    visible = torch.ones(options.length, options.length, dtype=torch.bool).tril()[None, None]
    if options.mask:
        ended = inputs == eos
        labels = labels.masked_fill(ended, -100)
        number = ended.cumsum(1) - ended.long()
        visible = visible & (number[:, None, :, None] == number[:, None, None, :])
    x = F.embedding(inputs, w["model.embed_tokens.weight"])
    for layer in range(options.layers):

        def part(name: str, layer: int = layer) -> Tensor:
            return w[f"model.layers.{layer}.{name}.weight"]

        h = norm(x, part("input_layernorm"))
        q, k, v = (F.linear(h, part(f"self_attn.{name}_proj")).view(shape).transpose(1, 2) for name in "qkv")
        share = options.heads // options.kv_heads
        k, v = (y.repeat_interleave(share, 1) for y in (rotate(k), v))
        scores = (rotate(q) @ k.mT / math.sqrt(shape[-1])).masked_fill(~visible, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, part("self_attn.o_proj"))
        h = norm(x, part("post_attention_layernorm"))
        gated = F.silu(F.linear(h, part("mlp.gate_proj"))) * F.linear(h, part("mlp.up_proj"))
        x = x + F.linear(gated, part("mlp.down_proj"))
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    logits = F.linear(norm(x, w["model.norm.weight"]), head).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), int((labels != -100).sum())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


# ---- training -------------------------------------------------------------------------------------------------------


def learning_rate(options: Options, step: int) -> float:
    """Of step 0, 1, ...: a warm-up that ends at the peak, then the schedule towards `final` at the last step + 1."""
    warmup, final, steps = options.warmup, options.final, options.steps
    if step < warmup:
        return options.lr * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    if options.kind == "wsd":
        tail = min(max(1, steps // 5), steps - warmup)
        done = max(0.0, (step - (steps - tail)) / tail)
    shares = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return options.lr * (
        1.0 if options.kind == "constant" else final + (1 - final) * shares.get(options.kind, 1 - done)
    )


def train(begin: Weights, training: list[list[int]], held_out: list[list[int]], eos: int, options: Options) -> Any:
    """{"lr", "loss", "norm": a number a step, "held_out": the loss at the end, "weights"}."""
    w = {name: tensor.double().requires_grad_() for name, tensor in begin.items()}
    matrices, vectors = ([p for p in w.values() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": options.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps)
    rows, found = endless_rows(training, options), {"lr": [], "loss": [], "norm": []}
    for step in range(options.steps):
        batch = np.stack([next(rows) for _ in range(options.batch * options.accumulation)])
        total, count = summed_loss(w, batch, eos, options)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        length = math.sqrt(sum(float(p.grad.square().sum()) for p in w.values()))
        for p in w.values():
            p.grad *= min(1.0, options.clip / length) if options.clip else 1.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        for key, value in (("lr", learning_rate(options, step)), ("loss", loss.item()), ("norm", length)):
            found[key].append(value)
    with torch.no_grad():
        total, count = summed_loss(w, cut(held_out, options.length)[: options.eval_rows], eos, options)
    return {**found, "held_out": float(total) / count, "weights": {name: p.detach() for name, p in w.items()}}
