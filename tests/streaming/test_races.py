"""Copies, steps and layers never touch the same memory at once: the order of `Stream`'s events, checked on a CPU."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any

import pytest
import torch

from overcoat import Recipe
from overcoat.optim.sharding import local
from overcoat.streaming import sharded
from overcoat.streaming.layers import Stack
from overcoat.streaming.sharded import ShardedStack
from overcoat.streaming.stream import Stream
from tests.models.zoo import make_batch, make_model
from tests.streaming.races import COMPUTE, RaceDetector
from tests.streaming.test_stream import SMALL, loss_of, prepare

# Waits of the current stream by the method that calls `_wait`, and events that `_on` waits for: (lane, which of them).
WAITS = ("_on_device", "_enter", "_before_backward", "_bound_gradients")
EVENTS = [("codes", 0), ("codes", 1), ("in", 0), ("update", 0), ("out", 0)]


def evaluated(model: Any) -> None:
    with torch.no_grad():
        model.eval()(**make_batch(length=16))
    model.train()


def run(
    monkeypatch: Any, without: Any = None, evaluate: bool = False, passes: int = 1, prepare: Any = prepare
) -> list[str]:
    """Races of three streamed steps. without: a wait, or an event, that is left out; evaluate: after each forward and
    step; passes: of a step; prepare: what makes the optimizer and streams the model."""
    detector, numbers = RaceDetector(), itertools.count()

    def wait(self, event):
        if sys._getframe(1).f_code.co_name != without:
            detector.wait(event)

    def on(self, lane, *events):
        return detector.on(lane, *[each for place, each in enumerate(events) if (lane, min(place, 1)) != without])

    def watched(move):
        def moved(self, *arguments):
            move(self, *arguments)
            for name, memories in (("slot", self.slots), ("buffer", [buffer.memory for buffer in self.buffers])):
                for place, memory in enumerate(memories):
                    detector.watch(f"{name} {place}", memory)
            for place, stack in enumerate(self.stacks):
                detector.watch(f"host codes {place}", stack.sent)
                detector.watch(f"host weights {place}", stack.host)

        return moved

    def stepped(step):
        def of(self, entries):
            """The step's reference runs unseen; FP32 gradients are sums, in memory that is watched."""
            for _, _, param, grad in entries:
                detector.access(local(grad), False, "step")
                if (copies := self.stepped_on_device([param])) is not None:
                    detector.access(copies[0], True, "step")
            step(self, entries)

        return of

    def made(grad):
        grad = local(grad)
        detector.watch_until_freed(f"gradient {next(numbers)}", grad, COMPUTE)
        detector.access(grad, True, "made")

    def taken(take):
        def of(self, number, index, param, grad):
            made(grad)
            take(self, number, index, param, grad)

        return of

    def added(adds_up):
        def of(self, param, leaf):
            if self.accumulates and id(param) in self.owners:
                made(leaf.grad)
            return adds_up(self, param, leaf)

        return of

    def summed(sums_on_device):
        def of(self, stack, entries):
            buffer = self.buffers[stack.place]
            if not buffer.sums.numel():
                buffer.sums = torch.empty(4 * max(sum(of.sizes) for of in self.stacks), dtype=torch.float32)
                detector.watch(f"sums {stack.place}", buffer.sums)
            if stack.sums is not None and not stack.has_sums:
                detector.watch(f"host sums {next(numbers)}", stack.sums)
            return sums_on_device(self, stack, entries)

        return of

    def encoded(encode):
        def of(self, weights):
            codes = encode(self, weights)
            made = [codes, self.leaves[0].scale, self.leaves[0].w_amax]
            for tensor in made:
                detector.watch_until_freed(f"codes {next(numbers)}", tensor, "update")
                detector.access(tensor, True, "made")
            return codes

        return of

    def gathered(gather):
        def of(weight, place, group):
            detector.access(weight, True, "gather")
            gather(weight, place, group=group)

        return of

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "_wait", wait)
        patch.setattr(Stream, "_now", lambda self: detector.now())
        patch.setattr(Stream, "_on", on)
        for owner, name, change in (
            (Stream, "_move", watched),
            (Stream, "_step", stepped),
            (Stream, "_take", taken),
            (Stream, "adds_up", added),
            (Stream, "_sums_on_device", summed),
            (Stack, "encode", encoded),
            (ShardedStack, "encode", encoded),
            (sharded, "_all_gather", gathered),
        ):
            patch.setattr(owner, name, change(getattr(owner, name)))
        with detector:
            model = make_model("llama", layers=4, **SMALL)
            optimizer, handle = prepare(model, Recipe.leanest(), "cpu", True)
            for step in range(3):
                for number in range(passes):
                    with handle.accumulate() if number < passes - 1 else contextlib.nullcontext():
                        loss = loss_of(model, step, "cpu")
                        if evaluate:
                            evaluated(model)
                        loss.backward()
                    del loss
                optimizer.step()
                optimizer.zero_grad()
                if evaluate:
                    evaluated(model)
    return detector.races


@pytest.mark.parametrize(("evaluate", "passes"), [(False, 1), (True, 1), (False, 3)])
def test_no_access_races(evaluate, passes, monkeypatch):
    assert run(monkeypatch, evaluate=evaluate, passes=passes) == []


@pytest.mark.parametrize("without", [*WAITS, *EVENTS], ids=str)
def test_each_wait_is_needed(without, monkeypatch):
    assert run(monkeypatch, without)
