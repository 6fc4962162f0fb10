"""model.dequantize: plain weights of quantized checkpoints, element for element, and a run that starts from them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import (
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.utils.quantization_config import QuantizationMethod

import overcoat
from overcoat import cli
from overcoat.extras import load_pretrained
from overcoat.models.frozen import FrozenWeight
from overcoat.train.build import build_model, check_config, load_model, make_recipe
from overcoat.train.config import Config
from overcoat.train.configfile import load_config
from overcoat.train.quantized import check_quantized, dequantize
from overcoat.train.quantized_4bit import COMPANIONS, decode
from overcoat.train.run import run_once
from overcoat.train.tokenizer import load_tokenizer, share_of_whole_words, train_tokenizer
from tests.train.runs import CPU, MakeConfig, losses, text_of

SETTINGS = {"dtype": torch.bfloat16, "attn_implementation": None}
# 192 and 320 are no multiples of 128: their last blocks are cut.
SHAPE = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "intermediate_size": 320, "vocab_size": 320}  # fmt: skip
LLAMA = (LlamaForCausalLM, LlamaConfig(**SHAPE))
EXPERTS = {"moe_intermediate_size": 160, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 96}
QWEN = (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **EXPERTS))
OSS = (GptOssForCausalLM, GptOssConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, vocab_size=320, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
))  # fmt: skip

Quantized = tuple[dict[str, Tensor], Tensor]  # the tensors of a file for one weight, and what they mean


def fp8(name: str, weight: Tensor, block: tuple[int, int], scale: str = "_scale_inv", power: bool = False) -> Quantized:
    """E4M3 codes and a scale for each block, one after the other."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    codes, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            limit = weight[place].float().abs().max() / 448
            scales[i, j] = torch.exp2(torch.log2(limit).ceil()) if power else limit
            codes[place] = (weight[place].float() / scales[i, j]).to(codes.dtype)
            values[place] = codes[place].float() * scales[i, j]
    stored = (torch.log2(scales) + 127).to(torch.uint8) if power else scales
    return {name: codes, name + scale: stored}, values


def blocks(name: str, weight: Tensor) -> Quantized:
    return fp8(name, weight, (128, 128))


def powers(name: str, weight: Tensor) -> Quantized:
    return fp8(name, weight, (1, 32), power=True)


def rows(name: str, weight: Tensor) -> Quantized:
    return fp8(name, weight, (1, weight.shape[1]), "_scale")


def whole(name: str, weight: Tensor, scale: str = "_scale") -> Quantized:
    tensors, values = fp8(name, weight, (weight.shape[0], weight.shape[1]), scale)
    return {**tensors, name + scale: tensors[name + scale].reshape(1)}, values


def mxfp4(name: str, weight: Tensor) -> Quantized:
    """Random codes: two E2M1 in a byte, the lower one first; transposed, as gpt-oss has them."""
    experts, inputs, outputs = weight.shape
    codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    powers = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    pairs = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
    values = pairs.reshape(*powers.shape, 32) * torch.exp2(powers.float() - 127)[..., None]
    return {f"{name}_blocks": codes, f"{name}_scales": powers}, values.reshape(experts, outputs, inputs).mT


# Of bitsandbytes 0.50: `NAME.weight` and what `QuantState.as_dict(packed=True)` has beside it, of `quantize_4bit`, and
# `NAME.expected` of `dequantize_4bit`.
BITSANDBYTES = load_file(Path(__file__).parent / "bitsandbytes.safetensors")


