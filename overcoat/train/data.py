"""Pack tokens into rows and batches, with a position that a checkpoint stores.

Packing: the documents of an epoch, each ended by EOS, form one long stream of tokens, cut into rows of T tokens without
padding. A row is stored with one more token: inputs are row[:-1], labels row[1:].

    PackedRows    tokens in a file, mapped into memory. Seed and epoch alone decide the order of documents in
                  the stream and of the rows drawn from it, so the position is (epoch, rows done).
    ChatRows      whole conversations, packed by best fit, the longest first. A row's tokens carry flags: TRAINED where
                  a token is a label, START where a conversation (or the padding after the last) begins.
    StreamedRows  text tokenized on the way. Rows wait in a pool from which the next one is drawn; the
                  position is the source's own, the pool, the tokens not yet in a row, and the generator.

With `document_mask`, `position_ids` restart after every EOS (transformers turns that into a block-diagonal
attention mask, a converted model reads `document_starts`) and the label that would cross from one document into the
next is IGNORED. Conversations are always kept apart so.

Images are read again for every batch, in threads, while the GPU works on the previous one; their tokens are stored.

Legend: B rows, T sequence length, D documents.
"""

from __future__ import annotations

import bisect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overcoat.kernels.attention import document_starts
from overcoat.models.dummy_batch import tower_inputs
from overcoat.train.chat import TRAINED
from overcoat.train.config import require
from overcoat.train.encoding import Spelled, encode
from overcoat.train.images import read_image
from overcoat.train.rows import reading
from overcoat.train.sources import DocumentStream

IGNORED = -100
ENCODED_AT_ONCE = 64
READERS = 8  # threads that read images
# With TRAINED, a flag of tokens in rows of conversations: one begins. Above it is the number of that conversation among
# the data, plus 1; of the padding 0.
START, NUMBER = 1 << 32, 33


@dataclass(frozen=True)
class Batch:
    """One forward pass: everything int64, unless said otherwise, on one device."""

    input_ids: torch.Tensor  # (B, T)
    labels: torch.Tensor  # (B, T), already shifted: labels[:, t] follows input_ids[:, t]
    position_ids: torch.Tensor | None  # (B, T) under document_mask; (4, B, T) with images of Qwen-VL
    document_starts: torch.Tensor | None = None  # int32 (D + 1,) under document_mask (kernels/attention.py)
    images: dict[str, Any] = field(default_factory=dict)  # what the model is given beside (`Images`)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the copy to a GPU does not wait for queued work."""
        if device.type == "cpu":
            return self

        def move(values: dict[str, Any]) -> dict[str, Any]:
            tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
            tensors.pop("image_grid_thw", None)  # the model reads it on the host
            return values | {name: each.pin_memory().to(device, non_blocking=True) for name, each in tensors.items()}

        return Batch(**{**move(vars(self)), "images": move(self.images)})


def make_batch(rows_BT: np.ndarray, eos: int | None, document_mask: bool) -> Batch:
    """Return rows (B, T + 1) as inputs and labels (B, T), with positions where documents are kept apart."""
    rows = torch.from_numpy(rows_BT)
    inputs, labels = rows[:, :-1].clone(), rows[:, 1:].clone()  # the two overlap in `rows`, and labels are edited
    if _are_conversations(rows_BT):
        is_start = (inputs & START) != 0  # the padding is a document of its own
        labels[(labels & (TRAINED | START)) != TRAINED] = IGNORED
        labels[labels != IGNORED] &= TRAINED - 1
        inputs &= TRAINED - 1
    elif document_mask and eos is not None:
        is_start = torch.zeros_like(inputs, dtype=torch.bool)
        is_start[:, 1:] = inputs[:, :-1] == eos
        labels[inputs == eos] = IGNORED
    else:
        return Batch(inputs, labels, None)
    places = torch.arange(inputs.shape[1]).expand_as(inputs)
    position_ids = places - torch.where(is_start, places, 0).cummax(dim=1).values
    return Batch(inputs, labels, position_ids, document_starts(position_ids))


def count_labels(rows_BT: np.ndarray, eos: int | None, document_mask: bool) -> int:
    """Return the number of labels that `make_batch` makes of rows (B, T + 1)."""
    inputs = rows_BT[:, :-1]
    if _are_conversations(rows_BT):
        return int(((rows_BT[:, 1:] & (TRAINED | START)) == TRAINED).sum())
    return inputs.size - (int((inputs == eos).sum()) if document_mask and eos is not None else 0)


def conversations(rows_BT: np.ndarray) -> list[int]:
    """Return the numbers of the conversations in rows, in order."""
    starts = rows_BT[(rows_BT & START) != 0] >> NUMBER
    return (starts[starts > 0] - 1).tolist()


def _are_conversations(rows_BT: np.ndarray) -> bool:
    return bool(rows_BT[0, 0] & START)


