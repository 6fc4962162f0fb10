"""`overcoat export`: write a model for an inference engine, in FP8 or BF16.

    overcoat export runs/chat                              runs/chat/export-fp8, as vLLM and transformers read it
    overcoat export runs/chat --evaluate held-out.txt      and its perplexity beside BF16's
    overcoat export runs/chat/checkpoints/step-00000200 --format bf16 --output step-200

A TARGET is a run directory (its export/, else its newest checkpoint), a checkpoint, an exported folder, or a Hugging
Face name. FP8 is E4M3 with a scale for each block of 128 x 128 weights, made of the BF16-rounded weights; embeddings,
lm_head, norms, routers and vision towers stay in BF16. The whole model is read into memory, once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overcoat.eval.command import WINDOW, Target, documents_of, find_target, load_target_model
from overcoat.extras import load_extra, load_pretrained
from overcoat.models.dummy_batch import sees
from overcoat.models.fp8_weights import BLOCKS, SCALE, fp8_state_dict, quantization_config
from overcoat.models.linear_layers import ROUTERS
from overcoat.train.build import load_model
from overcoat.train.config import require
from overcoat.train.evaluate import perplexity
from overcoat.train.export import FILE_BYTES, write_model
from overcoat.train.files import MANIFEST, write_directory, writing
from overcoat.train.products import compute_in_fp32
from overcoat.train.stopping import stop_at, turn_end_of
from overcoat.train.tokenizer import load_processor, load_tokenizer

FORMATS = ("fp8", "bf16")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="TARGET", help="run, checkpoint, exported folder or hub name")
    parser.add_argument("--format", choices=FORMATS, default="fp8", help="of the weights (default fp8)")
    parser.add_argument("--output", metavar="DIR", help="the folder to write (default: RUN/export-FORMAT)")
    parser.add_argument("--block", type=int, choices=BLOCKS, default=128, help="side of a scale's block (default 128)")
    parser.add_argument("--evaluate", metavar="FILE", help="text, JSONL or parquet: print perplexity before and after")
    parser.add_argument("--batch", type=int, default=8, help="rows of --evaluate at once (default 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that a model brings")
    parser.set_defaults(function=run)


def run(parsed: argparse.Namespace) -> int:
    """Export, after checking what can be checked before the model is loaded."""
    load_extra("safetensors", "hf", "overcoat export")
    require(parsed.batch >= 1, f"--batch {parsed.batch}: must be at least 1")
    device = torch.device(parsed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    require(device.type == "cpu" or torch.cuda.is_available(), "--device cuda: PyTorch sees no CUDA GPU here")
    target = find_target(parsed.target)
    require(
        not target.holds_adapters,
        f"{target.name} holds adapters without their model: run the training command again with lora.merge=true, or "
        "save the result of merge_and_unload()",
    )
    folder = _output_folder(parsed, target)
    kind = load_pretrained("AutoConfig", "the model", target.place, parsed.trust_remote_code)
    is_quantized = bool(getattr(kind, "quantization_config", None))
    require(not is_quantized, f"{target.name} has quantized weights already: name the model that they were made from")
    with contextlib.redirect_stdout(sys.stderr):  # for notices of libraries
        saved = _tokenizer_of(target, sees(kind), parsed.trust_remote_code)
        require(saved is not None or not parsed.evaluate, f"--evaluate: {target.name} has no tokenizer")
        documents = documents_of("--evaluate", parsed.evaluate) if parsed.evaluate else []
        model = load_target_model(target, device, parsed.trust_remote_code)
        before = _perplexity(model, saved, documents, parsed.batch)
        summary = _export(model, saved, folder, target, parsed)
        del model
        gc.collect()
        after = _perplexity(_read_back(folder, device, parsed), saved, documents, parsed.batch) if documents else 0.0
    print(summary)
    if documents:
        change = f"{before:.4f} before, {after:.4f} as transformers reads it ({after / before - 1:+.2%})"
        print(f"perplexity of {parsed.evaluate}: {change}")
    return 0


def _read_back(folder: Path, device: torch.device, parsed: argparse.Namespace) -> Any:
    """Return the exported model in BF16; FP8 weights are decoded by transformers."""
    settings: dict[str, Any] = {"dtype": torch.bfloat16}
    if parsed.format == "fp8":
        decoded = load_extra("transformers", "hf", "--evaluate").FineGrainedFP8Config(dequantize=True)
        settings["quantization_config"] = decoded
    return load_model(str(folder), device, settings, parsed.trust_remote_code, "the export").eval()


def _output_folder(parsed: argparse.Namespace, target: Target) -> Path:
    """Return the folder to write. ValueError: none is known, or it holds what no export wrote."""
    run = Path(target.name)
    run = run.parent if run.name == "export" else run
    is_run = (run / "config.toml").exists()
    require(is_run or parsed.output, f"{target.name} is not a run: name the folder to write with --output DIR")
    folder = Path(parsed.output) if parsed.output else run / f"export-{parsed.format}"
    is_ours = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if (folder / MANIFEST).is_file():
        is_ours = "export" in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    require(is_ours, f"--output {folder} holds what no export wrote: name a new folder")
    return folder


def _tokenizer_of(target: Target, sees_images: bool, trust_remote_code: bool) -> Any | None:
    """Return the target's tokenizer, or processor of images; None where a run had none."""
    folder = Path(target.place)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZERS):
        return None
    if sees_images:
        return load_processor(target.place, trust_remote_code)
    return load_tokenizer(target.place, trust_remote_code)


