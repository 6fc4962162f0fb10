"""What a step's ops do, and what of it takes how long: by hand for single ops and clusters; runs: tests/benchmarks."""

from __future__ import annotations

import math

import pytest

from overcoat import Recipe, cli
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.times import (
    ADAMW,
    LINK_SHOWS,
    MEMORY,
    NVLINK,
    PCIE_BOTH,
    Cluster,
    Sizes,
    Work,
    step_times,
)  # fmt: skip
from tests.benchmarks.peers import EXPERTS, SMALL

GB = 10**9


WORK = Work()
WORK[False, "bytes"], WORK[True, "bytes"] = MEMORY, 2 * MEMORY  # a second ahead, two back
THIRD = NVLINK // 3
SIZES = Sizes(weights=THIRD, gathered=THIRD, reduced=THIRD, trained=10 * GB, states=3 * GB, offloaded=0, kept_on_host=0)
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


@pytest.mark.parametrize("cluster", [Cluster(3, 2), Cluster(network=0.0), Cluster(network=math.nan)])
def test_a_cluster_that_cannot_be_is_refused(cluster):
    with pytest.raises(ValueError, match="and a rate above 0"):
        cluster.check()


def test_what_travels_in_fp8_is_summed_in_fp32_and_read_on_another_gpu():
    sizes = SIZES._replace(gathered=THIRD // 2, reduced=2 * THIRD)
    times, memory = step_times(WORK, sizes, 1, False, Cluster(2, gpu="h100")), 3.35 / 4.8
    assert times.forward + times.backward == pytest.approx(3.0 / memory)
    # Copies of 4 halves, 3 and by half 3; codes of half the weights by half: 6 and 2.
    copies = (4 / 2 + 3 + 3 / 2 + 8 / 4) * THIRD / (memory * MEMORY)
    assert times.links == pytest.approx(copies + LINK_SHOWS * 0.5)


def test_the_host_decides_where_the_gpu_is_faster():
    work = Work()
    work.update(WORK)
    work[False, "launches"] = 10**6
    times = step_times(work, SIZES, 1, False, Cluster())
    assert times.step == times.host == pytest.approx(95.0)


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


WIDE_EXPERTS = EXPERTS.changed(hidden_size=1024, intermediate_size=1024)
WIDTH, HEAD = 1024, 1024 * 320


@pytest.mark.parametrize(("tokens", "multiplied", "exact"), [(64, 0, 0), (8192, 1, 0), (65536, 1, 1)])
def test_experts_multiply_the_tokens_that_chose_them_in_fp8(tokens, multiplied, exact):
    """Top k of them, not all; few tokens take as long as the weights of all experts are read, which counts as bytes.
    Weight gradients of many tokens are added exactly."""
    work = Predictor(WIDE_EXPERTS.config())._run(1, tokens, Setup(), 1)[1].work
    # Of two layers: attention and 2 of 8 experts; routers and the head stay in BF16.
    products = 2 * 2 * tokens * WIDTH * (3 * WIDTH + 2 * 3 * WIDTH * multiplied)
    routers = 2 * 2 * tokens * WIDTH * 8
    assert work[False, "fp8"] == work[True, "fp8"] - products * (1 - exact) == products
    assert (work[False, "fp8 exact"], work[True, "fp8 exact"]) == (0, products * exact)
    assert (work[False, "bf16"], work[True, "bf16"]) == (routers + 6 * tokens * HEAD, 2 * routers)


@pytest.mark.parametrize(("tokens", "multiplied"), [(64, 0), (8192, 1)])
def test_experts_multiply_the_tokens_that_chose_them_in_bf16(tokens, multiplied):
    work = Predictor(WIDE_EXPERTS.config())._run(1, tokens, Setup(Recipe.bf16()), 1)[1].work
    expected = 2 * tokens * (2 * WIDTH * (3 * WIDTH + 2 * 3 * WIDTH * multiplied + 8) + HEAD)
    assert (work[False, "bf16"], work[True, "bf16"]) == (expected, 2 * expected)


def test_the_command_says_how_fast(capsys):
    words = ["estimate", "--model", "124m", "--batch", "8", "--seq", "1024"]
    assert cli.main([*words, "--gpus", "4", "--nodes", "2", "--hybrid"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s on each H200 (" in out
    assert "2 hosts, 50 GB/s between them" in out
    assert "a slow or a fast host" in out
    assert cli.main([*words, "--batch", "64", "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert "tokens/s on each H100:" in out
    assert "a slow or a fast host" not in out
    assert cli.main([*words, "--gpus", "3", "--nodes", "2"]) == 2
    assert "--gpus 3 --nodes 2" in capsys.readouterr().err