def cut(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """Return the full rows (T + 1,) of one stream of tokens."""
    return [tokens[start : start + length + 1] for start in range(0, len(tokens) - length, length)]


class PackedRows:
    """Rows over tokens (N,) on disk whose documents are the ranges `documents` (D, 2), EOS included."""

    def __init__(self, tokens: Any, documents: np.ndarray, length: int, seed: int, shuffle: bool = True):
        self.tokens, self.documents, self.length = tokens, documents, length
        self.seed, self.shuffle = seed, shuffle
        self.epoch, self.num_done = 0, 0
        self._arrange()

    def _arrange(self) -> None:
        """Lay out this epoch: shuffle the documents, then the rows."""
        generator = np.random.default_rng([self.seed, self.epoch])
        ranges = self.documents[generator.permutation(len(self.documents))] if self.shuffle else self.documents
        self._stops = ranges[:, 1]  # of documents among the tokens
        self._ends = np.cumsum(ranges[:, 1] - ranges[:, 0])  # and in the epoch's stream
        self.num_rows = max(0, (int(self._ends[-1]) - 1) // self.length)
        self._rows = generator.permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)

    @property
    def passes(self) -> float:
        """Return how many passes over the data the rows so far are."""
        return self.epoch + self.num_done / self.num_rows

    def next_rows(self, count: int) -> np.ndarray:
        """Return the next `count` rows, (count, T + 1) int64."""
        rows = np.empty((count, self.length + 1), dtype=np.int64)
        for row in rows:
            if self.num_done >= self.num_rows:  # above: resumed on purpose with longer rows, of which there are fewer
                self.epoch, self.num_done = self.epoch + 1, 0
                self._arrange()
            self._fill(int(self._rows[self.num_done]), row)
            self.num_done += 1
        return rows

    def _fill(self, number: int, row: np.ndarray) -> None:
        """Fill `row` with the tokens of row `number` in the epoch's stream, across document ends."""
        start = number * self.length
        index = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(row):
            left = int(self._ends[index]) - start
            size, begin = min(len(row) - filled, left), int(self._stops[index]) - left
            row[filled : filled + size] = self.tokens[begin : begin + size]
            filled, start, index = filled + size, start + size, index + 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "num_done": self.num_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.num_done = state["epoch"], state["num_done"]
        self._arrange()


class ChatRows(PackedRows):
    """Rows of whole conversations, of at most T tokens each; `documents` (D, 3) has their numbers beside, and `pad`
    follows the last of a row."""

    def __init__(self, tokens: Any, documents: np.ndarray, length: int, seed: int, pad: int, shuffle: bool = True):
        self.pad = pad
        super().__init__(tokens, documents, length, seed, shuffle)

    def _arrange(self) -> None:
        generator = np.random.default_rng([self.seed, self.epoch])
        count = len(self.documents)
        ranges = self.documents[generator.permutation(count) if self.shuffle else np.arange(count)]
        # The longest first: of lengths spread evenly up to T 96% of the places are filled; in shuffled order 93%.
        self._ranges = ranges[np.argsort(ranges[:, 0] - ranges[:, 1], kind="stable")]
        self._packed = best_fit(self._ranges[:, 1] - self._ranges[:, 0], self.length)
        self.num_rows = len(self._packed)
        # In an order of their own even without `shuffle`: the first rows hold the longest conversations, and an
        # evaluation on some of them would be of these alone.
        self._rows = generator.permutation(self.num_rows)

    def _fill(self, number: int, row: np.ndarray) -> None:
        row[:], filled = self.pad, 0
        for begin, end, conversation in self._ranges[self._packed[number]]:
            row[filled : filled + end - begin] = self.tokens[begin:end]
            row[filled] |= START | (conversation + 1) << NUMBER
            filled += end - begin
        row[filled] |= START


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Return rows of indices: each length in turn goes into the fullest row with room for it, else into a new row."""
    rows: list[list[int]] = []
    spaces: list[int] = []  # that rows have left, ascending, each once
    with_space: dict[int, list[int]] = {}
    for index, length in enumerate(lengths.tolist()):
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[at]
        else:
            space, row = room, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := space - length:
            if not with_space.setdefault(left, []):
                bisect.insort(spaces, left)
            with_space[left].append(row)
    return rows


class StreamedRows:
    """Rows from documents tokenized on the way, leaving out the held-out ones."""

    def __init__(self, stream: DocumentStream, tokenizer: Any, length: int, pool_rows: int, is_held_out: Any):
        self.stream, self.tokenizer, self.length = stream, tokenizer, length
        self.pool_rows, self.is_held_out = pool_rows, is_held_out
        self._spelled = Spelled(tokenizer)
        self._generator = torch.Generator().manual_seed(stream.seed)
        self._pool: list[np.ndarray] = []
        self._pending = np.empty(0, dtype=np.int64)

    def next_rows(self, count: int) -> np.ndarray:
        """Return the next `count` rows, (count, T + 1) int64."""
        return np.stack([self._draw() for _ in range(count)])

    def _draw(self) -> np.ndarray:
        while len(self._pool) < self.pool_rows:
            self._refill()
        index = int(torch.randint(len(self._pool), (), generator=self._generator))
        self._pool[index], self._pool[-1] = self._pool[-1], self._pool[index]
        return self._pool.pop()

    def _refill(self) -> None:
        texts, epoch = list[str](), self.stream.epoch
        while not texts:  # after the second end of an epoch all documents have been read
            require(self.stream.epoch <= epoch + 1, "all documents of the stream are held out: lower data.held_out")
            texts = [text for text in self.stream.take(ENCODED_AT_ONCE) if text.strip() and not self.is_held_out(text)]
        self._spelled.warn_of(texts)
        encoded = [np.asarray(ids, dtype=np.int64) for ids in encode(self.tokenizer, texts)]
        pending = np.concatenate([self._pending, *encoded])
        rows = cut(pending, self.length)
        self._pool += [row.copy() for row in rows]
        self._pending = pending[len(rows) * self.length :].copy()

    def state_dict(self) -> dict[str, Any]:
        pool = np.stack(self._pool) if self._pool else np.empty((0, self.length + 1), dtype=np.int64)
        return {
            "stream": self.stream.state_dict(),
            "pool": torch.from_numpy(pool),
            "pending": torch.from_numpy(self._pending.copy()),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state["stream"])
        self._pool = list(state["pool"].numpy())
        self._pending = state["pending"].numpy()
        self._generator.set_state(state["generator"])


RowSource = PackedRows | StreamedRows


# ---- token binaries -------------------------------------------------------------------------------------------------


def read_binary(path: Path, dtype: np.dtype) -> np.ndarray:
    """Return the tokens (N,) of one file, memory-mapped. ValueError: it cannot be read, or its tokens are of another
    width."""
    with reading(path):
        size = path.stat().st_size
        if not size or size % dtype.itemsize:
            raise ValueError(f"{path} ({size} bytes) is not a file of {dtype} tokens (data.token_dtype)")
        tokens = np.memmap(path, dtype=dtype, mode="r")
    # Wider ids read as narrow ones are two tokens each, the second one being the id's high half. No text has tokens in
    # its odd places that are hundreds of times smaller than those in the even ones.
    if len(tokens) % 2 == 0 and 256 * int(tokens[1::2].max()) < int(tokens[::2].max()):
        remedy = "set data.token_dtype=uint32" if dtype == np.uint16 else "convert it to uint32"
        raise ValueError(f"{path} holds wider tokens than {dtype} (data.token_dtype): {remedy}")
    return tokens


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


def document_ends(tokens: np.ndarray, eos: int | None, length: int) -> np.ndarray:
    """Return the ends of documents in one file, its own end included."""
    ends = np.flatnonzero(tokens == eos) + 1 if eos is not None else np.empty(0, dtype=np.int64)
    if not len(ends):
        ends = np.arange(length, len(tokens), length)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


# ---- images ---------------------------------------------------------------------------------------------------------


class Images:
    """The images of conversations by their number among the data."""

    def __init__(self, processor: Any, folder: str, paths: list[list[str]]):
        self.processor, self.folder, self.paths = processor, Path(folder), paths
        self._readers = ThreadPoolExecutor(READERS)

    def add_to(self, batch: Batch, rows_BT: np.ndarray, model: Any) -> Batch:
        """Return `batch` with the model's inputs for the images of its rows."""
        numbers = conversations(rows_BT)
        paths = [path for number in numbers for path in self.paths[number]]
        if not paths:
            return batch
        each = list(self._readers.map(self._pixels, paths))
        given = {name: torch.cat([image[name] for image in each]) for name in each[0]}
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
        inner, grid = model.model, given.get("image_grid_thw")
        if grid is None or not hasattr(inner, "get_rope_index"):
            return replace(batch, images=given)
        # What the model would find out from the sizes, and make the host wait for.
        counts = iter([len(self.paths[number]) for number in numbers if self.paths[number]])
        positions = _rope_positions(batch, counts, grid, inner, model.config.image_token_id)
        return replace(batch, position_ids=positions, images={**given, **tower_inputs(inner.visual, grid)})

    def _pixels(self, path: str) -> dict[str, torch.Tensor]:
        return dict(self.processor.image_processor(images=[read_image(self.folder / path)], return_tensors="pt"))


def _rope_positions(batch: Batch, counts: Any, grid: torch.Tensor, inner: Any, image_token: int) -> torch.Tensor:
    """Return position ids (4, B, T): position in the text, then time, height and width; each restarts at 0 in every
    document."""
    assert batch.position_ids is not None
    assert batch.document_starts is not None
    ids, begun, found = batch.input_ids.flatten(), 0, []
    for start, end in zip(batch.document_starts[:-1].tolist(), batch.document_starts[1:].tolist(), strict=True):
        document, kinds = ids[None, start:end], (ids[None, start:end] == image_token).int()
        count = next(counts) if kinds.any() else 0
        images = grid[begun : begun + count]
        begun += count
        found.append(inner.get_rope_index(document, mm_token_type_ids=kinds, image_grid_thw=images)[0][:, 0])
    return torch.cat([batch.position_ids[None], torch.cat(found, dim=1).view(3, *batch.input_ids.shape)])
