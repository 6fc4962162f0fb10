"""The cases' masks and documents, how kernels are called as far as shapes tell, and what is made of the times.

On a GPU every kernel that takes a small case computes what the rule's does.
"""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from benchmarks import attention as benchmark
from benchmarks.attention import CASES, Case, contestants, inputs, total, verdict
from overcoat.kernels.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    Kernel,
    attention,
    attention_backward,
    backward_by,
    forward_by,
)

SMALL = {kind: Case(kind, 2, 640, 4, 2, 16, kind) for kind in ("causal", "padding", "packed")}
kinds = pytest.mark.parametrize("kind", SMALL)


def shape(case, mask):
    return mask, case.batch, case.num_q, case.num_kv, case.width**-0.5


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.kind for case in CASES} == set(SMALL)


def test_padding_hides_the_future_and_the_end_of_each_row():
    torch.manual_seed(0)
    mask = benchmark.padding_mask(8, 64)
    assert (mask.shape, mask.dtype) == ((8, 1, 64, 64), torch.bool)
    lengths = mask[:, 0, -1].sum(-1)
    assert lengths.min() >= 32
    assert lengths.unique().numel() > 1
    for row, length in zip(mask[:, 0], lengths):
        expected = torch.ones(64, 64, dtype=torch.bool).tril()
        expected[:, length:] = False
        assert torch.equal(row, expected)


def test_documents_fill_the_rows():
    torch.manual_seed(0)
    starts = benchmark.documents(16, 2048)
    assert starts.dtype == torch.int32
    lengths = starts.diff()
    assert lengths.min() > 0
    assert lengths.max() <= 500
    assert 200 < lengths.float().mean() < 350
    assert set(range(0, 17 * 2048, 2048)) <= set(starts.tolist())


def test_documents_alone_are_the_packed_rows():
    """What FlashAttention is told of the documents and what the others are told by the mask are the same."""
    case = SMALL["packed"]
    given = inputs(case, "cpu")
    qkv = given.qkv.float()
    o, _ = attention(qkv, *shape(case, given.mask))
    alone = [
        attention(qkv[start:end], None, 1, case.num_q, case.num_kv, case.width**-0.5)[0]
        for start, end in itertools.pairwise(given.starts.tolist())
    ]
    assert len(alone) >= 4
    torch.testing.assert_close(torch.cat(alone), o, rtol=1e-5, atol=1e-5)


@kinds
def test_contestants(kind):
    case = SMALL[kind]
    given = inputs(case, "cpu")
    found = contestants(given)
    expected = {
        "causal": ["cudnn", "flash", "memory-efficient"],
        "padding": ["memory-efficient", "cudnn"],
        "packed": ["flash, packed", "memory-efficient", "cudnn"],
    }
    assert list(found) == expected[kind]


@pytest.mark.parametrize("kernel", ["cudnn", "flash, packed"])
def test_shapes_of_masked_kernels(kernel):
    case = SMALL["packed"]
    given = inputs(case, "cpu")
    kernel = contestants(given)[kernel]
    mask = given.mask if kernel is CUDNN else given.starts
    qkv, do, mask = given.qkv.to("meta"), given.do.to("meta"), mask.to("meta")
    o, lse = forward_by(kernel, qkv, *shape(case, mask))
    assert o.shape == do.shape
    assert (lse.shape, lse.is_contiguous()) == ((case.batch, case.num_q, case.sequence), True)
    gradients = backward_by(kernel, do, qkv, o, lse, *shape(case, mask))
    assert [x.shape[1] for x in gradients] == [n * case.width for n in (case.num_q, case.num_kv, case.num_kv)]
    assert all(x.shape[0] == len(qkv) and x.is_contiguous() for x in gradients)


def times(forward, backward):
    return {"forward": {"ms": forward}, "backward": {"ms": backward}}


def test_verdict():
    kernels = {"a": times(1.0, 2.0), "b": times(0.5, 2.42), "c": {"error": "no"}}
    assert total(kernels["c"]) == math.inf
    found = verdict(kernels, "a")
    assert (found["chosen"], found["fastest"], found["rule_holds"]) == ("a", "b", True)
    assert found["slower_by"] == pytest.approx(0.08 / 2.92)
    assert verdict(kernels, "b")["slower_by"] == 0.0
    assert not verdict({**kernels, "b": times(0.5, 2.4)}, "a")["rule_holds"]


def test_sqnr():
    truth = torch.full((100,), 2.0)
    assert benchmark.sqnr(truth, truth + 0.02) == pytest.approx(40.0, abs=1e-3)
    assert benchmark.sqnr(truth, truth) == math.inf
    assert benchmark.sqnr(truth, torch.full((100,), torch.nan)) == -math.inf


