"""What is kept for a parameter: its tensors by name, their first values, checking, copies, devices, bytes."""

import math

import pytest
import torch

from overcoat.formats.moments import MOMENT_CODES
from overcoat.optim.state import (
    Field,
    bytes_to_offload,
    check_state,
    init_state,
    is_elsewhere,
    restore_state,
    state_fields,
)
from tests.optim.harness import assert_same_bits

K_ONE = 16  # k = 1, in sixteenths


def options(moments=("sqrt8", "log8"), group_size=128, master="auto"):
    return {"moments": moments, "group_size": group_size, "master": master}


def test_every_moment_code_has_a_state():
    for name, code in MOMENT_CODES.items():
        w = torch.nn.Parameter(torch.randn(2, 130))
        moments = ("sqrt8", name) if name == "log8" else (name, name)
        state = init_state(w, {"moments": moments, "group_size": 128, "master": "auto"})
        assert state["exp_avg_sq"].dtype == code.dtype
        assert (state["exp_avg_sq"].float() == 0).all()


def test_fields_of_a_matrix_by_hand():
    param = torch.zeros(4, 200, dtype=torch.bfloat16)
    assert state_fields(param, options()) == {
        "step": Field((), torch.float32),
        "exp_avg": Field((4, 200), torch.int8),
        "exp_avg_amax": Field((4, 2), torch.bfloat16),
        "exp_avg_sq": Field((4, 200), torch.uint8),
        "exp_avg_sq_scale": Field((4, 2), torch.int32),
        "remainder": Field((4, 200), torch.int8),
    }
    assert state_fields(param, options(("e4m3x", "e5m2x"), 16, "bf16+16")) == {
        "step": Field((), torch.float32),
        "exp_avg": Field((4, 200), torch.float8_e4m3fn),
        "exp_avg_amax": Field((4, 13), torch.bfloat16),
        "exp_avg_exponent": Field((4, 13), torch.uint8, K_ONE),
        "exp_avg_sq": Field((4, 200), torch.float8_e5m2),
        "exp_avg_sq_scale": Field((4, 13), torch.int32, K_ONE),
        "remainder": Field((4, 200), torch.int16),
    }


