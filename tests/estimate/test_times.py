"""What a step's ops do, and what of it takes how long: by hand for single ops and clusters; runs: tests/benchmarks."""

from __future__ import annotations

import pytest
import torch

from overcoat import Recipe, cli
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.meter import LibraryAttention, Meter
from overcoat.estimate.times import (
    ADAMW,
    ATTENTION,
    LINK_SHOWS,
    MASKED,
    MEMORY,
    NVLINK,
    PCIE_BOTH,
    Cluster,
    Sizes,
    Work,
    step_times,
)  # fmt: skip
from overcoat.kernels.attention import attention, attention_backward
from overcoat.kernels.gemm import block_gemm, gemm
from tests.bench.peers import SMALL

GB = 10**9


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8(*shape):
    return meta(*shape, dtype=torch.float8_e4m3fn)


SCALE, BOOL = meta(1, dtype=torch.float32), torch.bool
BLOCKS = (meta(1, 32, dtype=torch.float32), meta(1, 4, dtype=torch.float32))
OF_QKV = (2, 4, 2, 0.1)  # rows, heads, scale
QKV = meta(2 * 64, 8 * 16)
TIME = [of * 2 * 64**2 * 64 * (1 + half / 64) / rate for of, (rate, half) in zip((2, 5), ATTENTION)]
LIBRARY = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("call", "kind", "amount"),
    [
        (lambda: gemm(fp8(32, 128), fp8(64, 128), SCALE, SCALE, None, torch.bfloat16, True), "fp8", 2 * 32 * 128 * 64),
        (lambda: gemm(fp8(32, 16), fp8(64, 16), SCALE, SCALE, None, torch.bfloat16, False), "fp8 exact", 2 * 32 * 1024),
        (lambda: block_gemm(fp8(32, 128), fp8(64, 128), *BLOCKS, True, None, torch.bfloat16), "fp8 blocks", 2**19),
        (lambda: meta(8, 16) @ meta(16, 32), "bf16", 2 * 8 * 16 * 32),
        (lambda: meta(8, 32).addmm_(meta(8, 16), meta(16, 32)), "bf16", 2 * 8 * 16 * 32),
        (lambda: attention(QKV, None, *OF_QKV), "attention", TIME[0]),
        (lambda: attention(QKV, None, *OF_QKV, False), "attention", 2 * TIME[0]),
        (lambda: attention(QKV, meta(1, 1, 64, 64, dtype=BOOL), *OF_QKV), "attention", MASKED * TIME[0]),
        (lambda: attention(QKV, meta(9, dtype=torch.int32), *OF_QKV), "attention", TIME[0]),
        (lambda: attention_backward(meta(128, 64), QKV, meta(128, 64), SCALE, None, *OF_QKV), "attention", TIME[1]),
        (lambda: LIBRARY(*[meta(2, 4, 64, 16)] * 3, is_causal=True), "attention", TIME[0]),
        (lambda: meta(8, 16) + meta(16), "bytes", 2 * (8 * 16 + 16 + 8 * 16)),
        (lambda: meta(8, 16).mul_(meta(16)), "bytes", 2 * (8 * 16 + 16 + 8 * 16)),
        (lambda: meta(8, 16).view(16, 8).t().detach(), None, 0),
    ],
)
def test_what_an_op_does(call, kind, amount):
    with Meter(work=(work := Work())), LibraryAttention():
        call()
    assert dict(work) == ({} if kind is None else {(False, "launches"): 1, (False, kind): pytest.approx(amount)})


WORK = Work()
WORK[False, "bytes"], WORK[True, "bytes"] = MEMORY, 2 * MEMORY  # a second ahead, two back
SIZES = Sizes(weights=NVLINK // 3, trained=10 * GB, states=3 * GB, offloaded=0, kept_on_host=0)
COPIES = 6 * SIZES.weights / MEMORY


@pytest.mark.parametrize(
    ("cluster", "links"),
    [
        (Cluster(), 0.0),
        (Cluster(4), COPIES + LINK_SHOWS * 0.75),
        (Cluster(8, 2, False, NVLINK / 16), COPIES + 3.5 + LINK_SHOWS * 3 - 3),  # four GPUs' network: a quarter
        (Cluster(8, 2, True, 5 * GB), COPIES + LINK_SHOWS * (0.75 + 2)),  # ten GB once around
    ],
)
def test_what_shows_of_gathering_and_reducing(cluster, links):
    times = step_times(WORK, SIZES, 1, False, cluster)
    assert times.forward + times.backward == 3.0
    assert times.optimizer == pytest.approx((4 * SIZES.trained + 2 * SIZES.states) / ADAMW)
    assert times.links == pytest.approx(links)
    twice = step_times(WORK, SIZES, 2, False, cluster)
    assert (twice.forward, twice.links, twice.optimizer) == (2.0, pytest.approx(2 * links), times.optimizer)


def test_the_host_decides_where_the_gpu_is_faster():
    work = Work()
    work.update(WORK)
    work[False, "launches"] = 10**6
    times = step_times(work, SIZES, 1, False, Cluster())
    assert times.step == times.host == pytest.approx(65.0)


@pytest.mark.parametrize(("released", "shown"), [(False, 4.0), (True, 4.0 + 0.5 * 2 - 2)])
def test_offloaded_states_cross_behind_the_backward_if_it_steps(released, shown):
    times = step_times(WORK, SIZES._replace(offloaded=4 * PCIE_BOTH), 1, released, Cluster())
    assert times.optimizer + times.links == pytest.approx(shown)


def test_a_models_products_are_counted():
    """6 operations a weight and token, the head's in BF16; of recomputed blocks 8, without the last product's."""
    predictor, layer = Predictor(SMALL.config()), 128 * (128 + 2 * 64 + 128 + 3 * 256)
    for recipe, expected in ((Recipe(), 6 * layer), (Recipe.leanest(), 8 * layer - 2 * 128 * 256)):
        work = predictor._run(1, 64, Setup(recipe), 1)[1].work
        assert sum(work[back, kind] for kind in ("fp8", "fp8 exact") for back in (False, True)) == 2 * 64 * expected
        assert work[False, "bf16"] == 6 * 64 * 128 * SMALL.config().vocab_size


def test_the_command_says_how_fast(capsys):
    words = ["estimate", "--model", "124m", "--batch", "8", "--seq", "1024"]
    assert cli.main([*words, "--gpus", "4", "--nodes", "2", "--hybrid"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s on each H200 (" in out
    assert "2 hosts, 50 GB/s between them" in out
    assert cli.main([*words, "--gpus", "3", "--nodes", "2"]) == 2
    assert "--gpus 3 --nodes 2" in capsys.readouterr().err
