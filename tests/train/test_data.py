"""Packing, masks, resumable positions, and the loss of a batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import overcoat
from overcoat.estimate.dry_run import META
from overcoat.train.build import loss_for_estimates, summed_loss
from overcoat.train.config import DataConfig
from overcoat.train.corpus import choose_held_out
from overcoat.train.data import IGNORED, Batch, PackedRows, StreamedRows, make_batch
from overcoat.train.sources import DocumentStream
from tests.train.runs import EXACT, MakeConfig, make_state

EOS = 0


def documents_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents 1 1 1 0, 2 2 0, ...: token = number of the document, EOS = 0; lengths include EOS."""
    tokens = np.concatenate([[number] * (length - 1) + [EOS] for number, length in enumerate(lengths, 1)])
    ends = np.cumsum(lengths)
    return tokens.astype(np.uint16), np.stack([ends - lengths, ends], axis=1)


def test_an_epoch_trains_on_every_position_once_and_reorders_the_next() -> None:
    lengths = [5, 1, 9, 3, 2, 7, 11, 4]
    tokens, ranges = documents_of(lengths)
    rows = PackedRows(tokens, ranges, length=4, seed=1)
    epochs = [rows.next_rows(rows.num_rows) for _ in range(2)]
    # The last, incomplete row of an epoch is dropped; everything else is a label exactly once.
    assert rows.num_rows == (sum(lengths) - 1) // 4
    for epoch in epochs:
        counts = np.bincount(epoch[:, 1:].ravel(), minlength=len(lengths) + 1)
        whole = np.bincount(tokens, minlength=len(lengths) + 1)
        assert np.all(counts <= whole)
        assert whole.sum() - counts.sum() < 4 + 1
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[0], PackedRows(tokens, ranges, length=4, seed=2).next_rows(rows.num_rows))


@pytest.mark.parametrize("stop_after", [0, 1, 7, 11, 12, 13, 30])
def test_packed_rows_continue_exactly(stop_after: int) -> None:
    tokens, ranges = documents_of([9] * 6)
    whole, first, second = (PackedRows(tokens, ranges, length=4, seed=5) for _ in range(3))
    expected = whole.next_rows(40)
    taken = first.next_rows(stop_after) if stop_after else np.empty((0, 5), dtype=np.int64)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(np.concatenate([taken, second.next_rows(40 - stop_after)]), expected)


def test_labels_follow_inputs() -> None:
    batch = make_batch(np.arange(12).reshape(2, 6), EOS, document_mask=False)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
    assert batch.position_ids is None


def test_document_mask_restarts_positions_and_ignores_the_crossing_label() -> None:
    row = np.array([[5, 5, EOS, 6, EOS, EOS, 7, 7, 7]])
    batch = make_batch(row, EOS, document_mask=True)
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch.document_starts is not None
    assert batch.document_starts.tolist() == [0, 3, 5, 6, 8]
    assert batch.labels.tolist() == [[5, EOS, IGNORED, EOS, IGNORED, IGNORED, 7, 7]]
    assert batch.input_ids.tolist() == row[:, :-1].tolist()


