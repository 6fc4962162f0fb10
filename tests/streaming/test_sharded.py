"""`overcoat.stream` over two processes: the bits of FSDP2 with `fp8_all_gather` and released gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import overcoat
from overcoat import Recipe
from overcoat.estimate.predict import Predictor
from overcoat.estimate.setup import Setup
from overcoat.models.family import decoder_layers
from overcoat.optim.sharding import local
from overcoat.streaming import choice
from tests.models.zoo import make_batch, make_model
from tests.nightly import mostly_nightly
from tests.processes import on_many, on_two, two_of
from tests.streaming import test_stream as harness
from tests.streaming.test_races import run
from tests.streaming.test_stream import CASES, SMALL, add_adapters, freeze_some

Run = tuple[Any, Any, Any]  # model, optimizer, handle
# Each process has whole blocks of every weight.
BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 128}
FIELDS: dict[str, dict[str, Any]] = {"experts": {"num_experts": 4}, "block scales": BLOCKS}


def make(case: str, device: str, streamed: bool, seed: int = 0, layers: int = 3, **options: Any) -> Run:
    kind, recipe, fields = CASES[case]
    model = make_model(kind, layers=layers, seed=seed, **{**fields, **FIELDS.get(case, {})}).to(device)
    return (model, *prepare(model, recipe, device, streamed, **options))


def layers_of(model: Any) -> Any:
    return list(decoder_layers(model).values())


def prepare(
    model: Any, recipe: Recipe, device: str, streamed: bool, source: Any = None, policy: Any = None, **options: Any
) -> Any:
    overcoat.convert(model, recipe)
    shard = {} if policy is None else {"mp_policy": policy}
    for layer in layers_of(model):
        fully_shard(layer, **shard)
    fully_shard(model, **shard)
    optimizer = overcoat.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    if streamed:
        return optimizer, overcoat.stream(model, optimizer, **(source or {}))
    overcoat.fp8_all_gather(model)
    return optimizer, overcoat.release_gradients(model, optimizer)


def loss_of(model: Any, step: int, device: str) -> Tensor:
    """Of rows that no other process has."""
    batch = make_batch(seed=step + 100 * dist.get_rank(), length=32)
    return model(**{name: value.to(device) for name, value in batch.items()}).loss


def train(model: Any, optimizer: Any, device: str, steps: int = 3, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def snapshot(model: Any, optimizer: Any) -> list[Tensor]:
    """This process' parts of weights and states."""
    states = optimizer.state_dict()["state"]
    values = [value for index in sorted(states) for value in states[index].values()]
    return [local(value.detach()).cpu().clone() for value in (*model.state_dict().values(), *values)]


def assert_same(left: Run, right: Run) -> None:
    pairs = list(zip(snapshot(*left[:2]), snapshot(*right[:2]), strict=True))
    differ = [place for place, (x, y) in enumerate(pairs) if x.dtype != y.dtype or not torch.equal(_bits(x), _bits(y))]
    assert not differ, (len(pairs), differ)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def assert_same_run(left: Run, right: Run, device: str, steps: int = 3, first: int = 0) -> None:
    assert train(*left[:2], device, steps, first) == train(*right[:2], device, steps, first)
    assert_same(left, right)


def streamed_weights(handle: Any) -> list[Any]:
    return [param for stack in handle.stacks for param in stack.params]


# ---- numbers ---------------------------------------------------------------------------------------------


def _alike(rank: int, device: str, cases: Sequence[str]) -> None:
    for case in cases:
        resident, streamed = (make(case, device, way, offload_buffer=3 * 40_000) for way in (False, True))
        count = 3 * {"transposed": 4, "experts": 4, "reordered": 6}.get(case, 7)
        assert len(streamed_weights(streamed[2])) == count, case
        assert_same_run(resident, streamed, device)
        torch.testing.assert_close(resident[1].grad_norm, streamed[1].grad_norm, rtol=1e-6, atol=0)
        for param in streamed_weights(streamed[2]):
            own, state = local(param), streamed[1].state[param]
            assert isinstance(param, DTensor)
            assert 2 * own.numel() == param.numel()
            assert {local(value).device.type for name, value in state.items() if name != "step"} == {"cpu"}
            assert own.device.type == "cpu"
            assert device == "cpu" or own.is_pinned()