def _reference(slip=0.0):
    """The reference as a kernel, o off by `slip`."""

    def tokens(*heads):
        return [x.transpose(1, 2).flatten(0, 1).flatten(1) for x in heads]

    def unpack(q, k):
        return q.shape[0], q.shape[1], k.shape[1]

    def forward(q, k, v, mask, scale):
        o, lse = attention.reference(torch.cat(tokens(q, k, v), 1), mask, *unpack(q, k), scale)
        return (o + slip).view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2), lse

    def backward(do, q, k, v, o, lse, mask, scale):
        do, q_, k_, v_, o = tokens(do, q, k, v, o)
        found = attention_backward.reference(do, torch.cat((q_, k_, v_), 1), o, lse, mask, *unpack(q, k), scale)
        return tuple(x.view(q.shape[0], q.shape[2], -1, q.shape[3]).transpose(1, 2) for x in found)

    return Kernel(forward, backward)


def _refuse(*_):
    raise RuntimeError("No execution plans support the graph.\nMore")


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Kernels in plain PyTorch, times made up: each the next whole number of ms."""
    clock = itertools.count(1.0)

    def time_ms(function, repeats):
        assert repeats == 3
        function()
        return {"ms": next(clock), "p20": 0.0, "p80": 0.0}

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(benchmark, "time_ms", time_ms)
    monkeypatch.setattr(benchmark, "peak_bytes", lambda function: (function(), 2**20)[1])


def test_a_row(without_a_gpu, monkeypatch):
    case = SMALL["causal"]._replace(sequence=64)
    rule = _reference()
    others = {"slightly off": _reference(0.01), "memory-efficient": Kernel(_refuse, _refuse), "cudnn": rule}
    monkeypatch.setattr(benchmark, "CUDNN", rule)
    monkeypatch.setattr("overcoat.kernels.attention.CUDNN", rule)
    monkeypatch.setattr(benchmark, "contestants", lambda given: others)
    row = benchmark.run(case, inputs(case, "cpu"), repeats=3)
    assert json.loads(json.dumps(row)) == row
    assert list(row["kernels"]) == ["cudnn", "slightly off", "memory-efficient"]
    assert row["kernels"]["cudnn"]["forward"] == {"ms": 1.0, "p20": 0.0, "p80": 0.0, "peak_bytes": 2**20}
    assert row["kernels"]["memory-efficient"] == {"error": "No execution plans support the graph."}
    assert 10 < row["kernels"]["slightly off"]["sqnr_db"] < 50
    assert (row["chosen"], row["fastest"], row["rule_holds"]) == ("cudnn", "cudnn", True)
    assert (row["case"], row["kind"], row["sequence"]) == ("causal", "causal", 64)
    lines = benchmark.text(row).splitlines()
    assert lines[1] == "causal: B2 S64 4/2 x 16, causal"
    assert lines[3].split() == ["cudnn", "1.000", "1", "2.000", "1", "nan"]
    assert lines[-2].endswith("No execution plans support the graph.")
    assert lines[-1] == "rule cudnn, fastest cudnn: holds"


@kinds
def test_the_command_writes_a_row_even_where_every_kernel_refuses(kind, without_a_gpu, monkeypatch, tmp_path, capsys):
    """As here, without CUDA: the rule's kernel is named all the same."""
    monkeypatch.setattr(benchmark, "CASES", (SMALL[kind],))
    monkeypatch.setattr(benchmark, "inputs", lambda case: inputs(case, "cpu"))
    out = tmp_path / "attention.jsonl"
    monkeypatch.setattr("sys.argv", ["attention", "--only", kind, "--repeats", "3", "--out", str(out)])
    benchmark.main()
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["benchmark"] == "attention"
    assert row["chosen"] == ("flash, packed" if kind == "packed" else "cudnn")
    assert all(it["error"] for it in row["kernels"].values())
    assert row["fastest"] is None
    assert not row["rule_holds"]
    assert "rule " in capsys.readouterr().out


@pytest.mark.gpu
@kinds
def test_kernels_compute_the_same(kind):
    case = SMALL[kind]._replace(width=64)
    row = benchmark.run(case, inputs(case), repeats=2)
    assert row["chosen"] in row["kernels"]
    for name in ("flash", "flash, packed", "memory-efficient"):
        if name in row["kernels"]:
            assert "error" not in row["kernels"][name], row["kernels"][name]
    assert all(it.get("sqnr_db", 99) > 35 for it in row["kernels"].values())
    for it in row["kernels"].values():
        assert "error" in it or min(it[way]["peak_bytes"] for way in ("forward", "backward")) > 0


def test_the_kernels_of_the_rule_are_those_compared():
    assert {CUDNN, FLASH, EFFICIENT} <= set(contestants(inputs(SMALL["causal"], "cpu")).values())
