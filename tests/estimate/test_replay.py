"""What is played again of blocks that are alike is what they would have done, to the byte."""

from __future__ import annotations

import contextlib
import importlib
import itertools

import pytest
import torch

from overcoat import Recipe
from overcoat.block import run
from overcoat.estimate import Setup
from overcoat.estimate.dry_run import dry_run, trained_model
from overcoat.estimate.meter import Meter
from overcoat.estimate.replay import alike_blocks
from overcoat.estimate.times import Work
from tests.models.zoo import KINDS, make_model
from tests.nightly import mostly_nightly

# Of the text of a vision-language model alone nothing is estimated.
KINDS_ESTIMATED = [kind for kind in KINDS if not kind.endswith("-vl")]
BLOCK = Recipe(checkpoint="block")
SETUPS = {
    "default": (Setup(), 1),
    "kept in 16 bits": (Setup(Recipe(kept_attention="bf16")), 1),
    "checkpoints": (Setup(BLOCK, release_gradients=True), 1),
    "in 128x128 blocks": (Setup(Recipe(linear_scaling="block"), accumulation=2), 1),
    "on the host": (Setup(Recipe(offload_blocks=2)), 1),
    "sharded": (Setup(BLOCK), 4),
    "gathered in FP8": (Setup(all_gather="fp8"), 4),  # its forwards run: they keep scales that others hold
}


# Every setup of Llama, and every way to compute a block once.
IN_CI = [
    *(("llama", setup) for setup in SETUPS),
    ("gemma2", "sharded"),
    ("gpt_oss", "default"),
    ("mixtral", "checkpoints"),
]


@pytest.mark.parametrize(("kind", "setup"), mostly_nightly(itertools.product(KINDS_ESTIMATED, SETUPS), IN_CI))
def test_nothing_changes(kind, setup, monkeypatch):
    """Twice: as it is remembered, and as it was."""
    chosen, gpus = SETUPS[setup]
    model = trained_model(make_model(kind, layers=4).config, chosen, gpus)
    ran, function = [], run.block_forward
    monkeypatch.setattr(run, "block_forward", lambda *args: ran.append(len(args)) or function(*args))

    def runs():
        return dry_run(model, 2, 100, chosen)

    with monkeypatch.context() as without:
        module = importlib.import_module("overcoat.estimate.dry_run")
        without.setattr(module, "alike_blocks", lambda *_: contextlib.nullcontext())
        runs()  # makes the model's tables
        expected = runs()
    each = len(ran) // 2
    for found in (runs(), runs()):
        assert found._replace(work=expected.work) == expected
        assert found.work == pytest.approx(expected.work, rel=1e-12)
    if setup != "gathered in FP8":
        assert len(ran) - 2 * each < each  # two runs take fewer than one did


def twice(monkeypatch, function, *shape):
    """What a block's forward is given, returns and allocates in two calls."""
    monkeypatch.setattr(run, "block_forward", function)
    with Meter(work=Work()) as meter, alike_blocks(meter):
        x = torch.empty(shape, device="meta")
        results = [run.block_forward(x) for _ in range(2)]
        sizes = [size for size, _ in meter.allocations[1:]]
    return x, results, sizes


def test_one_that_keeps_what_it_does_not_return_runs_again(monkeypatch):
    kept = []

    def keeps(x):
        kept.append(x + 1.0)
        return x * 2.0

    assert twice(monkeypatch, keeps, 256)[2] == [1024] * 4
    assert len(kept) == 2


def test_one_that_returns_what_it_was_not_given_runs_again(monkeypatch):
    other, calls = torch.empty(256, device="meta"), []
    _, results, _ = twice(monkeypatch, lambda x: calls.append(x) or other, 512)
    assert len(calls) == 2
    assert results[0] is results[1] is other


def test_results_lie_where_they_did(monkeypatch):
    """In memory of their own, in each other's, and in that of what was given."""

    def forward(x):
        calls.append(0)
        z = x + 1.0
        return [z, z[4:].view(4, 3), (x[2:], None, 7)]

    calls = []
    x, (first, again), sizes = twice(monkeypatch, forward, 16)
    assert len(calls) == 1
    assert sizes == [512, 512]
    for z, part, (of_x, nothing, seven) in (first, again):
        assert z.untyped_storage()._cdata == part.untyped_storage()._cdata
        assert of_x.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert (part.shape, part.storage_offset(), of_x.storage_offset(), nothing, seven) == ((4, 3), 4, 2, None, 7)
    assert first[0].untyped_storage()._cdata != again[0].untyped_storage()._cdata


def test_what_others_ask_for_is_not_played(monkeypatch):
    """Another thread's blocks, with a mode or without."""
    calls = []
    monkeypatch.setattr(run, "block_forward", calls.append)
    with alike_blocks(Meter(work=Work())):
        for mode in (contextlib.nullcontext(), Meter(work=Work())):
            with mode:
                run.block_forward(7)
                run.block_forward(7)
    assert calls == [7] * 4


@pytest.mark.parametrize("order", [1, -1])
def test_weights_in_8_and_in_16_bits_are_not_alike(order, monkeypatch):
    """What is gathered in FP8, and the only shard, which a process holds as it is."""
    config = make_model("llama", layers=3).config
    ways = {4: Setup(all_gather="fp8"), 1: Setup(all_gather="fp8", replicated=True)}

    def works(gpus):
        return {each: dry_run(trained_model(config, ways[each], each), 2, 60, ways[each]).work for each in gpus}

    with monkeypatch.context() as without:
        module = importlib.import_module("overcoat.estimate.dry_run")
        without.setattr(module, "alike_blocks", lambda *_: contextlib.nullcontext())
        expected = works(ways)
    for gpus, work in works([*ways][::order]).items():
        assert work == pytest.approx(expected[gpus], rel=1e-12)