def four_bits(name: str, weight: Tensor, kind: str = "nf4", double: bool = False) -> Quantized:
    """Random codes, two in a byte, the higher half first; random maxima of 64, or 8-bit codes of them."""
    codes = torch.randint(0, 16, (weight.numel(),), dtype=torch.uint8)
    table, size = BITSANDBYTES[f"{kind}.single.weight.quant_map"], weight.numel() // 64
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
    stored = {"quant_map": table, "absmax": torch.rand(size)}
    top = stored["absmax"]
    if double:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7}
        nested, table_of_8 = torch.rand(-(-size // 256)), BITSANDBYTES["nf4.double.weight.nested_quant_map"]
        tops = torch.randint(0, 256, (size,), dtype=torch.uint8)
        stored |= {"absmax": tops, "nested_absmax": nested, "nested_quant_map": table_of_8}
        top = table_of_8[tops.long()] * nested[torch.arange(size) // 256] + 0.7
    stored[f"quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    values = (table[codes.long()].view(-1, 64) * top[:, None]).view(weight.shape)
    pairs = (codes[::2] << 4 | codes[1::2])[:, None]
    return {name: pairs, **{f"{name}.{key}": each.clone() for key, each in stored.items()}}, values


def compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
CASES = {
    "fp8": (LLAMA, blocks, FP8),
    "fp8 experts": (QWEN, blocks, FP8),
    "fp8 tensor": (LLAMA, partial(whole, scale="_scale_inv"), {**FP8, "weight_block_size": None}),
    "mxfp8": (LLAMA, powers, {"quant_method": "mxfp8"}),
    "compressed rows": (LLAMA, rows, compressed("channel")),
    "compressed tensor": (QWEN, whole, compressed("tensor")),
    "mxfp4": (OSS, mxfp4, {"quant_method": "mxfp4"}),
    "nf4": (LLAMA, partial(four_bits, double=True), FOUR_BITS),
    "fp4 experts": (QWEN, partial(four_bits, kind="fp4"), FOUR_BITS),
}


def save(
    folder: Path, made: tuple[Any, Any], quantize: Callable[[str, Tensor], Quantized], about: dict[str, Any]
) -> dict[str, Tensor]:
    """Write a quantized checkpoint; return its weights in BF16, under the names of an unquantized one."""
    torch.manual_seed(0)
    made[0](made[1]).bfloat16().save_pretrained(folder)
    stored, expected = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        inner = name.endswith(("gate_up_proj", "down_proj")) if made is OSS else name.endswith("proj.weight")
        tensors, values = quantize(name, tensor) if inner else ({name: tensor}, tensor)
        stored |= {key: each.contiguous() for key, each in tensors.items()}
        expected[name] = values.bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    return expected


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_codes(case: str, tmp_path: Path) -> None:
    """And saved again they are those of a plain checkpoint."""
    made, quantize, about = CASES[case]
    expected = save(tmp_path / "codes", made, quantize, about)
    model = load_model(str(tmp_path / "codes"), CPU, SETTINGS, dequantize=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "plain")
    found = load_file(tmp_path / "plain/model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", ["nf4.double", "nf4.single", "fp4.single"])
def test_4_bit_codes_mean_what_bitsandbytes_says(name: str) -> None:
    """Bit for bit, in its dtype."""
    companions = {
        each: BITSANDBYTES[f"{name}.weight.{each}"] for each in COMPANIONS if f"{name}.weight.{each}" in BITSANDBYTES
    }
    expected = BITSANDBYTES[f"{name}.expected"]
    assert torch.equal(decode(BITSANDBYTES[f"{name}.weight"], companions).to(expected.dtype), expected)


@pytest.mark.parametrize("name", ["weight", "absmax", "nested_absmax", "state"])
@pytest.mark.parametrize("is_long", [False, True])
def test_4_bit_codes_and_scales_that_do_not_fit_are_refused(name: str, is_long: bool) -> None:
    """Scales for other blocks would be taken for theirs, and 8-bit codes for scales."""
    stored, _ = four_bits("weight", torch.zeros(192, 320), double=True)
    stored = {key.removeprefix("weight."): each for key, each in stored.items()}
    if name == "state":  # names no double quantization
        about = json.loads(bytes(stored["quant_state.bitsandbytes__nf4"].tolist()))
        del about["nested_blocksize"]
        stored["quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)
    else:
        stored[name] = torch.cat([stored[name], stored[name][:1]]) if is_long else stored[name][:-1]
    with pytest.raises(ValueError, match=r"bytes of 4-bit codes|scales in torch"):
        decode(stored.pop("weight"), stored)


def test_scales_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="192 x 320 with 2 x 2 scales"):
        dequantize(torch.zeros(192, 320), torch.ones(2, 2), (128, 128))


@pytest.mark.parametrize(
    ("quantize", "about", "missing"),
    [
        (blocks, FP8, ("_scale_inv",)),
        (four_bits, FOUR_BITS, (".quant_state.bitsandbytes__nf4",)),
        (four_bits, FOUR_BITS, (".quant_state.bitsandbytes__nf4", ".absmax", ".quant_map")),
    ],
)
def test_codes_without_scales_are_refused(
    quantize: Any, about: dict[str, Any], missing: tuple[str, ...], tmp_path: Path
) -> None:
    save(tmp_path, LLAMA, quantize, about)
    tensors = load_file(tmp_path / "model.safetensors")
    for end in missing:
        del tensors[f"model.layers.1.mlp.up_proj.weight{end}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"cannot load model.name = '{tmp_path}'"):
        load_model(str(tmp_path), CPU, SETTINGS, dequantize=True)


def test_scales_that_no_configuration_names_are_refused(tmp_path: Path) -> None:
    """Codes would be taken for weights."""
    save(tmp_path, LLAMA, rows, compressed("channel"))
    LLAMA[1].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"k_proj\.weight_scale belongs to quantized weights"):
        load_model(str(tmp_path), CPU, SETTINGS)


@pytest.mark.parametrize(
    ("about", "dequantize", "why"),
    [
        (FP8, False, r"quantized weights \(fp8\).*set model\.dequantize = true"),
        (compressed("channel"), False, r"\(compressed-tensors\).*set model\.dequantize = true"),
        (compressed("group"), True, r"\(compressed-tensors\).*cannot make plain: name the checkpoint"),
        ({**compressed("channel"), "format": "pack-quantized"}, True, "cannot make plain"),
        (FOUR_BITS, False, r"\(bitsandbytes\).*set model\.dequantize = true"),
        ({"quant_method": QuantizationMethod.BITS_AND_BYTES}, False, r"\(bitsandbytes\).*: name the checkpoint"),
        (SimpleNamespace(quant_method=QuantizationMethod.BITS_AND_BYTES), True, r"\(bitsandbytes\).*cannot make plain"),
        ({"quant_method": "gptq"}, True, "cannot make plain"),
        ({"bits": 4}, True, r"\(unknown\).*cannot make plain"),
        (None, True, r"model\.dequantize = true: 'm' has plain weights"),
    ],
)
def test_quantized_weights_are_refused(about: Any, dequantize: bool, why: str) -> None:
    """They take no gradient: only norms and embeddings would be trained."""
    with pytest.raises(ValueError, match=why):
        check_quantized(SimpleNamespace(quantization_config=about), "m", dequantize)


def test_a_gguf_file_is_refused_or_dequantized(tmp_path: Path) -> None:
    """By transformers, which names the package that it misses for most architectures."""
    with pytest.raises(ValueError, match=r"quantized weights \(gguf\).*set model\.dequantize = true"):
        check_quantized(LlamaConfig(), "a/b.gguf", False)
    check_quantized(LlamaConfig(), "a/b.gguf", True)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=rf"cannot load model\.name = '{tmp_path}/m.gguf'"):
        load_pretrained("AutoConfig", "model.name =", f"{tmp_path}/m.gguf", False)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "model.layers": "blk",
    "operator_norm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}  # fmt: skip
KINDS = {str: 8, int: 4, float: 6}  # a string, uint32, float32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: Any) -> bytes:
    if isinstance(value, list):
        return struct.pack("<IQ", KINDS[type(value[0])], len(value)) + b"".join(map(value_of, value))
    return text(value) if isinstance(value, str) else struct.pack("<f" if isinstance(value, float) else "<I", value)


def head_of(facts: dict[str, Any]) -> bytes:
    """The facts of a GGUF file."""
    kinds = {key: 9 if isinstance(value, list) else KINDS[type(value)] for key, value in facts.items()}
    return b"".join([text(key) + struct.pack("<I", kinds[key]) + value_of(value) for key, value in facts.items()])


def save_gguf(file: Path) -> dict[str, Tensor]:
    """Write a small LFM2 of attention layers, matrices in Q8_0, as llama.cpp does; return its weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    kinds = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "block_auto_adjust_ff_dim": False}
    model = Lfm2ForCausalLM(Lfm2Config(**sizes, **kinds, vocab_size=320, tie_word_embeddings=True))
    facts = {
        "general.architecture": "lfm2", "lfm2.context_length": 128, "lfm2.embedding_length": 64,
        "lfm2.feed_forward_length": 96, "lfm2.block_count": 2, "lfm2.attention.head_count": 2,
        "lfm2.attention.head_count_kv": [1, 1], "lfm2.attention.layer_norm_rms_epsilon": 1e-5,
        "lfm2.shortconv.l_cache": 3, "lfm2.rope.freq_base": 1e6, "tokenizer.ggml.tokens": [str(i) for i in range(320)],
    }  # fmt: skip
    head, data, expected = head_of(facts), b"", dict[str, Tensor]()
    weights = {name: each.detach() for name, each in model.named_parameters() if name != "lm_head.weight"}
    for name, weight in weights.items():
        stored, kind = weight.numpy().tobytes(), 0  # F32
        if weight.dim() == 2:
            groups = weight.reshape(-1, 32)
            scales = (groups.abs().amax(1, keepdim=True) / 127).half()
            codes = (groups / scales.float()).round().to(torch.int8)
            weight, kind = (codes * scales.float()).reshape(weight.shape), 8  # Q8_0
            stored = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], 1).numpy().tobytes()
        expected[name] = weight
        for own, other in GGUF_NAMES.items():
            name = name.replace(own, other)
        head += text(name) + struct.pack(f"<I{weight.dim()}Q", weight.dim(), *reversed(weight.shape))
        head += struct.pack("<IQ", kind, len(data))
        data += stored + bytes(-len(stored) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(expected), len(facts)) + head
    file.write_bytes(start + bytes(-len(start) % 32) + data)
    return expected


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-7), (torch.float32, 0.0)])
def test_weights_of_a_gguf_file(dtype: torch.dtype, error: float, tmp_path: Path) -> None:
    """transformers rounds the scales to BF16 first."""
    expected = save_gguf(tmp_path / "small.gguf")
    model = load_model(f"{tmp_path}/small.gguf", CPU, {**SETTINGS, "dtype": dtype}, dequantize=True)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name].float(), weight, rtol=error, atol=0)


@pytest.fixture
def started(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Config]:
    """`started(folder, word, ...)`: a run that starts from a folder in `tmp_path`, whose tokenizer is made here."""
    (tmp_path / "quantized").mkdir()
    train_tokenizer(make_config()).save_pretrained(tmp_path / "quantized")

    def make(folder: str, *words: str) -> Config:
        named = ["model.config={}", f"model.name={tmp_path / folder}", "tokenizer.vocab_size=0"]
        places = [f"tokenizer.name={tmp_path}/quantized", f"train.run_dir={tmp_path}/run-{folder}"]
        return make_config(*named, *places, "train.steps=3", *words)

    return make


def test_a_run_from_codes_is_one_from_their_weights(
    started: Callable[..., Config], console: Console, tmp_path: Path
) -> None:
    """Refused without the key, said with it, and bit for bit the run from a plain checkpoint, which it exports."""
    expected = save(tmp_path / "quantized", LLAMA, blocks, FP8)
    LLAMA[0](LLAMA[1]).bfloat16().save_pretrained(tmp_path / "plain")
    save_file(expected, tmp_path / "plain/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"set model\.dequantize = true"):
        run_once(started("quantized"), console, "refused")
    result = run_once(started("quantized", "model.dequantize=true"), console, "codes")
    run_once(started("plain"), console, "plain")
    assert losses(tmp_path / "run-quantized") == losses(tmp_path / "run-plain")
    assert result.start == f"{tmp_path / 'quantized'}, dequantized to bfloat16"
    assert f"starting from {result.start}" in text_of(console)
    exported = json.loads((tmp_path / "run-quantized/export/config.json").read_text())
    assert "quantization_config" not in exported
    assert exported["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "run-quantized/export/model.safetensors")
    assert tensors.keys() == expected.keys()


def test_a_run_from_a_gguf_file(started: Callable[..., Config], console: Console, tmp_path: Path) -> None:
    save_gguf(tmp_path / "small.gguf")
    with pytest.raises(ValueError, match=r"small\.gguf' has quantized weights \(gguf\).*set model\.dequantize = true"):
        run_once(started("small.gguf"), console, "refused")
    result = run_once(started("small.gguf", "model.dequantize=true"), console, "gguf")
    assert "2 of 2 decoder layers train in FP8" in text_of(console)
    assert json.loads((Path(result.export) / "config.json").read_text())["model_type"] == "lfm2"


def pieces() -> list[str]:
    """The letters, then 40 words after a space, by their beginnings: the short ones first, as merges are found."""
    letters, mixed = "abcdefghij", random.Random(0)
    words = ["\u2581" + "".join(mixed.sample(letters, 5)) for _ in range(40)]
    begun = [word[:length] for length in range(2, 7) for word in words]
    return ["<unk>", "<s>", "</s>", "\u2581", *letters, *dict.fromkeys(begun)]


@pytest.fixture
def file_with_tokenizer(tmp_path: Path) -> str:
    """A GGUF file without tensors, whose tokenizer is SentencePiece's BPE: a token's score is its place."""
    tokens = pieces()
    facts = {
        "general.architecture": "llama", "llama.context_length": 128, "llama.embedding_length": 64,
        "llama.feed_forward_length": 96, "llama.block_count": 2, "llama.attention.head_count": 2,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.scores": [-float(place) for place in range(len(tokens))], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, len(facts)) + head_of(facts)
    (tmp_path / "tokenizer.gguf").write_bytes(start + bytes(-len(start) % 32))
    return f"{tmp_path}/tokenizer.gguf"


def split_words(tokenizer: Any) -> None:
    """As transformers 5.17 does, for which Gemma's scores are logarithms of probabilities."""
    scores = [(piece, -float(place)) for place, piece in enumerate(pieces())]
    tokenizer.backend_tokenizer.model = tokenizers.models.Unigram(scores, unk_id=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (split_words, r"tokenizer\.gguf': 1% of the vocabulary's words are one token\. pip install"),
        (lambda tokenizer: setattr(tokenizer, "add_bos_token", False), r"texts begin with \[\] instead of \[1\]"),
        (lambda tokenizer: setattr(tokenizer, "eos_token", "<s>"), "they end with 1 instead of 2"),
    ],
)
def test_a_misread_gguf_tokenizer_is_refused(
    change: Callable[[Any], None], why: str, file_with_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(file_with_tokenizer)
    assert share_of_whole_words(tokenizer) == 1.0
    change(tokenizer)
    monkeypatch.setattr("overcoat.train.tokenizer.load_pretrained", lambda *_: tokenizer)
    with pytest.raises(ValueError, match=why):
        load_tokenizer(file_with_tokenizer)


def test_init_dequantizes(started: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "quantized", LLAMA, blocks, FP8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words " * 200)
    words = "init new.toml --model quantized --data a.txt --seq 32 --gpu-memory 8GB"
    assert cli.main(words.split()) == 0
    assert load_config("new.toml").model.dequantize


def test_converting_codes_says_that_nothing_trains() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "hidden_size": 128, "intermediate_size": 256}))
    replace_with_fp8_linear(model, quantization_config=FineGrainedFP8Config(), modules_to_not_convert=["lm_head"])
    with pytest.raises(ValueError, match=r"no decoder layer trains in FP8: .*torch\.float8_e4m3fn.*dequantized"):
        overcoat.convert(model, strict=True)


# ---- codes as the frozen base of adapters --------------------------------------------------------------------------

FROZEN = ("recipe.frozen_weights=fp8", "recipe.linear_scaling=block", "lora.rank=4")
WHOLE = (LlamaForCausalLM, LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 384}))
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FUSED = (Phi3ForCausalLM, Phi3Config(**{**SHAPE, "hidden_size": 256, "intermediate_size": 384}, pad_token_id=0))


