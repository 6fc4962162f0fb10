"""BF16 products on CPUs without AVX-512: FP32's, rounded once; and that a training says so."""

import io

import pytest
import torch
from rich.console import Console

from overcoat.train import products
from overcoat.train import run as trainer
from tests.train.runs import MakeConfig


@pytest.fixture
def old_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_library", products._library)  # afterwards as it was
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert products.compute_in_fp32()


@pytest.mark.usefixtures("old_cpu")
def test_products_are_those_of_fp32_rounded_once() -> None:
    a, b, c = (torch.randn(shape).bfloat16() for shape in ((3, 5, 40), (3, 40, 7), (5, 7)))
    wide = a.float() @ b.float()
    assert torch.equal(torch.bmm(a, b), wide.bfloat16())
    assert torch.equal(a[0] @ b[0], wide[0].bfloat16())
    assert torch.equal(torch.mm(a[0], b[0], out=torch.empty_like(c)), wide[0].bfloat16())
    added = torch.addmm(c.float(), a[0].float(), b[0].float(), beta=0.5, alpha=2.0).bfloat16()
    assert torch.equal(torch.addmm(c, a[0], b[0], beta=0.5, alpha=2.0), added)
    assert torch.equal(c.clone().addmm_(a[0], b[0], beta=0.5, alpha=2.0), added)
    assert torch.equal(a[0].float() @ b[0].float(), wide[0])


@pytest.mark.usefixtures("old_cpu")
def test_what_pytorch_refuses_is_refused() -> None:
    """Or tests would pass here alone."""
    a, b = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(a.float(), b)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.addmm(torch.zeros(5), a, b)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(a, b, out=torch.empty(3, 5))


@pytest.mark.usefixtures("old_cpu")
def test_an_empty_out_takes_the_shape_of_the_product() -> None:
    a, b, out = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16(), torch.empty(0, dtype=torch.bfloat16)
    torch.mm(a, b, out=out)
    assert torch.equal(out, a @ b)


@pytest.mark.usefixtures("old_cpu")
def test_gradients_flow_through() -> None:
    x, w = (torch.randn(4, 8).bfloat16().requires_grad_() for _ in range(2))
    torch.nn.functional.linear(x, w).sum().backward()
    assert torch.equal(x.grad, w.detach().float().sum(0).expand(4, 8).bfloat16())


def test_a_cpu_with_avx512_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_library", None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not products.compute_in_fp32()
    assert products._library is None


@pytest.mark.parametrize("is_old", [True, False])
def test_a_training_asks_and_says_so(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    monkeypatch.setattr(trainer, "compute_in_fp32", lambda: is_old)
    config = make_config("train.steps=1", "schedule.warmup_steps=0", "model.dtype=bfloat16")
    out = io.StringIO()
    trainer.run_once(config, Console(file=out, width=200), "one")
    assert ("BF16 products are computed in FP32" in out.getvalue()) == is_old
