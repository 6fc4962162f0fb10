"""Parameters cut for staging buffers: everything once, nothing too large, groups whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overcoat.optim.arguments import STATE_LISTS, Arguments
from overcoat.optim.pieces import ALIGNMENT, Layout, cut, packed, states_of
from overcoat.optim.state import init_state

SHAPES = [(), (1,), (300,), (6, 1), (3, 128), (40, 200), (6, 3, 3, 5), (0, 7), (2, 0), (1, 640)]


def arguments(moments=("sqrt8", "log8"), group_size=128):
    """Parameters of all shapes; states hold the running number of their byte, so that each can be told."""
    params = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    group = {"moments": moments, "group_size": group_size, "master": "auto"}
    states = [init_state(param, group) for param in params]
    lists = {name: [state[key] for state in states] if key in states[0] else [] for name, key in STATE_LISTS.items()}
    for tensors in states_of(Arguments(params, lists, [], [], "bf16+8", group_size, {})).values():
        for tensor in tensors:
            flat = tensor.view(-1).view(torch.uint8)
            flat.copy_(torch.arange(flat.numel()) % 251)
    return Arguments(params, lists, list(range(len(params))), [0] * len(params), "bf16+8", group_size, {})


@given(size=st.integers(3000, 40_000), group_size=st.sampled_from([16, 128]))
def test_chunks_hold_everything_once_in_order_and_fit(size, group_size):
    whole = arguments(("e4m3x", "bf16"), group_size)
    chunks = list(cut(whole, size))
    lists = states_of(whole)
    for pieces in chunks:
        taken = [piece.of(tensors[piece.owner]).nbytes for piece in pieces for tensors in lists.values()]
        assert packed(taken)[1] <= size
    for owner, param in enumerate(whole.params):
        pieces = [piece for chunk in chunks for piece in chunk if piece.owner == owner]
        for tensors in (*lists.values(), whole.params):
            parts = [piece.of(tensors[owner]).reshape(-1) for piece in pieces]
            expected = tensors[owner].reshape(-1)
            assert torch.equal(torch.cat([*parts, expected[:0]]).view(torch.uint8), expected.view(torch.uint8))
        for piece in pieces:
            assert param.dim() > 1 or piece.first_element % group_size == 0
            assert piece.first_group == piece.start * Layout.of(param, group_size).groups


def test_what_fits_is_one_chunk():
    whole = arguments()
    size = packed([tensor.nbytes for tensors in states_of(whole).values() for tensor in tensors])[1]
    assert len(list(cut(whole, size))) == 1
    assert len(list(cut(whole, size - ALIGNMENT))) == 2


def test_a_row_that_does_not_fit_is_an_error_that_names_the_remedy():
    with pytest.raises(ValueError, match=r"shape \(40, 200\).*offload_buffer"):
        list(cut(arguments(), 500))
