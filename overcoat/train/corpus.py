"""Tokenize the configured data once, and split them by content into training rows and held-out rows.

Text becomes `tokens/KEY/` in the cache directory: `tokens.bin` (uint16 where the vocabulary allows), `documents.npy`
(start and end of each document, EOS included, and the checksum of its content), the tokenizer, and a manifest. KEY is a
checksum of the options in [data] and [tokenizer] that affect the tokens. The folder is written atomically, by one
process while others wait, and only if there are rows to train on. Later runs with the same KEY reuse it even if the
source files have changed, so a resumed run reads the same tokens.

Whole documents are held out: those with the smallest checksums of their content, up to `data.held_out` of all tokens,
and at least one row. So the split needs no record, equal documents fall on the same side, and the seed does not change
it. Only a document that is large beside that share is cut. Streamed data compare the checksum with a threshold.

Of conversations (data.format) tokens.bin is uint32 with the flags of chat.py, and documents.npy also has how many of
the first tokens of each are needed for a label. Those above `data.sequence_length` are truncated or dropped when rows
are made, as `data.too_long` says, and counted.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.train.chat import Encoder
from overcoat.train.config import Config, DataConfig, error_context, require
from overcoat.train.conversations import examples
from overcoat.train.data import (
    ChatRows,
    Images,
    PackedRows,
    RowSource,
    Shards,
    StreamedRows,
    count_labels,
    cut,
    document_ends,
    read_binary,
)
from overcoat.train.encoding import Spelled, edges, encode
from overcoat.train.files import DamagedError, lock, verify_directory, write_directory, writing
from overcoat.train.rows import encoded_size
from overcoat.train.sources import DocumentStream, documents, find_files, no_documents
from overcoat.train.stopping import ending_with, turn_ends
from overcoat.train.tokenizer import (
    load_processor,
    load_tokenizer,
    make_processor,
    make_tokenizer,
    read_chat_template,
    tokenizer_name,
)
from overcoat.train.vocabulary import num_ids

ENCODED_BYTES = 16 << 20
STREAMED = "streamed"  # how the identity of a stream begins
TOKENS, TOKENIZER = "tokens", "tokenizer"  # folders of the cache directory
# What decides the tokens; the rest of [data] (packing, masks, streaming) does not.
TOKEN_KEYS = (
    "files", "dataset", "dataset_config", "split", "text_key", "max_bytes", "dedupe", "special_tokens",
)  # fmt: skip
CHAT_KEYS = (  # of conversations
    "format", "messages_key", "prompt_key", "completion_key", "prompt_template", "images", "on_lost",
)  # fmt: skip
# Versions of the token files and of a streamed run's tokenizer; another version gives another KEY.
LAYOUT, TOKENIZER_LAYOUT = 3, 2
IMAGE_LAYOUT = 1  # of conversations with images; before it a transformers below 5.18 may have marked wrong tokens
NEEDED = {
    TOKENS: [
        "tokens.bin",
        "documents.npy",
        "special.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ],
    TOKENIZER: ["tokenizer.json", "tokenizer_config.json"],
}


@dataclass
class Corpus:
    """Everything the loop needs to know about the data."""

    tokenizer: Any | None
    eos: int | None
    rows: RowSource
    held_out: np.ndarray  # (rows, T + 1) int64
    num_ids: int  # every token id is below it: the tokenizer's size, or what binaries hold
    identity: str  # a checkpoint refuses to continue on other tokens
    note: str = ""  # what was left out of the data
    images: Images | None = None
    stops: list[int] = field(default_factory=list)  # ids that end what is trained on, the most frequent first

    @property
    def to_save(self) -> Any | None:
        """Return what is saved beside the model: the processor or the tokenizer."""
        found = self.tokenizer if self.images is None else self.images.processor
        return found if found is None else ending_with(found, self.stops)


def cache_dir(config: Config) -> Path:
    """Return the folder of tokens and of a trained tokenizer."""
    return Path(config.data.cache_dir or Path(config.train.run_dir) / "data")


def open_corpus(config: Config, say: Callable[[str], None]) -> Corpus:
    """Return the `Corpus`: tokenize the data, or reuse tokens of an earlier run, and prepare the rows. say: prints
    progress."""
    if config.data.is_tokens:
        return _open_binaries(config)
    check_sources(config.data)
    if config.data.streaming:
        return _open_stream(config, say)
    folder, manifest = _cached(config, TOKENS, say)
    tokenizer = load_tokenizer(folder / "tokenizer", config.model.trust_remote_code, config.data.special_tokens)
    is_chat = config.data.is_chat
    tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32 if is_chat else _token_type(tokenizer), mode="r")
    table = np.load(folder / "documents.npy")
    notes = json.loads((folder / "left_out.json").read_text(encoding="utf-8")) if is_chat else []
    table, note = _shorten(config.data, table) if is_chat else (table, "")
    stops = turn_ends(tokens, table[:, :2], tokenizer) if is_chat else [tokenizer.eos_token_id]
    notes += [line for line in (note, json.loads((folder / "special.json").read_text(encoding="utf-8"))) if line]
    for line in notes:
        say(line)
    rows, held_out = _packed(config, tokens, table, tokenizer.eos_token_id)
    images = None
    if config.data.images:
        processor = load_processor(folder / "tokenizer", config.model.trust_remote_code)
        images = Images(processor, config.data.images, json.loads((folder / "images.json").read_text(encoding="utf-8")))
    identity = manifest["files"]["tokens.bin"]["sha256"]
    note, end = "; ".join(notes), tokenizer.eos_token_id
    return Corpus(tokenizer, end, rows, held_out, num_ids(tokenizer), identity, note, images, stops)


def _shorten(data: DataConfig, table: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the rows of `table` whose conversations fit into `data.sequence_length`, each with its number appended,
    and a note on how many were truncated or dropped."""
    table, lengths, length = table.copy(), table[:, 1] - table[:, 0], data.sequence_length
    is_long = lengths > length
    is_dropped = is_long & ((data.too_long == "drop") | (table[:, 3] > length))
    table[:, 1] = np.minimum(table[:, 1], table[:, 0] + length)
    note = (
        f"{is_long.sum()} of {len(table)} conversations are longer than data.sequence_length = {length}: "
        f"{(is_long & ~is_dropped).sum()} truncated, {is_dropped.sum()} dropped"
    )
    table = np.concatenate([table, np.arange(len(table))[:, None]], axis=1)
    return table[~is_dropped], note if is_long.any() else ""


