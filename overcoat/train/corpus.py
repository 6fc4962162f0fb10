"""From the configured data to training rows and held-out rows: tokenized once, kept, and split by content.

Text becomes `tokens/` in the cache directory: `tokens.bin` (uint16 where the vocabulary allows),
`documents.npy` (start and end of each document, EOS included, and whether it is held out), the tokenizer, and
a manifest. It is written atomically and reused by later runs with the same [data] and [tokenizer]; a resumed
run so reads the very same tokens even if the source files have changed since.

Held out are whole documents, chosen by the checksum of their content: those with the smallest, up to
`data.held_out` of all tokens. Nobody has to remember a split, equal documents fall on the same side, and the
seed does not move it. Streamed data, which are never seen as a whole, use the same checksum against a
threshold.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overcoat.train.config import Config, DataConfig
from overcoat.train.data import PackedRows, RowSource, StreamedRows
from overcoat.train.files import DamagedError, verify_directory, write_directory
from overcoat.train.sources import DocumentStream, documents, encoded_size, find_files
from overcoat.train.tokenizer import encode, load_tokenizer, make_tokenizer, tokenizer_name

ENCODED_BYTES = 16 << 20
STREAMED = "streamed"  # how the identity of a stream begins
# What decides the tokens; the rest of [data] (packing, masks, streaming) does not.
TOKEN_KEYS = ("files", "dataset", "dataset_config", "split", "text_key", "max_bytes", "held_out")


@dataclass
class Corpus:
    """Everything the loop needs to know about the data."""

    tokenizer: Any | None
    eos: int | None
    rows: RowSource
    held_out: np.ndarray  # (rows, T + 1) int64
    num_ids: int  # every token id is below it: the tokenizer's size, or what binaries hold
    identity: str  # a checkpoint refuses to continue on other tokens


def cache_dir(config: Config) -> Path:
    """Where tokens and a trained tokenizer are kept."""
    return Path(config.data.cache_dir or Path(config.train.run_dir) / "data")


def open_corpus(config: Config, say: Callable[[str], None]) -> Corpus:
    """Tokenize, or find the tokens of an earlier run, and set up the rows; `say` reports what takes time."""
    if config.data.is_tokens:
        return _open_binaries(config)
    if config.data.streaming:
        return _open_stream(config)
    folder = cache_dir(config) / "tokens"
    if not folder.exists():
        say(f"tokenizing into {folder}")
        write_tokens(config, folder)
    manifest = _checked_manifest(config, folder)
    tokens = np.memmap(folder / "tokens.bin", dtype=manifest["dtype"], mode="r")
    table = np.load(folder / "documents.npy")
    tokenizer = load_tokenizer(folder / "tokenizer")
    identity = manifest["files"]["tokens.bin"]["sha256"]
    rows, held_out = _packed(config, tokens, table[:, :2], table[:, 2] == 1)
    return Corpus(tokenizer, tokenizer.eos_token_id, rows, held_out, len(tokenizer), identity)


def write_tokens(config: Config, folder: Path) -> None:
    """Tokenize every document into `folder`."""
    tokenizer = make_tokenizer(config)
    assert tokenizer is not None
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32

    def fill(target: Path) -> None:
        lengths: list[int] = []
        checksums: list[int] = []
        with (target / "tokens.bin").open("wb") as file:
            for texts in _grouped(documents(config.data)):
                encoded = encode(tokenizer, texts)
                lengths += map(len, encoded)
                checksums += [content_key(text) for text in texts]
                file.write(np.concatenate([np.asarray(ids, dtype=dtype) for ids in encoded]).tobytes())
        if not lengths:
            raise ValueError("the data hold no documents")
        ends = np.cumsum(lengths)
        held_out = choose_held_out(np.asarray(checksums), np.asarray(lengths), config.data.held_out)
        np.save(target / "documents.npy", np.stack([ends - lengths, ends, held_out], axis=1))
        tokenizer.save_pretrained(target / "tokenizer")

    write_directory(folder, fill, {"made_from": _made_from(config), "dtype": np.dtype(dtype).name})


def _grouped(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of documents of about ENCODED_BYTES: enough to keep every core busy, little enough to hold in
    memory."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += encoded_size(text)
        if size >= ENCODED_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def content_key(text: str | bytes) -> int:
    """A number below 2**32 that depends on the content alone."""
    return zlib.crc32(text.encode("utf-8", errors="surrogatepass") if isinstance(text, str) else text)


def choose_held_out(keys: np.ndarray, lengths: np.ndarray, share: float) -> np.ndarray:
    """(D,) bool: the documents with the smallest keys, at least one, up to `share` of all tokens."""
    order = np.argsort(keys, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    chosen = np.zeros(len(keys), dtype=bool)
    chosen[order] = before < share * lengths.sum()
    return chosen


def _made_from(config: Config) -> dict[str, Any]:
    data = asdict(config.data)
    tokenizer = {**asdict(config.tokenizer), "name": tokenizer_name(config)}
    return {**{key: data[key] for key in TOKEN_KEYS}, "tokenizer": tokenizer}


def _checked_manifest(config: Config, folder: Path) -> dict[str, Any]:
    try:
        manifest = verify_directory(folder)
    except DamagedError as error:
        raise DamagedError(f"{error}; delete {folder} to tokenize again") from error
    if manifest["made_from"] != _made_from(config):
        raise ValueError(
            f"{folder} was tokenized from other data or with another tokenizer: "
            "choose another data.cache_dir or train.run_dir, or delete it"
        )
    return manifest


def _open_binaries(config: Config) -> Corpus:
    """Token files as they are; documents end at EOS, or every T tokens in a file that has none."""
    tokenizer = make_tokenizer(config)
    eos = tokenizer.eos_token_id if tokenizer is not None else config.model.config.get("eos_token_id")
    dtype = np.dtype(config.data.token_dtype)
    files = find_files(config.data.files)
    for path in files:
        if not path.stat().st_size or path.stat().st_size % dtype.itemsize:
            raise ValueError(f"{path} ({path.stat().st_size} bytes) is not a file of {dtype} tokens (data.token_dtype)")
    tokens = Shards([np.memmap(path, dtype=dtype, mode="r") for path in files])
    ends = np.concatenate(
        [begin + _document_ends(part, eos, config.data.sequence_length) for begin, part in tokens.located()]
    )
    ranges = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    keys = np.asarray([content_key(tokens[begin:end].tobytes()) for begin, end in ranges])
    held_out = choose_held_out(keys, ranges[:, 1] - ranges[:, 0], config.data.held_out)
    identity = f"{len(tokens)} tokens, {zlib.crc32(keys.tobytes()):08x}"
    num_ids = 1 + max(int(part.max()) for part in tokens.parts)
    rows, held_rows = _packed(config, tokens, ranges, held_out)
    return Corpus(tokenizer, eos, rows, held_rows, num_ids, identity)


class Shards:
    """Several token files read as one array; a slice must lie within one of them, as every document does."""

    def __init__(self, parts: list[np.ndarray]):
        self.parts = parts
        self.begins = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        index = int(np.searchsorted(self.begins, where.start, side="right")) - 1
        begin = int(self.begins[index])
        return self.parts[index][where.start - begin : where.stop - begin]

    def located(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each file with the position of its first token."""
        return zip(self.begins[:-1].tolist(), self.parts, strict=True)


