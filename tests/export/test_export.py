"""`overcoat export` and `fp8_state_dict`, read back by transformers: `pytest tests/export`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from transformers import AutoTokenizer, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import overcoat
from overcoat import cli
from overcoat.export import command
from overcoat.export.command import write_fp8
from overcoat.formats import Quantized, dequantize_blocks, quantize_blocks
from overcoat.models.fp8_weights import SCALE
from overcoat.models.frozen import FrozenWeight
from overcoat.train.checkpoint import load_model
from overcoat.train.files import RECORD, verify_directory
from tests.eval.conftest import sentences
from tests.eval.test_command import write_weights
from tests.models import test_vision_language
from tests.models.zoo import make_model
from tests.processes import on_two

Capture = pytest.CaptureFixture[str]
MOE = "block_sparse_moe"
LINEARS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def exported(place: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files."""
    found = dict[str, torch.Tensor]()
    for path in sorted(place.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def not_converted(place: Path) -> list[str]:
    return json.loads((place / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]


def model_of(kind: str) -> Any:
    if kind == "qwen3_vl":
        return test_vision_language.make_model("Qwen3VL", **dict.fromkeys(("hidden_size", "intermediate_size"), 128))
    return make_model(kind, layers=2, intermediate_size=384)


@pytest.mark.parametrize(
    ("kind", "in_fp8", "left"),
    [
        ("llama", LINEARS, []),
        ("qwen2", LINEARS, []),  # biases
        ("starcoder2", [*LINEARS[:4], "mlp.c_fc", "mlp.c_proj"], []),  # a tied head
        ("mixtral", [*LINEARS[:4], *(f"{MOE}.experts.*.w{n}" for n in (1, 2, 3))], [f"{MOE}.gate"]),
        ("gpt_oss", LINEARS[:4], ["mlp.experts", "mlp.router"]),  # stacked on the hub, with biases
    ],
)  # fmt: skip
def test_transformers_reads_back_what_is_written(
    kind: str, in_fp8: list[str], left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "FILE_BYTES", 10**6)
    model = model_of(kind)
    write_fp8(model, None, tmp_path, 128)
    tensors = exported(tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    scaled = {name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    pattern = re.compile(r"model\.layers\.\d+\.(.*)\.weight")
    assert {re.sub(r"\.\d+\.", ".*.", pattern.fullmatch(name)[1]) for name in scaled} == set(in_fp8)
    found = {name.partition("layers.0.")[2] for name in not_converted(tmp_path) if ".0." in name}
    assert found == set(left)
    assert {tensors[name].dtype for name in scaled} == {torch.float8_e4m3fn}
    assert {each.dtype for name, each in tensors.items() if name not in scaled and SCALE not in name} == {
        torch.bfloat16
    }

    settings = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": torch.bfloat16}
    read, info = type(model).from_pretrained(tmp_path, output_loading_info=True, **settings)
    assert not any(info.values())
    for name, weight in model.state_dict().items():
        matrices = weight if weight.dim() == 3 else [weight]
        is_fp8 = name in scaled or (kind == "mixtral" and weight.dim() == 3)
        if is_fp8:  # of gate and up, stacked, no block holds both
            decoded = [dequantize_blocks(quantize_blocks(each, (128, 128)), (128, 128)).bfloat16() for each in matrices]
            weight = torch.stack(decoded) if weight.dim() == 3 else decoded[0]
        assert torch.equal(read.state_dict()[name], weight), name


@pytest.mark.parametrize("kind", ["llama", "qwen3_vl", "gpt_oss"])
def test_transformers_makes_fp8_layers_where_weights_are_fp8(kind: str, tmp_path: Path) -> None:
    """What a GPU would load: parameters of the same names and shapes, none more."""
    model = model_of(kind)
    write_fp8(model, None, tmp_path, 128)
    tensors, names = exported(tmp_path), not_converted(tmp_path)
    with torch.device("meta"):
        made: Any = replace_with_fp8_linear(type(model)(model.config), names, FineGrainedFP8Config())
    scales = {name: each.shape for name, each in made.named_parameters() if name.endswith(SCALE)}
    assert scales == {name: each.shape for name, each in tensors.items() if name.endswith(SCALE)}
    assert scales


def test_the_function_yields_what_the_files_hold(tmp_path: Path) -> None:
    model = model_of("mixtral")
    write_fp8(model, None, tmp_path, 128)
    overcoat.convert(model.train())
    tensors, found = exported(tmp_path), dict(overcoat.fp8_state_dict(model))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)) for name, each in tensors.items())
    dtypes = {name: each.dtype for name, each in found.items()}
    wide = dict(overcoat.fp8_state_dict(model.float()))
    assert {name: each.dtype for name, each in wide.items()} == dtypes
    assert all(torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)) for name, each in wide.items())


