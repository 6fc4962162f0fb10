"""Images: tokens and labels beside TRL's collator, packed rows, a run: `pytest tests/train/test_images.py`."""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from rich.console import Console

import overcoat
from overcoat import cli
from overcoat.models import masks
from overcoat.models.head import LeanLossModel
from overcoat.train import corpus as corpora
from overcoat.train import tokenizer as tokenizers
from overcoat.train.build import build_model, freeze, summed_loss
from overcoat.train.chat import Encoder
from overcoat.train.config import DataConfig
from overcoat.train.configfile import load_config
from overcoat.train.conversations import examples
from overcoat.train.corpus import open_corpus
from overcoat.train.data import IGNORED, TRAINED, ChatRows, Images, make_batch
from overcoat.train.images import read_image
from overcoat.train.loop import RunStoppedError
from overcoat.train.run import run
from tests.processes import on_two
from tests.train.runs import CPU, MakeConfig, assert_same_run, losses, newest, stop_at
from tests.train.test_chat import TEMPLATES, tokenizer_of, trl, write_jsonl

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320, "max_position_embeddings": 256,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
QWEN = {
    "depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 96, "patch_size": 8, "out_hidden_size": 64,
    "temporal_patch_size": 2,
}  # fmt: skip
CLIP = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "model_type": "clip_vision_model",
}  # fmt: skip
VISION = {
    "Llava": CLIP,
    "Qwen2_5_VL": {**QWEN, "fullatt_block_indexes": [1], "window_size": 32},
    "Qwen3VL": {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
KINDS = list(VISION)


@pytest.fixture(autouse=True, name="_without_videos")
def without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen's processors insist on one for videos, which needs torchvision; images do not."""
    mixin: Any = transformers.ProcessorMixin
    check = mixin.check_argument_for_proper_class
    monkeypatch.setattr(
        mixin,
        "check_argument_for_proper_class",
        lambda self, name, value: type(None) if value is None else check(self, name, value),
    )


def make_processor(kind: str) -> Any:
    """Built offline, with PIL's image processors."""
    name, template = {
        "Llava": ("qwen3", "llava_next_training"),
        "Qwen2_5_VL": ("qwen3", "qwen2_5_vl"),
        "Qwen3VL": ("qwen3", "qwen3_vl_training"),
    }[kind]
    tokenizer = copy.deepcopy(tokenizer_of(name))
    chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    if kind == "Llava":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        side = {"height": 32, "width": 32}
        pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=side)
        options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaProcessor(pixels, tokenizer, chat_template=chat_template, **options)
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    pixels = transformers.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size)
    return getattr(transformers, f"{kind}Processor")(pixels, tokenizer, None, chat_template=chat_template)


