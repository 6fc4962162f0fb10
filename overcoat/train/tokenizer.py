"""The tokenizer: a named one, the model's own, or a byte-level BPE trained on the corpus.

A byte-level BPE has no unknown token: its alphabet is the 256 bytes, merged by frequency until
`tokenizer.vocab_size`. One special token, `<|endoftext|>`, ends every document in a packed row, begins
generation, and pads. How text is encoded is in encoding.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overcoat.extras import GGUF, load_extra, load_pretrained
from overcoat.train import conversations
from overcoat.train.adapters import tokenizer_of
from overcoat.train.config import Config, error_context
from overcoat.train.encoding import edges
from overcoat.train.rows import encoded_size
from overcoat.train.sources import documents
from overcoat.train.vocabulary import add_tokens

END_OF_TEXT = "<|endoftext|>"


def tokenizer_name(config: Config) -> str:
    """Return the name of the tokenizer to load: tokenizer.name, else the model's; "" if one is trained, or none is
    given."""
    return config.tokenizer.name or (tokenizer_of(config) if not config.tokenizer.vocab_size else "")


def make_tokenizer(config: Config) -> Any | None:
    """Return the transformers tokenizer of this run; None for token binaries without one. ValueError: none is
    configured."""
    name = tokenizer_name(config)
    if not name and config.data.is_tokens:
        return None
    if not name and not config.tokenizer.vocab_size:
        raise ValueError("no tokenizer: set tokenizer.vocab_size (train one on the data) or tokenizer.name")
    tokenizer = load_tokenizer(name, config.model.trust_remote_code) if name else train_tokenizer(config)
    add_tokens(tokenizer, config.tokenizer.add_tokens)
    tokenizer.split_special_tokens = config.data.special_tokens == "text"
    set_chat_template(tokenizer, config.tokenizer.chat_template)
    return tokenizer


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set the chat template of a tokenizer or processor. template: a file, a tokenizer's name, or "" to leave it."""
    if template:
        text = read_chat_template(template)
        with error_context("tokenizer.chat_template: no file, and "):
            tokenizer.chat_template = load_tokenizer(template).chat_template if text is None else text
    if isinstance(tokenizer.chat_template, str):  # of a folder too
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")


def read_chat_template(template: str) -> str | None:
    """Return the text of a chat template's file; None if there is no such file."""
    if not os.path.isfile(template):  # unlike Path.is_file, also of what can be no path
        return None
    with error_context(f"tokenizer.chat_template = {template!r}: not UTF-8: ", UnicodeDecodeError):
        return Path(template).read_text(encoding="utf-8-sig")


def make_processor(config: Config) -> Any:
    """Return the image processor of this run, including its tokenizer."""
    processor = load_processor(tokenizer_name(config), config.model.trust_remote_code)
    add_tokens(processor.tokenizer, config.tokenizer.add_tokens)
    processor.tokenizer.split_special_tokens = config.data.special_tokens == "text"
    set_chat_template(processor, config.tokenizer.chat_template)
    return processor


def load_processor(name: str | Path, trust_remote_code: bool = False) -> Any:
    """Return a processor by Hugging Face name or folder. ValueError: it has no image processor, or transformers is
    below 5.18, which marks wrong tokens as the assistant's after an image."""
    version = load_extra("transformers", "hf", "data.images").__version__
    if tuple(map(int, version.split(".")[:2])) < (5, 18):
        raise ValueError(
            f"data.images: transformers {version} takes the wrong tokens of a conversation with an image for the "
            "assistant's: pip install 'transformers>=5.18'"
        )
    processor = load_pretrained("AutoProcessor", "the processor", str(name), trust_remote_code)
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"data.images: {str(name)!r} has no processor of images: name a vision-language model")
    return processor