@pytest.mark.parametrize(
    ("sizes", "block", "in_fp8"),
    [
        ({"num_key_value_heads": 1}, 128, LINEARS[4:]),  # q, k and v are one stack, and o_proj's input is as wide
        ({"num_key_value_heads": 1}, 64, LINEARS),
        ({"intermediate_size": 192}, 128, LINEARS[:4]),
        ({"intermediate_size": 192, "num_key_value_heads": 1}, 128, []),
        ({"intermediate_size": 200, "hidden_size": 232, "head_dim": 16}, 64, []),
    ],
)
def test_weights_that_no_block_divides_stay_in_bf16(sizes: dict[str, int], block: int, in_fp8: list[str]) -> None:
    model = make_model("llama", layers=1, **{"intermediate_size": 384, **sizes})
    if not in_fp8:
        with pytest.raises(ValueError, match=f"multiples of {block}"):
            overcoat.fp8_state_dict(model, block)
        return
    found = dict(overcoat.fp8_state_dict(model, block))
    assert {name for name in found if name.endswith(SCALE)} == {
        f"model.layers.0.{name}.weight{SCALE}" for name in in_fp8
    }
    for name in in_fp8:
        codes, scale = (found[f"model.layers.0.{name}.weight{end}"] for end in ("", SCALE))
        weight = dequantize_blocks(Quantized(codes, scale), (block, block))
        torch.testing.assert_close(
            weight, model.get_submodule(f"model.layers.0.{name}").weight.float(), rtol=0.07, atol=1e-4
        )


def test_what_cannot_be_written_is_refused() -> None:
    peft: Any = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="block = 32"):
        overcoat.fp8_state_dict(model_of("llama"), 32)
    with pytest.raises(ValueError, match="not a transformers model"):
        overcoat.fp8_state_dict(torch.nn.Linear(128, 128))
    adapted = peft.get_peft_model(model_of("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(ValueError, match="merge_and_unload"):
        overcoat.fp8_state_dict(adapted)
    assert any(name.endswith(SCALE) for name, _ in overcoat.fp8_state_dict(adapted.merge_and_unload()))


def test_weights_that_are_held_in_fp8_are_decoded_first() -> None:
    model = model_of("llama").train().requires_grad_(False)
    overcoat.convert(model, overcoat.Recipe(linear_scaling="block", frozen_weights="fp8"))
    name, weight = next((n, each) for n, each in model.named_parameters() if isinstance(each, FrozenWeight))
    found = dict(overcoat.fp8_state_dict(model))
    assert {type(each) for each in found.values()} == {torch.Tensor}
    codes, scale = quantize_blocks(weight.decoded(), (128, 128))
    assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found[name + SCALE], scale)


def _sharded(rank: int, place: str) -> None:
    model: Any = model_of("mixtral")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = {name: tensor.view(torch.uint8) for name, tensor in overcoat.fp8_state_dict(model)}
    torch.save(found, Path(place) / str(rank))


def test_processes_of_a_sharded_model_get_the_whole(tmp_path: Path) -> None:
    on_two(_sharded, "cpu", str(tmp_path))
    expected = dict(overcoat.fp8_state_dict(model_of("mixtral")))
    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each.view(torch.uint8)) for name, each in expected.items())


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(folder: Path, tmp_path: Path) -> Path:
    """A run with a checkpoint, whose chat template ends a turn with a token of its own."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    model = command.load_model(str(folder), torch.device("cpu"), {"dtype": torch.bfloat16})
    model.save_pretrained(checkpoint, state_dict={})
    tokenizer.save_pretrained(checkpoint)
    write_weights(checkpoint, model)
    (tmp_path / "run" / "config.toml").touch()
    return tmp_path / "run"


def test_a_run_is_exported_and_evaluated(run_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (text := tmp_path / "held.txt").write_text("\n".join(sentences(20, seed=3)))
    for _ in range(2):  # the second one replaces the first
        assert cli.main(["export", str(run_folder), "--evaluate", str(text), "--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()[-2:]
    target = run_folder / "export-fp8"
    assert said[0].startswith(f"{target}: 14 weights in FP8")
    before, after = map(float, re.findall(r"\d+\.\d{4}", said[1]))
    assert after == pytest.approx(before, rel=0.1)
    assert after != before
    assert cli.main(["eval", str(target), "--text", str(text), "--device", "cpu", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert f"{result['text'][str(text)]['perplexity']:.4f}" == f"{after:.4f}"
    assert verify_directory(target)["export"] == "fp8"
    end = AutoTokenizer.from_pretrained(target).convert_tokens_to_ids("<|end|>")
    assert end in json.loads((target / "generation_config.json").read_text())["eos_token_id"]


def test_a_checkpoint_becomes_a_folder_in_bf16(run_folder: Path, tmp_path: Path) -> None:
    (checkpoint,) = (run_folder / "checkpoints").iterdir()
    assert (checkpoint / RECORD).exists()
    assert cli.main(["export", str(checkpoint), "--format", "bf16", "--output", str(tmp_path / "plain")]) == 0
    read = command.load_model(str(tmp_path / "plain"), torch.device("cpu"), {"dtype": "auto"})
    expected = load_model(checkpoint).state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in read.state_dict().items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{checkpoint}"], "--output DIR"),
        (["{run}", "--output", "{checkpoint}"], "no export wrote"),
        (["{run}", "--output", "{run}"], "no export wrote"),
        (["{run}", "--batch", "0"], "--batch 0"),
        (["{run}", "--evaluate", "nothing.txt"], "--evaluate nothing.txt: no files"),
        (["{fp8}", "--output", "{run}/again"], "quantized weights already"),
    ],
)
def test_the_command_refuses(words: list[str], said: str, run_folder: Path, tmp_path: Path, capsys: Capture) -> None:
    places = {"run": run_folder, "checkpoint": run_folder / "checkpoints" / "step-00000002", "fp8": tmp_path / "fp8"}
    if words[0] == "{fp8}":
        assert cli.main(["export", str(run_folder), "--output", str(places["fp8"])]) == 0
    assert cli.main(["export", *(word.format(**places) for word in words)]) == 2
    assert said in capsys.readouterr().err
