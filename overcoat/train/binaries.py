"""Token binaries (`data.files` that end in .bin): files of token ids and nothing else, mapped into memory.

Documents end at EOS, or every T tokens in a file that has none, and never span two files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from overcoat.train.sources import reading


def read_binary(path: Path, dtype: np.dtype) -> np.ndarray:
    """The tokens (N,) of one file, mapped into memory.

    Raises:
        ValueError: it cannot be read, or holds tokens of another width.
    """
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
    """Where documents end in one file, its own end included."""
    ends = np.flatnonzero(tokens == eos) + 1 if eos is not None else np.empty(0, dtype=np.int64)
    if not len(ends):
        ends = np.arange(length, len(tokens), length)
    return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))
