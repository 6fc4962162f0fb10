"""Table 5: a LLaVA-shaped model (SigLIP's tower, Llama's text) trained in two stages, BF16 against FP8.

    stage 1    the projector and the text on scenes, in BF16, the tower frozen
    stage 2    everything (stage 3 of VILA), once an arm, from the same weights

Asked are scenes that no model saw; an answer is right if it is the one word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.arms import ARMS, BASELINE, completions, share, train
from benchmarks.paper.result import Options, Result
from benchmarks.paper.scenes import COLOURS, KINDS, LETTERS, SHAPES, SIDE, Scene, render, write
from benchmarks.paper.training import STEPS_AND_LOSS, curves_of, folder_of, trained, with_gaps
from benchmarks.rows import Row
from overcoat.extras import load_extra
from overcoat.train.process import choose_device

PATCH = 8
IMAGE_TOKENS = (SIDE // PATCH) ** 2
WORDS = (
    *("user", "assistant", "How", "many", "shapes", "are", "there", "What", "colour", "is", "the", "Which", "shape"),
    *("letter", "written", "Is", "left", "or", "right", "of", "above", "below", "1", "2", "3", "4", "?", ":", "\n"),
    *(*COLOURS, *SHAPES, *LETTERS),
)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% if m['role'] == 'assistant' %}{% generation %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    "{% endif %}{{ eos_token }}{% endgeneration %}{% else %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %} {% endif %}{% endfor %}"
)
PROMPT = "user : " + "<image>" * IMAGE_TOKENS + "\n{} assistant : "
# Hidden widths of tower and text, layers, heads; images to train on and to ask; steps of both stages; rows and tokens.
SMALL, FULL = (64, 1, 1, 24, 20, 4, 2, 256), (384, 6, 6, 20_000, 2000, 600, 32, 512)


def build(folder: Path, hidden: int, layers: int, heads: int) -> Path:
    """Random weights, tokenizer and image processor as a folder of transformers."""
    transformers, tokenizers = (
        load_extra(name, "hf", "benchmarks paper table5") for name in ("transformers", "tokenizers")
    )
    vocabulary = {word: place for place, word in enumerate(["<eos>", "<unk>", "<image>", *dict.fromkeys(WORDS)])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    split = tokenizers.pre_tokenizers
    inner.pre_tokenizer = split.Sequence(
        [split.Split(" ", "removed"), split.Split(tokenizers.Regex(r"[?\n]"), "isolated")]
    )
    special = {
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<image>"],
    }
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    pixels = transformers.SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    options = {"patch_size": PATCH, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    processor = transformers.LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, **options)
    sizes = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3 // 16 * 16, "num_hidden_layers": layers}
    text = {**sizes, "num_attention_heads": heads, "vocab_size": len(vocabulary), "model_type": "llama"}
    tower = {**sizes, "num_attention_heads": heads, "image_size": SIDE, "patch_size": PATCH}
    config = transformers.LlavaConfig(
        text_config={**text, "eos_token_id": 0, "bos_token_id": None},
        vision_config={**tower, "model_type": "siglip_vision_model"},
        image_token_index=2, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def answers(export: Path, base: Path, asked: list[Scene]) -> list[bool]:
    """Return flags of the scenes whose questions a trained model answers right."""
    transformers = load_extra("transformers", "hf", "benchmarks paper table5")
    model = transformers.AutoModelForImageTextToText.from_pretrained(export, dtype=torch.bfloat16).eval()
    model.to(choose_device("auto"))
    processor = transformers.AutoProcessor.from_pretrained(base)
    pixels = processor.image_processor(images=[render(each) for each in asked], return_tensors="pt")["pixel_values"]
    prompts = [PROMPT.format(each.question) for each in asked]
    found = completions(model, processor.tokenizer, prompts, 2, 256, pixels.to(model.device, model.dtype))
    return [text.strip() == each.answer for text, each in zip(found, asked, strict=True)]


def table5(options: Options) -> Result:
    """Accuracy by kind of question with standard errors."""
    hidden, layers, heads, many, count, steps, batch, length = SMALL if options.size == "small" else FULL
    rows: list[Row] = []
    with folder_of(options) as folder:
        data = folder / "scenes"
        write(data, "train", many)
        asked = write(data, "test", count)
        base = build(folder / "base", hidden, layers, heads)
        values: dict[str, Any] = {
            "data": {"files": [str(data / "train.jsonl")], "format": "messages", "images": str(data / "images"),
                     "sequence_length": length, "held_out": 0.1 if options.size == "small" else 0.02},
            "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
            "schedule": {"warmup_steps": steps // 10},
            "train": {"steps": steps, "batch_size": batch},
            "eval": {"every": 100},
        }  # fmt: skip
        first = {**values, "model": {"name": str(base), "freeze": ["vision_tower"]}}
        train(first, [*ARMS[BASELINE], f"data.cache_dir={folder / 'tokens'}", *options.set], folder / "stage-1")
        whole = {**values, "model": {"name": str(folder / "stage-1" / "export")}}
        for run_dir, row in trained(options, whole, folder, "stage-2-", settings=["optimizer.lr=5e-4"]):
            right = answers(run_dir / "export", base, asked)
            row["all %"], row["+-"] = share(right)
            for kind in KINDS:
                of_kind = [each for each, made in zip(right, asked, strict=True) if made.kind == kind]
                row[f"{kind} %"], row[f"+- {kind} %"] = share(of_kind)
            rows.append({**row, "kept MB": row["kept_bytes"] / 1e6})
    rows, notes = with_gaps(rows)
    columns = ("held_out_loss", "gap", "all %", "+-", *(f"{kind} %" for kind in KINDS), "kept MB", "tokens_per_second")
    notes = (
        *notes,
        f"{count} scenes that no model saw; both stages in BF16 until the arms part. Chance is 12 to 50%.",
    )
    return Result("Table 5: a vision-language model", columns, rows, notes, curves_of(rows), STEPS_AND_LOSS)