def _perplexity(model: Any, saved: Any, documents: list[str], rows: int) -> float:
    if not documents:
        return 0.0
    if model.device.type == "cpu":
        compute_in_fp32()
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    window = min(most, WINDOW)
    return perplexity(model, getattr(saved, "tokenizer", saved), documents, window, window, rows)["perplexity"]


def _export(model: Any, saved: Any, folder: Path, target: Target, parsed: argparse.Namespace) -> str:
    """Write `folder`, and return a line about it."""
    end = None if saved is None else turn_end_of(getattr(saved, "tokenizer", saved))
    stop_at(model, [] if end is None else [end])
    own = model.dtype
    for parameter in model.parameters():
        if parameter.dtype == own:  # transformers keeps some in FP32
            parameter.data = parameter.data.to(torch.bfloat16)
    summary = ["in BF16"]

    def fill(partial: Path) -> None:
        if parsed.format == "fp8":
            summary[0] = write_fp8(model, saved, partial, parsed.block)
        else:
            write_model(model, saved, partial)

    write_directory(folder, fill, {"export": parsed.format, "source": target.place})
    return f"{folder}: {summary[0]}"


def write_fp8(model: Any, saved: Any | None, folder: Path, block: int) -> str:
    """Write a model's files with block-scaled FP8 weights, and return a line that says what they hold."""
    write_model(model, saved, folder, {})  # all but the weights
    held, size, total, files = dict[str, Tensor](), 0, 0, list[list[str]]()
    count, left, reason = 0, dict[str, None](), ""
    for name, tensor in fp8_state_dict(model, block):
        if name.endswith(SCALE):  # in the file of its codes
            count += 1
        elif size + tensor.nbytes > FILE_BYTES and held:
            files.append(_write_part(folder, len(files), held))
            held, size = {}, 0
        if tensor.dim() > 1 and tensor.itemsize == 2:
            module = name.rpartition(".")[0]
            left[module] = None
            if module.rpartition(".")[2] not in ROUTERS and any(size % block for size in tensor.shape[-2:]):
                reason = f" (FP8 needs sides that are multiples of {block})"
        held[name], size, total = tensor.cpu(), size + tensor.nbytes, total + tensor.nbytes
    files.append(_write_part(folder, len(files), held))
    _write_index(folder, files, total)
    left |= {name: None for name, module in model.named_modules() if module is model.get_output_embeddings()}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(block, list(left))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    kinds = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in left)
    return f"{count} weights in FP8, {total / 2**30:.2f} GiB; in BF16 are {', '.join(kinds)}{reason}"


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    from safetensors.torch import save_file

    path = folder / _part(number)
    with writing(path):
        save_file(tensors, path, {"format": "pt"})
    return list(tensors)


def _part(number: int) -> str:
    return f"part-{number + 1:05d}.safetensors"


def _write_index(folder: Path, files: list[list[str]], total: int) -> None:
    """Rename the parts, whose number is known now, to the hub's names, and write their index."""
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    names = ["model.safetensors"] if len(files) == 1 else names
    for number, name in enumerate(names):
        (folder / _part(number)).rename(folder / name)
    weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