IN_CI = ("default", "leanest", "block scales", "experts")
OTHERS = tuple(sorted(CASES.keys() - IN_CI))


@two_of
@pytest.mark.parametrize("cases", mostly_nightly([(IN_CI,), (OTHERS,)], [(IN_CI,)]), ids=str)
def test_two_processes_train_as_resident_ones_bit_for_bit(device: str, cases: Sequence[str]) -> None:
    on_two(_alike, device, device, cases)


def _other_ways(rank: int, device: str) -> None:
    """Other states; experts, of which an odd number, and their router, stay with FSDP2, and cut blocks in 16 bits."""
    for options in ({"moments": "fp32", "master": "bf16+16"}, {"moments": "fp8", "master": "bf16", "offload": True}):
        assert_same_run(*(make("default", device, way, **options) for way in (False, True)), device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "LEAST_BYTES", 0)
        for kind, recipe, fields, left in (
            ("olmoe", Recipe.leanest(), {**SMALL, "intermediate_size": 256, "num_experts": 4}, 0),
            ("olmoe", Recipe(), {**SMALL, "intermediate_size": 256, "num_experts": 3}, 3),
            ("llama", Recipe(linear_scaling="block"), {**BLOCKS, "intermediate_size": 304}, 0),
        ):
            runs = []
            for way in (False, True):
                model = make_model(kind, layers=3, **fields).to(device)
                runs.append((model, *prepare(model, recipe, device, way)))
            matrices = [param for param in runs[1][0].model.layers.parameters() if param.dim() > 1]
            assert len(streamed_weights(runs[1][2])) == len(matrices) - 3 * left
            assert_same_run(*runs, device)


@two_of
def test_other_states_and_weights_in_16_bits(device: str) -> None:
    on_two(_other_ways, device, device)