def _document_ends(tokens: np.ndarray, eos: int | None, length: int) -> np.ndarray:
    """Where documents end in one file, its own end included."""
    ends = np.flatnonzero(tokens == eos) + 1 if eos is not None else np.empty(0, dtype=np.int64)
    if not len(ends):
        ends = np.arange(length, len(tokens), length)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _packed(
    config: Config, tokens: np.ndarray | Shards, ranges: np.ndarray, held_out: np.ndarray
) -> tuple[PackedRows, np.ndarray]:
    """Training rows, and the held-out rows to evaluate on, of documents at `ranges` in `tokens`."""
    length = config.data.sequence_length
    rows = PackedRows(tokens, ranges[~held_out], length, config.train.seed)
    held_rows = PackedRows(tokens, ranges[held_out], length, 0, shuffle=False)
    for name, share in (("training", rows), ("held-out", held_rows)):
        if not share.num_rows:
            raise ValueError(
                f"the {name} share of the data has no full row of data.sequence_length = {length} tokens: "
                "add data, shorten the rows, or change data.held_out"
            )
    return rows, held_rows.next_rows(min(config.eval.rows, held_rows.num_rows))


def _open_stream(config: Config) -> Corpus:
    tokenizer = _streaming_tokenizer(config)
    threshold = int(config.data.held_out * 2**32)

    def is_held_out(text: str) -> bool:
        return content_key(text) < threshold

    length = config.data.sequence_length
    held: list[int] = []
    for text in (text for text in documents(config.data) if is_held_out(text)):
        held += encode(tokenizer, [text])[0]
        if len(held) > config.eval.rows * length:
            break
    num_rows = min(config.eval.rows, max(0, len(held) - 1) // length)
    if not num_rows:
        raise ValueError(f"no row of held-out text within data.held_out = {config.data.held_out}: raise it")
    rows = np.stack([np.asarray(held[row * length : (row + 1) * length + 1]) for row in range(num_rows)])
    stream = DocumentStream(config.data, config.train.seed)
    streamed = StreamedRows(stream, tokenizer, length, config.data.shuffle_rows, is_held_out)
    identity = _stream_identity(config.data, rows)
    return Corpus(tokenizer, tokenizer.eos_token_id, streamed, rows, len(tokenizer), identity)


def _stream_identity(data: DataConfig, held_out: np.ndarray) -> str:
    """What can be known of a stream without reading it: what it is made of, and the held-out rows."""
    made_of: list[Any] = [data.dataset, data.dataset_config, data.split, data.files]
    if not data.dataset:  # by name, as find_files orders them: the folder may have been moved
        made_of = [(path.name, path.stat().st_size) for path in find_files(data.files)]
    digest = hashlib.sha256(json.dumps(made_of).encode())
    digest.update(held_out.astype(np.int64).tobytes())
    return f"{STREAMED} {digest.hexdigest()}"


def _streaming_tokenizer(config: Config) -> Any:
    """A tokenizer trained on a stream is kept beside the run: trained again, it might see other text."""
    folder = cache_dir(config) / "tokenizer"
    if not folder.exists():
        tokenizer = make_tokenizer(config)
        assert tokenizer is not None
        write_directory(folder, tokenizer.save_pretrained, {"made_from": _made_from(config)})
    _checked_manifest(config, folder)
    return load_tokenizer(folder)