@pytest.mark.parametrize(("master", "dtype"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_plain_moments_have_no_groups_and_whole_masters_no_remainder(moments, master, dtype):
    fields = state_fields(torch.zeros(3, 5, dtype=dtype), options((moments, moments), master=master))
    kept = MOMENT_CODES[moments].dtype
    assert fields == {
        "step": Field((), torch.float32),
        "exp_avg": Field((3, 5), kept),
        "exp_avg_sq": Field((3, 5), kept),
    }


@pytest.mark.parametrize(
    ("shape", "per_group"),
    [
        ((), (1,)),
        ((1,), (1,)),
        ((300,), (3,)),
        ((0,), (0,)),
        ((6, 3, 3, 5), (6, 1)),
        ((0, 7), (0, 1)),
        ((2, 0), (2, 0)),
    ],
)
def test_groups_of_awkward_shapes(shape, per_group):
    fields = state_fields(torch.zeros(shape), options())
    assert fields["exp_avg"].shape == fields["exp_avg_sq"].shape == shape
    assert fields["exp_avg_amax"].shape == fields["exp_avg_sq_scale"].shape == per_group


@pytest.mark.parametrize("moments", [("sqrt8", "log8"), ("e4m3x", "e4m3x"), ("de8x", "e5m2"), ("bf16", "fp32")])
@pytest.mark.parametrize("shape", [(), (300,), (4, 200), (0, 7)])
def test_a_new_state_has_the_fields_and_their_first_values(moments, shape):
    param = torch.randn(shape).bfloat16()
    group = options(moments)
    state, fields = init_state(param, group), state_fields(param, group)
    assert list(state) == list(fields)
    for name, value in state.items():
        assert (tuple(value.shape), value.dtype) == (fields[name].shape, fields[name].dtype)
        assert (value.float() == fields[name].fill).all()
    check_state(state, param, group, 0)


def test_offload_keeps_all_but_the_step_count_in_host_memory():
    param = torch.zeros(4, 200, device="meta")
    for offload, elsewhere in ((False, "meta"), (True, "cpu")):
        state = init_state(param, options(), offload)
        assert state["step"].device.type == "meta"
        assert {value.device.type for name, value in state.items() if name != "step"} == {elsewhere}


def test_whether_a_state_is_elsewhere():
    """With offload only the step count has to be beside the parameter."""
    here, there = torch.zeros(4, 200), torch.zeros(4, 200, device="meta")
    assert not is_elsewhere(init_state(here, options()), here)
    assert is_elsewhere(init_state(here, options()), there)
    assert is_elsewhere(init_state(here, options(), True), there, True)
    offloaded = init_state(there, options(), True)
    assert not is_elsewhere(offloaded, there, True)
    assert is_elsewhere(offloaded, there, False)


# ---- saved states ---------------------------------------------------------------------------------------


def test_other_tensors_than_the_options_keep_are_named():
    param = torch.zeros(4, 200, dtype=torch.bfloat16)
    saved = init_state(param, options())
    for wrong in ({**saved, "max_exp_avg_sq": saved["exp_avg_sq"]}, {k: saved[k] for k in saved if k != "remainder"}):
        with pytest.raises(ValueError, match=r"parameter 5 has \[.*moments=\('sqrt8', 'log8'\) and master='auto' keep"):
            check_state(wrong, param, options(), 5)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("exp_avg", torch.zeros(4, 201, dtype=torch.int8), r"'exp_avg' of parameter 5 is torch.int8 \(4, 201\)"),
        ("exp_avg", torch.zeros(4, 200, dtype=torch.uint8), r"expected torch.int8 \(4, 200\)"),
        ("exp_avg_sq_scale", torch.zeros(4, 13, dtype=torch.int32), r"expected torch.int32 \(4, 2\)"),
        ("step", torch.zeros(1), r"'step' of parameter 5 is torch.float32 \(1,\), expected torch.float32 \(\)"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(name, value, words):
    param = torch.zeros(4, 200, dtype=torch.bfloat16)
    saved = {**init_state(param, options()), name: value}
    with pytest.raises(ValueError, match=words):
        check_state(saved, param, options(), 5)


def test_a_restored_state_is_a_contiguous_copy_of_the_same_bits():
    param = torch.zeros(4, 200, dtype=torch.bfloat16)
    saved = init_state(param, options(("e4m3x", "bf16")))
    for value in saved.values():
        raw = value.view(-1).view(torch.uint8)
        raw.copy_(torch.arange(raw.numel()) * 7 % 256)  # codes of NaN among them
    saved["exp_avg_sq"] = saved["exp_avg_sq"].t().contiguous().t()
    restored = restore_state(saved, param)
    assert list(restored) == list(saved)
    assert_same_bits([value.contiguous() for value in saved.values()], list(restored.values()))
    before = [value.clone() for value in restored.values()]
    for value in saved.values():
        value.view(torch.uint8 if value.dim() and value.element_size() == 1 else value.dtype).zero_()
    assert_same_bits(before, list(restored.values()))
    assert all(value.is_contiguous() for value in restored.values())


def test_a_restored_state_goes_where_the_parameter_is():
    saved = init_state(torch.zeros(4, 200), options())
    param = torch.zeros(4, 200, device="meta")
    assert {value.device.type for value in restore_state(saved, param).values()} == {"meta"}
    restored = restore_state(saved, param, offload=True)
    assert {name for name, value in restored.items() if value.device.type == "meta"} == {"step"}


# ---- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "moments", "sizes"),
    [
        ((4, 200), ("sqrt8", "log8"), [800, 16, 800, 32, 800]),
        ((3, 5), ("sqrt8", "log8"), [16, 16, 16, 16, 16]),
        ((3, 5), ("e4m3x", "fp32"), [16, 16, 16, 64, 16]),
        ((), ("bf16", "bf16"), [16, 16, 16]),
        ((0, 7), ("sqrt8", "log8"), []),
    ],
)
def test_bytes_to_offload_by_hand(shape, moments, sizes):
    """Every tensor but the step count, each padded to 16 bytes: codes, their metadata, the remainder."""
    param = torch.zeros(shape, dtype=torch.bfloat16)
    assert bytes_to_offload(param, options(moments)) == sum(sizes)
    state = init_state(param, options(moments))
    assert sum(math.ceil(value.nbytes / 16) * 16 for name, value in state.items() if name != "step") == sum(sizes)