def load_tokenizer(name: str | Path, trust_remote_code: bool = False, special_tokens: str = "tokens") -> Any:
    """Return a fast tokenizer by Hugging Face name, folder or GGUF file. special_tokens: read those that a text spells
    out as "tokens" or as "text". ValueError: it is not a fast one, has no EOS, or is not what a GGUF file says."""
    tokenizer = load_pretrained("AutoTokenizer", "the tokenizer", str(name), trust_remote_code)
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {str(name)!r} must be a fast one with an end-of-text token to pack documents")
    if str(name).endswith(GGUF):
        check_gguf(tokenizer, str(name))
    tokenizer.split_special_tokens = special_tokens == "text"
    return tokenizer


# The share of a vocabulary's own words that are one token: 1 where its merges are read right (SmolLM2, Gemma 3), 0.02
# where they are taken for the scores of a unigram model (Gemma 3 by transformers 5.17).
LEAST_WHOLE = 0.9


def check_gguf(tokenizer: Any, name: str) -> None:
    """Raise ValueError if a tokenizer is not what its GGUF file says: by its BOS, its EOS, and the vocabulary's words.

    transformers rebuilds it from the file's vocabulary: 5.17 splits Gemma's words and ends SmolLM2's texts with the
    BOS; up to 5.22 Gemma's texts lack their BOS.
    """
    folder, file = os.path.split(name)
    path = load_extra("transformers.utils", "hf", "a GGUF file").cached_file(folder or ".", file)
    facts, _ = load_extra("transformers.integrations.gguf", "hf", "a GGUF file").read_gguf_metadata(path)
    names = ("model", "add_bos_token", "bos_token_id", "eos_token_id")
    kind, has_bos, bos, eos = (facts.get(f"tokenizer.ggml.{each}") for each in names)
    has_bos = kind == "llama" if has_bos is None else has_bos and kind != "gemma4"  # whose chat template writes it
    begin, end, whole = edges(tokenizer)[0], tokenizer.eos_token_id, share_of_whole_words(tokenizer)
    wrong = []
    if has_bos and bos is not None and begin != [bos]:
        wrong.append(f"texts begin with {begin} instead of [{bos}]")
    if eos is not None and end != eos:
        wrong.append(f"they end with {end} instead of {eos}")
    if whole < LEAST_WHOLE:
        wrong.append(f"{whole:.0%} of the vocabulary's words are one token")
    if wrong:
        version = load_extra("transformers", "hf", "a GGUF file").__version__
        raise ValueError(
            f"transformers {version} misreads the tokenizer of {name!r}: {', '.join(wrong)}. pip install "
            "'transformers>=5.23', or set tokenizer.name to a folder that has it"
        )


def share_of_whole_words(tokenizer: Any) -> float:
    """Return which share of 1,000 words of the vocabulary the tokenizer makes one token of; 1.0 if it has no words."""
    vocabulary = tokenizer.get_vocab()
    words = sorted(word for word in vocabulary if re.fullmatch("[\u2581\u0120][A-Za-z]+", word))  # each after a space
    words = words[:: len(words) // 1000 + 1]
    whole = 0
    for word in words:  # some tokenizers put a space before every text
        found = [tokenizer.encode(space + word[1:], add_special_tokens=False) for space in ("", " ")]
        whole += [vocabulary[word]] in found
    return whole / len(words) if words else 1.0


def train_tokenizer(config: Config) -> Any:
    """Return a byte-level BPE trained on the first `tokenizer.train_bytes` of the data, a fair sample in the order of
    `documents`."""
    tokenizers = load_extra("tokenizers", "hf", "training a tokenizer")
    transformers = load_extra("transformers", "hf", "training a tokenizer")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.tokenizer.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(config), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def _sample(config: Config) -> Iterator[str]:
    num_bytes = 0
    for text in conversations.texts(config.data) if config.data.is_chat else documents(config.data):
        yield text
        num_bytes += encoded_size(text)
        if num_bytes >= config.tokenizer.train_bytes:
            return