def _reduced_otherwise(rank: int, device: str) -> None:
    """In FP32; summed without a division, as `overcoat train` asks for, or with one."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for is_sum, factor in ((False, None), (True, 1.0), (True, None), (True, 3.0)):
        runs = [make("default", device, way, policy=policy) for way in (False, True)]
        for model, *_ in runs:
            for module in (*layers_of(model), model):
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(is_sum)
        assert_same_run(*runs, device, 2)


@two_of
def test_gradients_are_reduced_as_fsdp2_would(device: str) -> None:
    on_two(_reduced_otherwise, device, device)


def _partly(rank: int, device: str) -> None:
    """Some layers stay with FSDP2; weights frozen, or a base of adapters; a tied head."""
    run = make("default", device, True, source={"resident": 1})
    assert [layer.name for layer in run[2].layers] == ["model.layers.1", "model.layers.2"]
    assert_same_run(make("default", device, False), run, device)
    for partly in (freeze_some, add_adapters):
        runs = []
        for way in (False, True):
            model = make_model("llama", layers=3, **SMALL).to(device)
            model = partly(model) or model
            runs.append((model, *prepare(model, Recipe.leanest(), device, way)))
        assert len(streamed_weights(runs[1][2])) == 21
        assert_same_run(*runs, device)


@two_of
def test_some_weights_stay_and_others_are_frozen(device: str) -> None:
    on_two(_partly, device, device)


# ---- between steps ---------------------------------------------------------------------------------------


def _evaluated(rank: int, device: str) -> None:
    runs, found = [make("default", device, way) for way in (False, True)], []
    for model, optimizer, _ in runs:
        train(model, optimizer, device, 1)
        model.eval()
        ids = make_batch(length=8)["input_ids"].to(device)
        with torch.no_grad():
            found.append(model(input_ids=ids).logits.cpu())
        model.train()
    assert torch.equal(*found)
    assert_same_run(*runs, device, first=1)
    # All processes change a weight; then one alone does.
    for model, *_ in runs:
        with torch.no_grad():
            model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(3.0)
    assert_same_run(*runs, device, first=4)
    runs[1][2].remove()
    assert {param.device.type for param in runs[1][0].parameters()} == {torch.device(device).type}
    released = overcoat.release_gradients(*runs[1][:2])
    assert_same_run(*runs, device, 2, first=7)
    overcoat.fp8_all_gather(runs[1][0])
    assert_same_run(*runs, device, 2, first=9)
    released.remove()  # streamed again, after FSDP2 has trained it
    overcoat.stream(*runs[1][:2])
    assert_same_run(*runs, device, 2, first=11)


@two_of
def test_evaluation_writes_and_remove(device: str) -> None:
    on_two(_evaluated, device, device)


def _halves(rank: int, device: str) -> None:
    whole, halves = (make("default", device, way) for way in (False, True))
    for step in range(3):
        for (model, optimizer, handle), passes in ((whole, 1), (halves, 2)):
            for number in range(passes):
                with handle.accumulate() if number < passes - 1 else contextlib.nullcontext():
                    (loss_of(model, step, device) / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(whole, halves)
    for stack in halves[2].stacks:
        assert 2 * stack.sums.numel() == sum(param.numel() for param in stack.params)


@two_of
def test_halves_of_a_step_are_the_step(device: str) -> None:
    on_two(_halves, device, device)


def _ordered(rank: int, device: str) -> None:
    """Also of layers that stay with FSDP2: forwards in `eval()` between a forward and its backward, with gradients and
    without, and backwards in another order."""
    found = {}
    for order in dict.fromkeys(order for pair in harness.ORDERS for order in pair):
        made = make("default", device, True, source={"resident": 1})
        assert len(overcoat.fp8_all_gather(made[0]).fp8) == 7
        harness.steps_in_order(*made, device, order)
        found[order] = snapshot(*made[:2])
    resident = make("default", device, False)
    harness.steps_in_order(*resident, device, "0 -0")
    found["resident"] = snapshot(*resident[:2])
    for order, expected in (*harness.ORDERS, ("0 -0", "resident")):
        assert all(torch.equal(_bits(x), _bits(y)) for x, y in zip(found[order], found[expected], strict=True)), order


@two_of
def test_a_backward_counts_whatever_comes_between(device: str) -> None:
    on_two(_ordered, device, device)


def _in_host_memory(rank: int) -> None:
    """Half of what one process has, to the byte as estimated."""
    found = []
    model = make_model("llama", layers=3, **SMALL)
    alone = harness.prepare(model, Recipe(), "cpu", True)
    harness.train(model, alone[0], "cpu", 1)
    model = make_model("llama", layers=3, **SMALL)
    shared = prepare(model, Recipe(), "cpu", True)
    train(model, shared[0], "cpu", 1)
    for optimizer, handle in (alone, shared):
        states = [optimizer.state[param]["exp_avg"] for param in streamed_weights(handle)]
        held = [*map(local, states), *(stack.host for stack in handle.stacks)]
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in held))
    assert 2 * found[1] == pytest.approx(found[0], rel=1e-3)  # padding
    predicted = Predictor(model.config).predict(2, 32, Setup(stream=True), gpus=2)
    assert predicted.host_bytes == found[1]


def test_each_process_holds_its_part_in_host_memory() -> None:
    on_two(_in_host_memory, "cpu")


def _resumed(rank: int, device: str, folder: str) -> None:
    whole, first = (make("default", device, True) for _ in range(2))
    train(*whole[:2], device, 4)
    train(*first[:2], device, 2)
    dcp.save(state_of(*first[:2]), checkpoint_id=folder)
    del first
    for way in (True, False):
        second = make("default", device, way, seed=7)
        if way:
            train(*second[:2], device, 1)  # codes of other weights have been made
        state = state_of(*second[:2])
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(second[0], state["model"])
        set_optimizer_state_dict(*second[:2], state["optim"])
        train(*second[:2], device, 2, first=2)
        assert_same(whole, second)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _loaded(rank: int, device: str, folder: str) -> None:
    """From the meta device: each process reads its own rows, also of what stays with FSDP2, padded where uneven."""
    fields = {**SMALL, "vocab_size": 513}
    if rank == 0:
        make_model("qwen2", layers=2, **fields).save_pretrained(folder, max_shard_size="200KB")
    dist.barrier()
    runs = []
    for way in (False, True):
        if way:
            with torch.device("meta"):
                config = transformers.AutoConfig.from_pretrained(folder)
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train().to(device)
        source = {"weights": folder} if way else None
        runs.append((model, *prepare(model, Recipe(), device, way, source)))
    assert_same_run(*runs, device)


@two_of
def test_each_process_reads_its_own_rows(device: str, tmp_path: Any) -> None:
    on_two(_loaded, device, device, str(tmp_path))


@two_of
def test_a_checkpoint_resumes_to_the_same_bits_streamed_or_not(device: str, tmp_path: Any) -> None:
    on_two(_resumed, device, device, str(tmp_path))


def _races(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for evaluate, passes in ((False, 1), (True, 1), (False, 3)):
            assert run(patch, evaluate=evaluate, passes=passes, prepare=prepare) == []
        for without in ("_before_backward", ("codes", 0), ("update", 0)):
            assert run(patch, without, prepare=prepare), without


def test_no_access_races_where_nothing_is_left_out() -> None:
    on_two(_races, "cpu")


# ---- what is refused -------------------------------------------------------------------------------------


def _refused(rank: int) -> None:
    def build(fields: dict[str, Any] = SMALL, recipe: Recipe | None = None, **options: Any) -> Any:
        model = make_model("llama", layers=2, **fields)
        overcoat.convert(model, recipe)
        for layer in layers_of(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return model

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    split = build()
    split.model.layers[0].mlp.extra = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh["copies"], [Shard(0)]))
    for model, words in (
        (build(mesh=mesh), "averaged between replicas, too: use a mesh of one dimension"),
        (build(offload_policy=CPUOffloadPolicy(pin_memory=False)), "CPUOffloadPolicy"),
        (build(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)), "param_dtype=torch.float32.* leave it out"),
        (
            build(recipe=Recipe(linear_scaling="block")),
            "cannot share its 128 rows evenly, in blocks of 128",
        ),
        (split, r"layers\.0\.mlp\.extra is a DTensor, but not fully_shard's"),
    ):
        before = [type(param) for param in model.parameters()]
        with pytest.raises(ValueError, match=words):
            overcoat.stream(model, overcoat.AdamW(model.parameters()))
        assert [type(param) for param in model.parameters()] == before
    # One host has too little memory, and all processes say so.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "bytes_free", lambda: 2**40 if rank else 2**20)
        with pytest.raises(ValueError, match=r"more host memory .* GiB are free"):
            make("default", "cpu", True)

    def backward(model: Any) -> None:
        loss_of(model, 0, "cpu").backward()

    run = make("default", "cpu", True)
    run[0].set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match=r"use `with handle\.accumulate\(\):`"):
        backward(run[0])
    run = make("default", "cpu", True)
    run[0].model.layers[2].set_gradient_divide_factor(3.0)
    with pytest.raises(ValueError, match=r"divide gradients by 3 .* set_force_sum_reduction_for_comms"):
        backward(run[0])
    run = make("default", "cpu", True)
    part = run[0].model.layers[0].mlp.up_proj.weight.to_local()
    with torch.no_grad():
        part.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"the local tensor of .*gate_proj.* call weights_changed\(\) of the handle"):
        backward(run[0])
    run[2].weights_changed()
    backward(run[0])
    run = make("default", "cpu", True)
    first, second = (loss_of(run[0], step, "cpu") for step in range(2))
    second.backward()
    with pytest.raises(ValueError, match=r"layers\.2 were stepped .* between a forward and its backward"):
        first.backward()


def test_what_cannot_be_streamed_is_refused_in_all_processes() -> None:
    on_two(_refused, "cpu")


def _uneven(rank: int) -> None:
    """Of three processes none has whole rows of q, k and v; those of the MLP are streamed."""
    fields = {**SMALL, "intermediate_size": 192}
    model = make_model("llama", layers=2, **fields)
    optimizer, handle = prepare(model, Recipe(), "cpu", True)
    assert len(streamed_weights(handle)) == 2 * 2
    assert handle.left["model.layers.0.self_attn.q_proj.weight"] == "3 processes cannot share its 128 rows evenly"
    resident = make_model("llama", layers=2, **fields)
    runs = (model, optimizer), (resident, prepare(resident, Recipe(), "cpu", False)[0])
    losses = [train(*run, "cpu", 2) for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_three_processes_stream_what_they_can_share() -> None:
    on_many(3, _uneven, "cpu")
