"""The products that are timed, and the fit of the constants."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.common import RESULTS
from benchmarks.gemm import H200_MULTIPROCESSORS, error_of_fast, fit, products, text
from overcoat.bench.shapes import BLOCKS
from overcoat.kernels.gemm_tiles import TILES, choose, relative_time

SIZES = [(8192, 12288, 4096), (8192, 4096, 11008), (4096, 11008, 8192), (16384, 4096, 4096), (8192, 6144, 2048)]


def test_products_of_a_block():
    """Grouped-query heads, and as many products as a block has; each in as many FLOPs as its forward."""
    found = {product.name: product for product in products(BLOCKS["llama3-8b"]) if product.fast}
    assert len(found) == 12
    assert found["forward q k v"][1:4] == (8192, 6144, 4096)
    assert found["dgrad gate up"][1:4] == (8192, 4096, 28672)
    assert found["wgrad down"][1:4] == (4096, 14336, 8192)
    for layer in ("q k v", "out", "gate up", "down"):
        sizes = {rows * columns * inner for name, rows, columns, inner, _ in found.values() if name.endswith(layer)}
        assert len(sizes) == 1


def test_the_fit_finds_what_made_the_times():
    rows = []
    for number, size in enumerate(SIZES):
        offers = [
            {"tile": tile, "cluster": cluster, "us": (1 + number) * relative_time(kind, *size, H200_MULTIPROCESSORS)}
            for (tile, cluster), kind in TILES.items()
        ]
        offers.append({"tile": 999, "cluster": 1, "us": 1.0})
        rows.append({"fast": True, "rows": size[0], "columns": size[1], "inner": size[2], "offers": offers})
    rows += [{**rows[0], "fast": False, "offers": [{"tile": 24, "cluster": 5, "us": 1e9}]}, {"host_us": {}}]
    for key, (per_product, per_tile) in fit(rows).items():
        # The fit is of logarithms: exact to first order.
        assert per_product == pytest.approx(TILES[key].per_product, abs=2e-3)
        assert per_tile == pytest.approx(TILES[key].per_tile, abs=2e-3)


def test_the_rule_on_recorded_times():
    """Of what was measured on hot H200s: products take less time in all, and none takes much more."""
    rows = [json.loads(line) for line in (RESULTS / "gemm.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("fast")]
    assert len(rows) > 60
    chosen = []
    for row in rows:
        kinds = [(offer["tile"], offer["cluster"]) for offer in row["offers"]]
        place = choose(kinds, row["rows"], row["columns"], row["inner"], H200_MULTIPROCESSORS)
        chosen.append(row["offers"][place]["us"])
        assert chosen[-1] < 1.04 * row["torch_us"], row["product"]
    assert sum(chosen) < 0.975 * sum(row["torch_us"] for row in rows)


def test_error_of_fast_accumulation():
    full = torch.tensor([3.0, -4.0])
    found = error_of_fast(0.99 * full, full)
    assert found["fast_db"] == pytest.approx(40.0, abs=1e-3)
    assert found["shrinks_by"] == pytest.approx(0.01, abs=1e-5)


def test_text_of_a_row():
    row = {
        "product": "dgrad out",
        "rows": 1000,
        "columns": 1000,
        "inner": 500,
        "fast": True,
        "torch_us": 2.0,
        "us": 1.0,
    }
    line = text({**row, "offers": [{"tile": 24, "cluster": 5, "us": 1.5}, {"tile": 29, "cluster": 3, "us": 1.0}]})
    assert "-50.0%" in line
    assert "1000 TFLOP/s" in line
    assert line.index("29/3") < line.index("24/5")


@pytest.mark.gpu
def test_rows():
    from benchmarks.gemm import Product, host_us, measure

    row = measure(Product("wgrad out", 1024, 2048, 4096), 0.01)
    assert row["us"] > 0
    assert 0 <= row["chosen"] < len(row["offers"])
    assert all(offer["us"] > 0 for offer in row["offers"])
    assert row["fast_db"] > 40
    assert abs(row["shrinks_by"]) < 0.01
    assert set(host_us(50)) == {"torch", "overcoat"}