def even(name: str, weight: Tensor) -> Quantized:
    """Scales of powers of two, largest codes of 448: quantized again, the weights have the same codes and scales."""
    tensors, values = fp8(name, weight, (128, 128), power=True)
    tensors[name][::128, ::128] = 448.0
    return tensors, values


def held(model: Any) -> dict[str, FrozenWeight]:
    return {name: each for name, each in model.named_parameters() if isinstance(each, FrozenWeight)}


class LargestInBF16(TorchDispatchMode):
    """Counts the elements of the largest BF16 tensor that any op returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_flatten(result)[0]:
            if type(each) is Tensor and each.dtype == torch.bfloat16 and not each.is_meta:
                self.size = max(self.size, each.numel())
        return result


@pytest.mark.parametrize(("made", "quantize"), [(WHOLE, blocks), (WHOLE, even), (FUSED, blocks)])
def test_codes_are_taken_as_they_are(
    made: tuple[Any, Any], quantize: Callable[..., Quantized], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = save(tmp_path, made, quantize, FP8)
    stored = load_file(tmp_path / "model.safetensors")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # ops in threads are not seen
    with LargestInBF16() as largest:
        model = load_model(str(tmp_path), CPU, SETTINGS, keep_codes=True)
    found = held(model)
    assert found.keys() == {name for name in expected if name.endswith("proj.weight")}
    for name, weight in found.items():
        assert torch.equal(weight.held.view(torch.uint8), stored[name].view(torch.uint8))
        if quantize is blocks:
            assert torch.equal(weight.decoded(), expected[name])
    # No weight was ever in BF16 but those that are: the embedding is the largest.
    assert largest.size <= 320 * 256 < max(weight.numel() for weight in found.values())
    plain = {name: each for name, each in model.named_parameters() if name not in found}
    assert all(torch.equal(each, expected[name]) for name, each in plain.items() if quantize is blocks)


def test_a_run_on_codes_is_one_on_the_same_codes_made_anew(
    started: Callable[..., Config], console: Console, tmp_path: Path
) -> None:
    save(tmp_path / "quantized", WHOLE, even, FP8)
    for way in ("codes", "weights"):
        words = [*FROZEN, f"train.run_dir={tmp_path}/run-{way}", *["model.dequantize=true"] * (way == "weights")]
        run_once(started("quantized", *words), console, way)
    assert losses(tmp_path / "run-codes") == losses(tmp_path / "run-weights")
    assert text_of(console).count("14 frozen weights held in FP8") == 2


@pytest.mark.parametrize(
    ("made", "held", "why"),
    [
        (LLAMA, 0, "no weight of a converted layer can be held"),  # 192 rows
        (QWEN, 0, "no weight of a converted layer can be held"),
        ((WHOLE[0], LlamaConfig(**{**WHOLE[1].to_dict(), "attention_dropout": 0.1})), 10, "no FP8 GEMM"),  # k, v
        ((WHOLE[0], LlamaConfig(**{**WHOLE[1].to_dict(), "intermediate_size": 320})), 10, "no multiple of 128"),
        ((FUSED[0], Phi3Config(**{**FUSED[1].to_dict(), "rope_parameters": HALF})), 6, "another order"),
    ],
)
def test_what_cannot_stay_codes_is_dequantized_and_named(
    made: tuple[Any, Any], held: int, why: str, started: Callable[..., Config], tmp_path: Path
) -> None:
    save(tmp_path / "quantized", made, blocks, FP8)
    config = started("quantized", *FROZEN)
    model = build_model(config, None)
    if not held:
        with pytest.raises(ValueError, match=why):
            overcoat.convert(model, make_recipe(config.recipe))
        return
    report = overcoat.convert(model, make_recipe(config.recipe))
    assert report.weights[0].startswith(f"{held} frozen weights held in FP8")
    assert why in " ".join(report.weights[1:])
    assert sum(isinstance(each, FrozenWeight) for each in model.parameters()) == held
    assert {each.dtype for each in model.state_dict().values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    "words",
    [
        ("recipe.frozen_weights=fp8", "lora.rank=4"),  # one scale for a stack
        ("lora.rank=4", "recipe.linear_scaling=block"),
        (),
    ],
)
def test_codes_without_what_reads_them_are_refused(
    words: tuple[str, ...], started: Callable[..., Config], tmp_path: Path
) -> None:
    save(tmp_path / "quantized", WHOLE, blocks, FP8)
    with pytest.raises(ValueError, match=r"model\.dequantize = true.*frozen_weights = 'fp8'.*linear_scaling = 'block'"):
        check_config(started("quantized", *words))
    check_config(started("quantized", *FROZEN))
