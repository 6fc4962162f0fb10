"""What the clock counts, on made-up CUDA events: every call takes a time that is known."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import LIBRARY, SUBJECTS, Call, measure_subject, recorded
from benchmarks.shapes import BlockShape
from benchmarks.timing import host_ms, time_ms
from overcoat.kernels.op import CATALOGUE
from overcoat.kernels.quantize import quantize_t
from overcoat.models.shapes import Model, sizes


@pytest.mark.gpu
def test_a_known_time_on_this_gpu() -> None:
    """Ten times the cycles take ten times as long, wherever the clock stands."""
    short, long = (time_ms(lambda n=n: torch.cuda._sleep(n), repeats=5)["ms"] for n in (10**6, 10**7))
    assert long / short == pytest.approx(10, rel=0.2)


@pytest.mark.gpu
def test_what_the_host_waits_for_is_not_its_own() -> None:
    """A step that only queues work returns at once, one that waits takes the device's time."""
    work = torch.zeros(1, device="cuda")
    assert host_ms(lambda: work.add_(1), repeats=3) < 5.0
    assert host_ms(lambda: work.add_(1).item(), repeats=3) > 10.0


# ---- `benchmarks.kernels`: training steps reach every kernel, bytes as counted by hand, a tiny run on a GPU --------


SHAPE = BlockShape(Model("LlamaConfig", sizes(256, 384, 1, 2, 1, 96)), 2, 64)
T, H, I = 128, 256, 384  # noqa: E741
# By hand: reads + writes of the large tensors; the rest (scales, maxima, tables) is within 5%.
BYTES = {
    "": {
        "amax": 2 * T * H,
        "norm_quantize": (2 + 1 + 1) * T * H,
        "quantize_operands": (2 + 1) * 3 * H * (H + I),
        "quantize_both": (2 + 2) * T * H,
        "rms_norm": (2 + 2) * T * H,
        "activation_encode": (2 + 1) * T * 2 * I,
        "activation_backward": (2 + 2 + 4 + 1) * T * I,
        "norm_backward": (2 + 2 + 1 + 2) * T * H,
        "cross_entropy_": (2 + 2) * T * 96,
    },
    "leanest": {"group_decode": (1 + 2) * T * H},
    "blocks": {"block_quantize_both": (2 + 2) * T * H},
    "norms after": {"add_norm_encode": (2 + 2 + 2 + 1) * T * H},
    "LayerNorm, GELU": {"activation_encode": (2 + 1) * T * I, "activation_backward": (2 + 1 + 3) * T * I},
}
# Of weights that travel in FP8, and of adapters.
NOT_REACHED = {"stack_codes", "activation_decode"}


def test_steps_reach_every_kernel_and_its_bytes_add_up() -> None:
    reached = set()
    for subject in SUBJECTS:
        calls = recorded(subject, SHAPE, "meta")
        reached |= {call.op.reference.__name__ for call in calls.values()}
        for name, expected in BYTES.get(subject, {}).items():
            found = [call.moved_bytes(call.run()) for key, call in calls.items() if key.startswith(f"{name}(")]
            assert any(size == pytest.approx(expected, rel=0.05) for size in found), (subject, name, found, expected)
    ours = {name: op.reference.__module__ for name, op in CATALOGUE.items() if op.kernel}
    of_ours = {name for name, module in ours.items() if module.startswith("overcoat.")}
    assert {name for name in of_ours - reached if ours[name].rpartition(".")[2] not in LIBRARY} == NOT_REACHED


@pytest.mark.gpu
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_tiny_run_measures_every_kernel(subject: str) -> None:
    found = measure_subject(subject, SHAPE, None, 4e12, [])
    assert found
    for call, figures in found.items():
        assert "error" not in figures, (call, figures)
        assert figures["ms"] > 0
        assert figures["share"] == pytest.approx(figures["bytes"] / figures["ms"] * 1e3 / 4e12)
        assert figures["share_of_same_size"] > 0
    assert not measure_subject(subject, SHAPE, None, 4e12, list(found))


def test_shares_of_a_copys_rate_and_of_a_copy_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that moves 12 KB in 4 us, where a copy of as much takes 3 us and a large one moves 6 GB a second."""
    monkeypatch.setattr(kernels, "time_ms", lambda call: {"ms": 4e-3, "p20": 3e-3, "p80": 5e-3})
    monkeypatch.setattr(kernels, "copy_ms", lambda moved: {12_004: 3e-3}[moved])
    call = Call(quantize_t, (torch.zeros(16, 250, dtype=torch.bfloat16), torch.tensor(1.0), "e4m3"))
    figures = kernels.measure(call, 6e9)
    assert (figures["bytes"], figures["share_of_same_size"]) == (12_004, 0.75)
    assert figures["TB_per_s"] == pytest.approx(3.001e-3)
    assert figures["share"] == pytest.approx(0.5, rel=1e-3)
