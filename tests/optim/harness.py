"""Parameters of awkward shapes, gradients, training and comparing: what the optimizer's tests share."""

import torch

SHAPES = [(), (1,), (5,), (300,), (3, 128), (4, 200), (6, 3, 3, 5), (3, 4, 80), (2, 5, 200), (0, 7), (2, 0)]


def make_params(dtype=torch.float32, shapes=SHAPES, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def set_grads(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale * (1 + step % 3)).to(p.device, p.dtype)


def train(params, optimizer, steps, first=0, **kwargs):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step(**kwargs)


def snapshot(params, optimizer):
    """Copies of all parameters and states; offloaded states through `state_dict`, which waits for them."""
    states = optimizer.state_dict()["state"]
    values = [value for index in sorted(states) for value in states[index].values()]
    return [p.detach().clone() for p in params] + [value.detach().clone() for value in values]


def assert_same_bits(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8))