def make_model(kind: str, processor: Any) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind}ForConditionalGeneration")
    text = {**TEXT, "model_type": "llama"} if kind == "Llava" else {**TEXT, "rope_parameters": MROPE}
    tokenizer = processor.tokenizer
    ids = {"image_token_id": processor.image_token_id}
    if kind == "Llava":
        ids = {"image_token_index": processor.image_token_id, "vision_feature_layer": -1}
    else:
        ids["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        ids["vision_start_token_id"] = tokenizer.convert_tokens_to_ids("<|vision_start|>")
    return cls(cls.config_class(text_config=text, vision_config=VISION[kind], **ids)).train()


def write_images(folder: Path, count: int = 6) -> None:
    (folder / "images").mkdir()
    generator = np.random.default_rng(0)
    for number in range(count):
        pixels = generator.integers(0, 255, (24 + 8 * number, 64 - 4 * number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"images/{number}.png")


def chats(count: int = 12) -> list[dict[str, Any]]:
    """With one image, with none, and with two, in two turns; in TRL's form."""
    found = []
    for number in range(count):
        files = [f"{number % 6}.png", f"{(number + 1) % 6}.png"][: (1, 0, 2)[number % 3]]
        asked = [{"type": "image"} for _ in files] + [{"type": "text", "text": "what is " * (1 + number % 4)}]
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": "a letter " * (2 + number % 3)}]},
            {"role": "user", "content": [{"type": "text", "text": "follows?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"alpha {number}"}]},
        ]
        found.append({"images": files, "messages": messages})
    return found


def encoded(kind: str, folder: Path, processor: Any) -> tuple[list[np.ndarray], list[list[str]]]:
    write_images(folder)
    file = write_jsonl(folder / "a.jsonl", chats())
    data = DataConfig(files=[str(file)], format="messages", images=str(folder / "images"))
    encoder = Encoder(data, processor.tokenizer, processor)
    found = list(examples(data))
    return [encoder(example, where)[0] for where, example in found], [example["images"] for _, example in found]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_labels_are_those_of_trl(kind: str, tmp_path: Path) -> None:
    processor = make_processor(kind)
    tokens, _ = encoded(kind, tmp_path, processor)
    encoder = Encoder(DataConfig(files=["a"], format="messages", images="a"), processor.tokenizer, processor)
    collate = trl.trainer.sft_trainer.DataCollatorForVisionLanguageModeling(
        processor, assistant_only_loss=True, chat_template=encoder.template
    )
    for mine, row in zip(tokens, chats(), strict=True):
        pictures = [Image.open(tmp_path / "images" / name).convert("RGB") for name in row["images"]]
        batch = collate([{**row, "images": pictures}])
        assert (mine & (TRAINED - 1)).tolist() == batch["input_ids"][0].tolist()
        labels = np.where(mine & TRAINED, mine & (TRAINED - 1), np.int64(IGNORED))
        assert labels.tolist() == batch["labels"][0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_conversations_see_their_own_images_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of packed rows is the sum of the losses that the model itself has for each conversation alone."""
    processor = make_processor(kind)
    tokens, paths = encoded(kind, tmp_path, processor)
    model = make_model(kind, processor)
    ends = np.cumsum([len(each) for each in tokens])
    table = np.stack([ends - [len(each) for each in tokens], ends, np.arange(len(tokens))], axis=1)
    rows = ChatRows(np.concatenate(tokens), table, 400 if kind == "Qwen2_5_VL" else 160, 0, pad=0)
    rows_BT = rows.next_rows(rows.num_rows)
    assert rows.num_rows < len(tokens)
    images = Images(processor, str(tmp_path / "images"), paths)
    batch = images.add_to(make_batch(rows_BT, None, False), rows_BT, model)
    packed = summed_loss(model, batch)
    alone = torch.zeros(())
    for each, files in zip(tokens, paths, strict=True):
        ids = torch.from_numpy((each & (TRAINED - 1)).astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(each & TRAINED != 0)[None], ids, IGNORED)
        opened = [Image.open(tmp_path / "images" / name).convert("RGB") for name in files]
        pixels = processor.image_processor(opened, return_tensors="pt") if files else {}
        kinds = {} if kind == "Llava" else {"mm_token_type_ids": (ids == processor.image_token_id).int()}
        alone += model(input_ids=ids, labels=labels, num_items_in_batch=1, use_cache=False, **pixels, **kinds).loss
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-3)
    overcoat.convert(model, overcoat.Recipe(fp8=False))
    assert isinstance(model, LeanLossModel)
    torch.testing.assert_close(summed_loss(model, batch), alone, rtol=1e-4, atol=1e-3)
    model.zero_grad()
    summed_loss(model, batch).backward()
    lacking = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not [name for name in lacking if "post_layernorm" not in name]  # CLIP's, which LLaVA does not use
    monkeypatch.setattr(masks, "SHORTEST", 1)
    overcoat.convert(model.bfloat16())  # whose layers read where documents begin, and no mask
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "cu_seq_lens_q": batch.document_starts}
    mask = masks.causal_mask(model, inputs)
    assert mask is not None
    assert mask.flatten().tolist() == batch.document_starts.tolist()  # type: ignore[union-attr]
    assert abs(float(summed_loss(model, batch) / alone) - 1) < 0.01


def given_processor(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a tiny model; as loaded, too, where AutoProcessor would look for the one of videos."""
    processor = make_processor(kind)
    if kind != "Llava":
        processor.save_pretrained = processor.tokenizer.save_pretrained
        for module in (tokenizers, corpora):
            monkeypatch.setattr(module, "load_processor", lambda *_: processor)
    return processor


@pytest.fixture
def vision_config(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`vision_config(kind, word, ...)`: a tiny run on chats with images."""

    def make(kind: str, *words: str, folder: Path = tmp_path) -> Any:
        processor = given_processor(kind, monkeypatch)
        processor.save_pretrained(folder / "base")
        if not (folder / "images").exists():
            make_model(kind, processor).save_pretrained(folder / "base")
            write_images(folder)
            write_jsonl(folder / "chats.jsonl", chats(24))
        return make_config(
            "model.config={}", f"model.name={folder}/base", "tokenizer.vocab_size=0", "data.format=messages",
            f"data.files={folder}/chats.jsonl", f"data.images={folder}/images", "data.sequence_length=128",
            "train.steps=6", "checkpoint.every=2", "train.accumulation=2", "train.batch_size=1", "eval.rows=2", *words,
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    "kind", ["Llava", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("Qwen2_5_VL", "Qwen3VL"))]
)
def test_a_run_with_images_stops_and_goes_on_bit_for_bit(
    kind: str, vision_config: Any, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "sample.tokens=4",
        "sample.prompt=what?",
        "model.freeze=vision_tower" if kind == "Llava" else "lora.rank=2",
    )
    (result,) = run(vision_config(kind, *words, f"train.run_dir={tmp_path}/whole"), console)
    assert len(result.sample) > 0
    found = losses(tmp_path / "whole")["train"]
    assert found[6][0] < found[1][0]
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        with pytest.raises(RunStoppedError):
            run(vision_config(kind, *words), console)
    run(vision_config(kind, *words), console)
    if kind != "Llava":
        assert losses(tmp_path / "run") == losses(tmp_path / "whole")
        return
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    exported = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "run/export", dtype=torch.bfloat16)
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[name]) == ("vision_tower" in name), name
    for folder in (tmp_path / "run/export", newest(tmp_path / "run")):
        assert transformers.AutoProcessor.from_pretrained(folder).image_processor is not None


def _run_noting(rank: int, kind: str, config: Any, folder: Path) -> None:
    """A run, and which passes of its training had images."""
    seen: list[bool] = []
    real = Images.add_to

    def add_to(self: Images, batch: Any, rows_BT: np.ndarray, model: Any) -> Any:
        made = real(self, batch, rows_BT, model)
        if model.training:
            seen.append(bool(made.images))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Images, "add_to", add_to)
        without_videos.__wrapped__(patch)  # type: ignore[attr-defined]
        given_processor(kind, patch)
        run(config, Console(quiet=True))
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


WAYS = {
    "frozen": ("Llava", "recipe.name=default model.freeze=vision_tower"),
    "merged": ("Llava", "lora.rank=2 lora.merge=true"),
    "bf16": ("Qwen3VL", "recipe.name=bf16"),
}


def _run_ways(rank: int, configs: dict[str, tuple[Any, Path]]) -> None:
    for name, (config, folder) in configs.items():
        _run_noting(rank, WAYS[name][0], config, folder)


def test_two_processes_learn_from_images_what_one_does(vision_config: Any, tmp_path: Path) -> None:
    """Also in passes in which one of them has an image, and in those where nobody has."""
    configs = {}
    for name, (kind, way) in WAYS.items():
        folder = tmp_path / name
        folder.mkdir()
        words = [*way.split(), "train.steps=8", "data.sequence_length=64", "eval.rows=3", "optimizer.lr=1e-3"]
        make = functools.partial(vision_config, kind, *words, folder=folder)
        make(f"train.run_dir={folder}/one")
        write_jsonl(folder / "chats.jsonl", [row for row in chats(72) if len(row["images"]) < 2])
        _run_noting(0, kind, make(f"train.run_dir={folder}/one"), folder)
        configs[name] = (make(f"train.run_dir={folder}/two"), folder)
    on_two(_run_ways, "cpu", configs)
    for name, (_, folder) in configs.items():
        assert_alike(folder, frozen=name == "frozen")


def assert_alike(folder: Path, frozen: bool) -> None:
    """The runs in one and in two processes."""
    seen = zip(*(json.loads((folder / f"seen-{rank}.json").read_text()) for rank in (0, 1)), strict=True)
    assert {sum(each) for each in seen} == {0, 1, 2}
    mine, theirs = (losses(folder / name) for name in ("two", "one"))
    for key in ("train", "eval"):
        assert mine[key].keys() == theirs[key].keys()
        for step, values in mine[key].items():
            assert values == pytest.approx(theirs[key][step], rel=1e-2), (key, step)
    if frozen:  # a frozen tower keeps nothing for a backward
        kept = (folder / "two" / "kept.txt").read_text()
        assert "multi_modal_projector" in kept
        assert "vision_tower" not in kept
        return
    towers = []
    for place in ("base", "one/export", "two/export"):
        model = transformers.AutoModelForImageTextToText.from_pretrained(folder / place, dtype=torch.float32)
        named = model.state_dict().items()
        towers.append(torch.cat([t.flatten() for name, t in named if "vision_tower" in name or "visual" in name]))
    base, one, two = towers
    assert (two - one).norm() < 0.1 * (one - base.bfloat16().float()).norm()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation: int, tmp_path: Path) -> None:
    """As transformers and `datasets` turn them, and a viewer does."""
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4, 0] = pixels[2:, :, 2] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    for mode in ("RGB", "RGBA", "P"):
        Image.fromarray(pixels).convert(mode).save(tmp_path / "a.png", exif=exif)
        expected = transformers.image_utils.load_image(str(tmp_path / "a.png"))
        assert np.array_equal(read_image(tmp_path / "a.png"), expected)
    assert read_image(tmp_path / "a.png").size == ((8, 4) if orientation < 5 else (4, 8))


def rewrite(tmp_path: Path, row: Any) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [*chats(2), row])


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"images": ["9.png"], "messages": TURNS}, r"cannot read the image .*9\.png \(No such file"),
        ({"images": [3], "messages": TURNS}, r"chats\.jsonl:3: .*an image is a int, not a path"),
        ({"images": ["1.png"], "messages": chats(3)[2]["messages"]}, r"chats\.jsonl:3: .*more image parts than images"),
        ({"images": ["1.png"] * 3, "messages": chats(3)[2]["messages"]}, r"chats\.jsonl:3: .*1 images more than"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}, TURNS[1]]}, r"chats\.jsonl:3: .*'video'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "an <image> "}]}, TURNS[1]]},
            r"chats\.jsonl:3: the text holds <image>, which stands for an image",
        ),
    ],
)
def test_images_that_are_not_there_are_named(row: Any, why: str, vision_config: Any, tmp_path: Path) -> None:
    config = vision_config("Llava")
    rewrite(tmp_path, row)
    with pytest.raises(ValueError, match=why) as caught:
        open_corpus(config, lambda _: None)
    assert "\n" not in str(caught.value)


def test_what_does_not_go_with_images_is_refused(vision_config: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.images = 'a': .*data\.format"):
        make_config("data.images=a")
    with pytest.raises(ValueError, match=r"data\.images = 'a': wants a model\.name"):
        make_config("data.images=a", "data.format=messages")
    with pytest.raises(ValueError, match=r"memory\.report = True: does not go with data\.images"):
        vision_config("Llava", "memory.report=true")
    with pytest.raises(ValueError, match=r"has no parameters of a module 'tower'"):
        freeze(build_model(vision_config("Llava"), None, CPU), ["tower"])
    tokenizer_of("qwen3").save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="has no processor of images"):
        open_corpus(vision_config("Llava", f"tokenizer.name={tmp_path}/text"), lambda _: None)


def test_what_init_writes_of_chats_with_images_trains(
    vision_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the folder in which the images are that its rows name."""
    vision_config("Llava")
    monkeypatch.chdir(tmp_path)
    rewrite(tmp_path, {"images": ["0.png"], "messages": TURNS})
    words = "--model base --data chats.jsonl --seq 128 --rows 4 --steps 2 --gpu-memory 8GB"
    assert cli.main(["init", "new.toml", *words.split()]) == 0
    assert "4 of 4 rows fit 7.45 GiB at once, recipe default, with one image in each" in capsys.readouterr().out
    config = load_config("new.toml")
    assert (config.model.name, config.data.format, config.data.images) == ("base", "messages", "images")
    assert cli.main(["train", "new.toml", "train.device=cpu", "train.tensorboard=false"]) == 0
    (images,) = Path("runs/new/data/tokens").glob("[!.]*/images.json")
    assert sorted(json.loads(images.read_text())) == [[], ["0.png"], ["0.png"]]
    assert Path("runs/new/export/processor_config.json").exists()


def test_a_transformers_that_marks_wrong_tokens_is_refused(
    vision_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """5.17 marks the answer where it was before each image became as many tokens as it has: no tokens are made with it,
    none that are there are used, and none that it may have made."""
    config, made_from = vision_config("Llava"), corpora._made_from
    for tokens in ("none", "before the layout had a number", "new"):
        with monkeypatch.context() as patch:
            # Not the object of `import` at the top.
            patch.setattr(sys.modules["transformers"], "__version__", "5.17.1")
            with pytest.raises(ValueError, match=r"transformers 5\.17\.1 takes the wrong tokens .*transformers>=5\.18"):
                open_corpus(config, lambda _: None)
        with monkeypatch.context() as patch:
            if tokens == "none":
                patch.setattr(corpora, "_made_from", lambda c: made_from(c) | {"image_layout": None})
            open_corpus(config, lambda _: None)
        assert len(list((tmp_path / "run/data/tokens").glob("[!.]*"))) == (1 if tokens == "none" else 2)


def test_an_image_is_never_cut(vision_config: Any, tmp_path: Path) -> None:
    """A conversation that is truncated inside an image, or before its first label, is dropped."""
    corpus = open_corpus(vision_config("Llava", "data.sequence_length=44"), lambda _: None)
    found = re.search(r"(\d+) truncated, (\d+) dropped", corpus.note)
    assert found is not None
    assert all(int(number) for number in found.groups())
    rows = corpus.rows.next_rows(corpus.rows.num_rows)  # type: ignore[union-attr]
    folder = json.loads((next((tmp_path / "run/data/tokens").glob("[!.]*")) / "images.json").read_text())
    assert len(folder) == 24
    ids = make_batch(rows, None, False).input_ids
    token = corpus.images.processor.image_token_id  # type: ignore[union-attr]
    assert int((ids == token).sum()) % 16 == 0