def _cached(config: Config, kind: str, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of this configuration's tokens or tokenizer and its manifest; the first process to come writes
    it."""
    made_from, layout = _made_from(config), LAYOUT
    if kind == TOKENIZER:
        layout = TOKENIZER_LAYOUT
        del made_from["special_tokens"]
    key = hashlib.sha256(json.dumps([layout, made_from], sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_dir(config) / kind / key
    fill = {TOKENS: write_tokens, TOKENIZER: write_tokenizer}[kind]
    with error_context(f"data.cache_dir: cannot write {folder}: ", OSError, "; make room there, or choose another"):
        if not folder.exists():
            waiting = functools.partial(say, f"another run is tokenizing into {folder}: waiting for its tokens")
            with lock(folder.with_name(f".{folder.name}.lock"), waiting):
                if not folder.exists():
                    say(f"tokenizing into {folder}")
                    about = {"made_from": made_from, "sources": _sources(config.data)}
                    write_directory(folder, functools.partial(fill, config), about)
    try:
        manifest = verify_directory(folder, NEEDED[kind])
    except DamagedError as error:
        raise DamagedError(f"{error}; delete {folder} to tokenize again") from error
    try:
        changed = manifest.get("sources") != _sources(config.data)
    except (ValueError, OSError):
        changed = False  # the sources are gone, and not needed
    if changed:
        say(f"data.files have changed since {folder} was made of them: delete it to tokenize them again")
    return folder, manifest


def write_tokens(config: Config, target: Path) -> None:
    """Tokenize all data into the folder `target`: tokens, the document table, notes and the tokenizer."""
    processor = make_processor(config) if config.data.images else None
    tokenizer = make_tokenizer(config) if processor is None else processor.tokenizer
    assert tokenizer is not None
    images: list[list[str]] = []
    spelled = Spelled(tokenizer)
    encoder = Encoder(config.data, tokenizer, processor) if config.data.is_chat else None
    about: list[tuple[int, ...]] = []
    encoded: Iterator[tuple[Any, ...]] = (
        _encoded_texts(config, tokenizer, spelled)
        if encoder is None
        else _encoded_chats(config, encoder, images, spelled)
    )
    with (target / "tokens.bin").open("wb") as file:
        for tokens, *rest in encoded:
            file.write(tokens.tobytes())
            about.append((len(tokens), *rest))
    lengths, *columns = np.asarray(about, dtype=np.int64).T
    ends = np.cumsum(lengths)
    table = np.stack([ends - lengths, ends, *columns], axis=1)
    np.save(target / "documents.npy", table)
    kept = _shorten(config.data, table)[0] if config.data.is_chat else table
    _split(config, kept)  # raises before too few tokens are stored: they would be reused after data are added
    what = "conversations" if config.data.is_chat else "documents"
    note = spelled.note(f"of {len(about):,} {what}", config.data.format == "messages")
    (target / "special.json").write_text(json.dumps(note), encoding="utf-8")
    if encoder is not None:
        left_out = json.dumps(encoder.losses.notes(len(about)))
        (target / "left_out.json").write_text(left_out, encoding="utf-8")
    if processor is not None:
        (target / "images.json").write_text(json.dumps(images), encoding="utf-8")
    with writing(target / "tokenizer"):
        (processor or tokenizer).save_pretrained(target / "tokenizer")


def _encoded_texts(config: Config, tokenizer: Any, spelled: Spelled) -> Iterator[tuple[np.ndarray, int]]:
    """Yield each document's tokens and the checksum of its content. Documents are tokenized in groups of about
    ENCODED_BYTES: enough for all cores, and small beside the host's memory."""
    dtype, group, size = _token_type(tokenizer), list[str](), 0
    for text in itertools.chain(documents(config.data), [None]):
        if text is not None:
            group.append(text)
            size += encoded_size(text)
        if group and (text is None or size >= ENCODED_BYTES):
            for each, ids in zip(group, encode(tokenizer, group), strict=True):
                spelled.see(each)
                yield np.asarray(ids, dtype=dtype), content_key(each)
            group, size = [], 0


def _encoded_chats(
    config: Config, encoder: Encoder, images: list[list[str]], spelled: Spelled
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield each conversation's tokens, the checksum of its content, and how many tokens it needs to keep a label;
    append its image paths to `images`."""
    num_bytes, is_empty, seen = 0, True, set[int]()
    for where, example in examples(config.data):
        said = {name: value for name, value in example.items() if name != "unread"}
        content = json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)
        with error_context(f"{where}: half of a surrogate pair (", UnicodeEncodeError, "): correct or remove the row"):
            size = encoded_size(content)
        if config.data.dedupe and hash(content) in seen:
            continue
        seen |= {hash(content)} if config.data.dedupe else set()
        num_bytes += size
        if config.data.max_bytes and num_bytes > config.data.max_bytes:
            break
        is_empty = False
        if not config.data.images:  # whose marks are special tokens, and are checked
            spelled.see(content)
        tokens, needed = encoder(example, where)
        images.append(example.get("images", []))
        yield tokens, content_key(content), needed
    if is_empty:
        raise no_documents(config.data)


def write_tokenizer(config: Config, target: Path) -> None:
    """Write the tokenizer. One that was trained on a stream must be saved: trained again, it may see other text."""
    tokenizer = make_tokenizer(config)
    assert tokenizer is not None
    with writing(target):
        tokenizer.save_pretrained(target)


def _token_type(tokenizer: Any) -> type[np.unsignedinteger]:
    return np.uint16 if num_ids(tokenizer) <= 1 << 16 else np.uint32


def content_key(text: str) -> int:
    """Return the CRC-32 of a text."""
    return zlib.crc32(text.encode())


def choose_held_out(keys: np.ndarray, lengths: np.ndarray, wanted: float) -> np.ndarray:
    """Return the documents with the smallest keys, in that order, until they have `wanted` tokens (at least one
    document). Copies of the last one are included unless that would double the tokens."""
    order = np.argsort(keys, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    chosen, rest = np.split(order, [int((before < wanted).sum())])
    copies = np.append(chosen, rest[keys[rest] == keys[chosen[-1]]])
    return copies if lengths[copies].sum() <= 2 * wanted else chosen


def _split(config: Config, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ranges to train on and those held out: (D, 2), or (D, 3) with the number of each conversation.
    table: (D, 3 or more) int64: begin, end, checksum of the content. ValueError: one part has no full row."""
    ranges, keys = table[:, [0, 1, -1] if config.data.is_chat else [0, 1]], table[:, 2]
    length, lengths = config.data.sequence_length, table[:, 1] - table[:, 0]
    wanted = config.data.held_out * lengths.sum()
    if not config.data.is_chat:
        wanted = max(wanted, length + 1)
    chosen = choose_held_out(keys, lengths, wanted)
    excess = int(lengths[chosen].sum() - wanted)
    is_held = np.zeros(len(keys), dtype=bool)
    is_held[chosen] = True
    training, held_out = ranges[~is_held], ranges[is_held]
    if excess > wanted and not config.data.is_chat:
        # The last one is most of what is held out, or all the data: its beginning is enough, and comes last because
        # it has no EOS.
        begin, end = ranges[chosen[-1]]
        held_out = np.append(held_out[held_out[:, 0] != begin], [[begin, end - excess]], axis=0)
        training = np.append(training, [[end - excess, end]], axis=0)
    what = f"full row of data.sequence_length = {length} tokens: add data, shorten the rows, or change data.held_out"
    if config.data.is_chat:
        what = "conversation that fits a row: add some, raise data.sequence_length, or set data.held_out"
    for name, share in (("training", training), ("held-out", held_out)):
        is_enough = (share[:, 1] - share[:, 0]).sum() > (0 if config.data.is_chat else length)
        require(is_enough, f"the {name} share of the data has no {what}")
    return training, held_out


def _made_from(config: Config) -> dict[str, Any]:
    data = asdict(config.data)
    tokenizer = {**asdict(config.tokenizer), "name": tokenizer_name(config)}
    if (template := read_chat_template(config.tokenizer.chat_template)) is not None:
        tokenizer["chat_template"] = template
    keys = (*TOKEN_KEYS, *CHAT_KEYS) if config.data.is_chat else TOKEN_KEYS
    layout = {"image_layout": IMAGE_LAYOUT} if config.data.images else {}
    return {**{key: data[key] for key in keys}, **layout, "tokenizer": tokenizer}


def _open_binaries(config: Config) -> Corpus:
    """Return the `Corpus` of token files, which are not copied. Documents end at EOS; every T tokens in a file without
    any."""
    tokenizer = make_tokenizer(config)
    eos = tokenizer.eos_token_id if tokenizer is not None else config.model.config.get("eos_token_id")
    dtype = np.dtype(config.data.token_dtype)
    files = find_files(config.data.files)
    tokens = Shards([read_binary(path, dtype) for path in files])
    located, length = zip(tokens.begins[:-1], tokens.parts, strict=True), config.data.sequence_length
    ends = np.concatenate([begin + document_ends(part, eos, length) for begin, part in located])
    begins = np.concatenate([[0], ends[:-1]])
    keys = np.asarray([zlib.crc32(tokens[begin:end].tobytes()) for begin, end in zip(begins, ends, strict=True)])
    identity = f"{len(tokens)} tokens, {zlib.crc32(keys.tobytes()):08x}"
    largest = max(int(part.max()) for part in tokens.parts)
    rows, held_rows = _packed(config, tokens, np.stack([begins, ends, keys], axis=1), eos)
    stops = [] if tokenizer is None else [tokenizer.eos_token_id]
    return Corpus(tokenizer, eos, rows, held_rows, 1 + largest, identity, stops=stops)


def _packed(
    config: Config, tokens: np.ndarray | Shards, table: np.ndarray, eos: int | None = None
) -> tuple[PackedRows, np.ndarray]:
    """Return the training rows and the held-out rows to evaluate on."""
    length = config.data.sequence_length
    training, held_out = _split(config, table)
    kind: Any = functools.partial(ChatRows, pad=eos or 0) if config.data.is_chat else PackedRows
    held_rows = kind(tokens, held_out, length, 0, shuffle=False)
    rows = kind(tokens, training, length, config.train.seed)
    found = held_rows.next_rows(min(config.eval.rows, held_rows.num_rows))
    _check_labels(config, found, eos)
    return rows, found


def _check_labels(config: Config, held_out: np.ndarray, eos: int | None) -> None:
    """Refuse held-out rows without a single label."""
    require(
        count_labels(held_out, eos, config.data.document_mask) > 0,
        f"the {len(held_out)} held-out rows hold end-of-text tokens alone, of which data.document_mask leaves no "
        "label: remove these from the data, or raise eval.rows",
    )


def check_sources(data: DataConfig) -> None:
    """Refuse folders of `datasets.save_to_disk`: their tables may be split or reordered by index files beside them."""
    for name in [data.dataset, *data.files]:
        for folder in [Path(name), *([Path(name).parent] if name.endswith(("*", ".arrow")) else [])]:
            of_one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
            if name and (of_one or (folder / "dataset_dict.json").is_file()):
                split = "" if of_one else f"[{data.split!r}]"
                raise ValueError(
                    f"{str(folder)!r} was written by datasets.save_to_disk, whose tables are not read: write it as "
                    f"parquet (datasets.load_from_disk({str(folder)!r}){split}.to_parquet('data.parquet')), and set "
                    "data.files to that"
                )


def _open_stream(config: Config, say: Callable[[str], None]) -> Corpus:
    """Return the `Corpus` of streamed data: held-out rows are read now, training rows on demand."""
    folder, _ = _cached(config, TOKENIZER, say)
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.special_tokens)
    threshold = int(config.data.held_out * 2**32)

    def is_held_out(text: str) -> bool:
        return content_key(text) < threshold

    length = config.data.sequence_length
    held: list[int] = []
    for text in (text for text in documents(config.data) if is_held_out(text)):
        held += encode(tokenizer, [text])[0]
        if len(held) > config.eval.rows * length:
            break
    found = cut(np.asarray(held), length)[: config.eval.rows]
    require(bool(found), f"no row of held-out text within data.held_out = {config.data.held_out}: raise it")
    rows = np.stack(found)
    _check_labels(config, rows, tokenizer.eos_token_id)
    stream = DocumentStream(config.data, config.train.seed)
    streamed = StreamedRows(stream, tokenizer, length, config.data.shuffle_rows, is_held_out)
    # What can be known of it without reading it: what it is made of, and the held-out rows.
    data = config.data
    made_of: list[Any] = [data.dataset, data.dataset_config, data.split, data.files] if data.dataset else _sources(data)
    before = edges(tokenizer)[0]
    if before or data.special_tokens != "text":  # as a stream was before it had either
        made_of += [before, data.special_tokens]
    digest = hashlib.sha256(json.dumps(made_of).encode() + rows.astype(np.int64).tobytes())
    identity = f"{STREAMED} {digest.hexdigest()}"
    eos = tokenizer.eos_token_id
    return Corpus(tokenizer, eos, streamed, rows, num_ids(tokenizer), identity, stops=[eos])


def _sources(data: DataConfig) -> list[list[Any]]:
    """Return the local files by name and size, ordered as in `find_files`; without folders, so that they may be
    moved."""
    return [] if data.dataset else [[path.name, path.stat().st_size] for path in find_files(data.files)]
