"""What a step's ops do, and what of it takes how long: by hand for single ops and clusters; runs: tests/benchmarks."""

from __future__ import annotations

import json
import math

import pytest
import torch

from overcoat import Recipe, cli
from overcoat.estimate import Predictor, Setup
from overcoat.estimate.times import (
    ADAMW,
    LINK_SHOWS,
    MEMORY,
    NVLINK,
    PCIE_BOTH,
    PRODUCTS,
    Cluster,
    Grouped,
    Sizes,
    Work,
    filled_tiles,
    step_times,
)  # fmt: skip
from overcoat.kernels.grouped import route, tile_count
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


@pytest.mark.parametrize(("released", "shown"), [(False, 4.0), (True, 4.0 + 0.5 * 3 - 2)])
def test_muons_products_are_not_hidden_by_the_transfers_of_its_states(released, shown):
    sizes = SIZES._replace(offloaded=4 * PCIE_BOTH, orthogonalizing=PRODUCTS["bf16"])  # a second
    times = step_times(WORK, sizes, 1, released, Cluster())
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


def by_operands(work: Work) -> Work:
    """Work with the GEMMs of experts among the others, if they take longer than their bytes."""
    found = Work()
    for (backward, kind), amount in work.items():
        if not isinstance(kind, Grouped):
            found[backward, kind] += amount
        elif kind.operations() / PRODUCTS[kind.kind] > kind.moved / MEMORY:
            found[backward, kind.kind] += amount * kind.operations()
    return found


@pytest.mark.parametrize(("tokens", "multiplied", "exact"), [(64, 0, 0), (8192, 1, 0), (65536, 1, 1)])
def test_experts_multiply_the_tokens_that_chose_them_in_fp8(tokens, multiplied, exact):
    """Top k of them, not all; few tokens take as long as the weights of all experts are read, which counts as bytes.
    Weight gradients of many tokens are added exactly."""
    work = by_operands(Predictor(WIDE_EXPERTS.config())._run(1, tokens, Setup(), 1)[1].work)
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


def loads(pairs: int, experts: int, load: float) -> torch.Tensor:
    """Numbers of the experts' pairs on a line from the busiest down, the last at 0 if the others' sum asks for it."""
    low, high = 0.0, load * load
    for _ in range(100):
        slope = (low + high) / 2
        line = (load - slope * torch.arange(experts, dtype=torch.float64) / experts).clamp(min=0)
        low, high = (slope, high) if line.sum() > experts else (low, slope)
    ends = (line.cumsum(0) * pairs / experts).round().long()
    return ends.diff(prepend=torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("load", [1.0, 1.3, 2.0, 5.0, 16.0])
def test_tiles_of_uneven_experts_are_those_that_routing_fills(load):
    """Of Qwen3-30B-A3B's 128 experts and 8 a token, and 4096 tokens: 256 pairs an expert."""
    experts, rows, pairs = 128, 128, 8 * 4096
    counts = loads(pairs, experts, load)
    assert counts.sum() == pairs
    assert counts.max() == pytest.approx(load * pairs / experts, rel=0.06)
    bounds = route(torch.arange(experts).repeat_interleave(counts)[:, None], experts, rows)[3]
    assert filled_tiles(pairs, experts, rows, load) == pytest.approx(int(bounds[-1]), abs=3)
    assert filled_tiles(pairs, experts, rows, load) <= tile_count(pairs, experts, rows)


def test_of_an_uneven_load_only_the_tiles_take_time():
    """Even: 2048 pairs an expert, 16 tiles. Uneven: 24, 22, 20, 18, 15, 13, 11 and 8."""
    predictor, tokens, setup = Predictor(WIDE_EXPERTS.config()), 8192, Setup()
    even, uneven = (predictor.times(1, tokens, setup, expert_load=load) for load in (1.0, 1.5))
    tiles = [filled_tiles(2 * tokens, 8, 128, load) for load in (1.0, 1.5)]
    assert tiles == [128, 131]
    # Of two layers: gate, up and down.
    more = 2 * 2 * (tiles[1] - tiles[0]) * 128 * 3 * WIDTH * WIDTH
    assert uneven.forward - even.forward == pytest.approx(more / PRODUCTS["fp8"])
    assert uneven.backward - even.backward == pytest.approx(2 * more / PRODUCTS["fp8"])
    assert uneven[2:] == even[2:]


@pytest.mark.parametrize("load", [0.5, 4.1, math.nan, math.inf])
def test_a_load_that_no_expert_can_have_is_refused(load):
    with pytest.raises(ValueError, match="from 1, an even load, to 4, where every token visits the expert"):
        Predictor(WIDE_EXPERTS.config()).times(1, 8192, Setup(), expert_load=load)


def test_the_command_takes_the_busiest_experts_load(capsys):
    words = ["estimate", "--model", "olmoe-1b-7b", "--batch", "4", "--json", "--expert-load"]
    found = []
    for load in ("1", "1.6"):
        assert cli.main([*words, load]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["seconds"]["forward"] > found[0]["seconds"]["forward"]
    assert found[1]["components"] == found[0]["components"]
    for other in (["--model", "124m"], ["--model", "olmoe-1b-7b", "--dtype", "float32"]):
        assert cli.main(["estimate", *other, "--expert-load", "2"]) == 2
        assert "load 2" in capsys.readouterr().err


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