def test_document_mask_separates_documents_in_the_model() -> None:
    """Changing one document of a row must not move the logits of the next one; without the mask it does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=16)
    ).eval()
    rows = np.array([[3, 4, EOS, 5, 6, 7, 8], [9, 9, EOS, 5, 6, 7, 8]])
    with torch.no_grad():
        masked, plain = (make_batch(rows, EOS, document_mask) for document_mask in (True, False))
        apart = model(masked.input_ids, position_ids=masked.position_ids, use_cache=False).logits
        joined = model(plain.input_ids, use_cache=False).logits
    torch.testing.assert_close(apart[0, 3:], apart[1, 3:])
    assert (joined[0, 3:] - joined[1, 3:]).abs().max() > 1e-4


def test_held_out_is_decided_by_content_alone() -> None:
    keys, lengths = np.array([50, 10, 40, 20, 30]), np.array([10, 10, 10, 10, 60])
    assert choose_held_out(keys, lengths, 18).tolist() == [1, 3]
    assert choose_held_out(keys, lengths, 1).tolist() == [1]  # at least one document
    copies = np.array([1, 2, 2, 2, 3])  # fall on the same side, unless they are many beside what is wanted
    assert choose_held_out(copies, np.full(5, 10), 20).tolist() == [0, 1, 2, 3]
    assert choose_held_out(copies, np.full(5, 10), 12).tolist() == [0, 1]
    order = np.array([3, 1, 4, 0, 2])
    assert choose_held_out(keys[order], lengths[order], 18).tolist() == [1, 0]


class Characters:
    """A tokenizer, and its backend."""

    eos_token_id, split_special_tokens, added_tokens_decoder = EOS, False, dict[int, Any]()

    @property
    def backend_tokenizer(self) -> Characters:
        return self

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(map(ord, text)))

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not add_special_tokens
        return [SimpleNamespace(ids=list(map(ord, text))) for text in texts]

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...


def streamed(config: DataConfig, pool: int) -> StreamedRows:
    """Each character is a token."""

    return StreamedRows(DocumentStream(config, seed=7), Characters(), 8, pool, lambda text: text.startswith("held"))


def stream_config(kind: str, folder: Path) -> DataConfig:
    for number in range(3):
        lines = [f'{{"text": "{"held" if i % 5 == 0 else "doc"} {number} {i} {"x" * (i % 7)}"}}' for i in range(30)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    if kind == "dataset":
        return DataConfig(dataset="json", files=[str(folder / "*.jsonl")], streaming=True)
    return DataConfig(files=[str(folder / "*.jsonl")], streaming=True)


@pytest.mark.parametrize("kind", ["files", "dataset"])
@pytest.mark.parametrize("stop_after", [1, 60, 130, 300])
def test_streamed_rows_continue_exactly(tmp_path: Path, kind: str, stop_after: int) -> None:
    """Over several epochs of about 100 rows, from files and from a `datasets` builder that needs no network."""
    config = stream_config(kind, tmp_path)
    expected = streamed(config, pool=16).next_rows(320)
    first = streamed(config, pool=16)
    taken = first.next_rows(stop_after)
    saved = tmp_path / "state.pt"
    torch.save(first.state_dict(), saved)
    second = streamed(config, pool=16)
    second.load_state_dict(torch.load(saved, weights_only=True))
    assert np.array_equal(np.concatenate([taken, second.next_rows(320 - stop_after)]), expected)


def test_streamed_rows_leave_out_what_is_held_out(tmp_path: Path) -> None:
    config = stream_config("files", tmp_path)
    rows = streamed(config, pool=1).next_rows(80)
    text = "".join(chr(token) for row in rows for token in row[1:])
    assert "doc" in text
    assert "held" not in text


def test_a_stream_of_nothing_but_held_out_documents_is_an_error(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("held")
    rows = streamed(DataConfig(files=[str(tmp_path / "*.txt")], streaming=True), pool=1)
    with pytest.raises(ValueError, match=r"lower data\.held_out"):
        rows.next_rows(1)


# ---- the loss: beside the model's own and PyTorch's, and without values for the estimator --------------------------


def test_a_converted_model_sums_the_same_loss_without_logits(make_config: MakeConfig) -> None:
    state = make_state(make_config(*EXACT, "data.document_mask=true"))
    batch = make_batch(state.rows.next_rows(3), 0, document_mask=True)
    expected = summed_loss(state.model, batch)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in state.model.named_parameters()}
    state.model.zero_grad()
    overcoat.convert(state.model, overcoat.Recipe(fp8=False))
    with overcoat.memory.record_kept(state.model) as kept:
        loss = summed_loss(state.model, batch)
    assert "linear_cross_entropy" in kept.by_op()
    assert not any(row.shape[-1:] == (50,) for row in kept.rows)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in state.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(summed_loss(state.model.eval(), batch), expected.detach())


class Recording:
    """A model that answers with fixed logits (B, T, 5) and keeps what it was asked."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.logits = torch.randn((2, 3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
        self.asked: dict[str, object] = {}

    def __call__(self, **asked: object) -> SimpleNamespace:
        self.asked = asked
        return SimpleNamespace(logits=self.logits.to(asked["input_ids"].device))  # type: ignore[attr-defined]


LABELS = torch.tensor([[1, IGNORED, 2], [IGNORED, 4, 0]])
PLACES = torch.tensor([[0, 1, 0], [0, 0, 1]])


def test_ignored_labels_add_nothing_and_documents_reach_the_model() -> None:
    model = Recording()
    ids = torch.zeros_like(LABELS)
    loss = summed_loss(model, Batch(ids, LABELS, PLACES))
    counted = LABELS != IGNORED
    torch.testing.assert_close(loss, F.cross_entropy(model.logits[counted], LABELS[counted], reduction="sum"))
    assert model.asked["input_ids"] is ids
    assert model.asked["position_ids"] is PLACES
    assert model.asked["use_cache"] is False


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_estimators_loss_has_shapes_and_no_values(document_mask: bool) -> None:
    model = Recording()
    loss = loss_for_estimates(document_mask)(model, 2, 3)
    assert (loss.device, loss.shape, loss.dtype) == (META, (), torch.float32)
    ids, places = model.asked["input_ids"], model.asked["position_ids"]
    assert isinstance(ids, torch.Tensor)
    assert (ids.device, ids.shape, ids.dtype) == (META, (2, 3), torch.int64)
    assert (places is not None) == document_mask
    if isinstance(places, torch.Tensor):
        assert (places.device, places.shape, places.dtype) == (META, (2, 3), torch.int64)
