"""Weights that travel in FP8 under FSDP2, in two processes: the same bits as with BF16 travel, half the bytes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import overcoat
from overcoat import Recipe
from overcoat.distributed import sharded_weight
from overcoat.distributed.fp8_all_gather import GATHER, fsdp_params
from tests.examples.runs import as_torchrun, sharding_on_cpus
from tests.models.zoo import make_batch, make_model
from tests.nightly import mostly_nightly
from tests.processes import on_many, on_two, repeatable, two_of

SMALL: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2}
# By what is new in each: stacks of biases and grouped heads; all recomputed; rows in another order; rows of 256 for
# blocks; kept tensors in host memory and weights transposed (GPT-2); experts that two processes do not divide.
CASES: dict[str, tuple[str, Recipe, dict[str, Any]]] = {
    "default": ("qwen2", Recipe(), {"intermediate_size": 208, "num_key_value_heads": 1}),
    "leanest": ("llama", Recipe.leanest(), {"intermediate_size": 208, "num_key_value_heads": 2}),
    "reordered": ("glm4", Recipe(head="fp8"), {"intermediate_size": 208, "num_key_value_heads": 1}),
    "blocks": (
        "llama",
        Recipe(linear_scaling="block"),
        {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 128},
    ),
    # Of 384 rows two shards cut blocks, of 256 and 640 columns.
    "cut blocks": (
        "llama",
        Recipe(linear_scaling="block"),
        {"hidden_size": 384, "intermediate_size": 640, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "transposed": ("gpt2", Recipe(offload_blocks="all"), {}),
    "experts": (
        "olmoe",
        Recipe(),
        {"hidden_size": 256, "num_experts": 4, "intermediate_size": 256, "num_key_value_heads": 1},
    ),
}
CASES["uneven experts"] = (*CASES["experts"][:2], {**CASES["experts"][2], "num_experts": 3})


def make(case: str, fp8: bool, device: str = "cpu", mesh: Any = None, wide: bool = False, **options: Any) -> Any:
    """A converted, sharded model and its optimizer; `wide`: FP32 parameters that travel in BF16 or FP8."""
    kind, recipe, overrides = CASES[case]
    model = make_model(kind, layers=2, **{**SMALL, **overrides}).to(device)
    if wide:
        model.float()
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    overcoat.convert(model, recipe)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if fp8:
        report = overcoat.fp8_all_gather(model)
        shards = dist.get_world_size() if mesh is None else mesh.size(-1)
        apart = 2 * 2 * (case == "uneven experts" and shards > 1)
        assert len(report.left_alone) == apart, report
        assert len(report.fp8) == len(matrices(model)) - apart
    return model, overcoat.AdamW(model.parameters(), lr=1e-2)


def matrices(model: Any) -> list[Any]:
    """Those of linear layers and experts; routers travel in their own dtype."""
    named = [named for layer in layers_of(model) for named in layer.named_parameters()]
    return [weight for name, weight in named if weight.dim() >= 2 and name != "mlp.gate.weight"]


def layers_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def passes(model: Any, seeds: list[int], device: str = "cpu", apart: bool = False) -> list[Tensor]:
    """Micro-batches whose gradients are added, of which only the last one's are reduced; their losses."""
    losses = []
    for seed in seeds:
        model.set_requires_gradient_sync(seed == seeds[-1])
        batch = make_batch(seed=seed + 100 * dist.get_rank() * apart, batch=1, length=13)
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        losses.append(loss.detach())
    return losses


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]


def train(
    model: Any, optimizer: Any, device: str = "cpu", steps: int = 3, first: int = 0, last: bool = True, **kwargs: Any
) -> list[Any]:
    """Losses and gradients of some steps of two micro-batches each; `last`: the last one moves the weights, too."""
    seen = []
    for step in range(first, first + steps):
        seen += passes(model, [2 * step, 2 * step + 1], device, **kwargs)
        seen += gradients(model)
        if last or step < first + steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for place, (x, y) in enumerate(zip(left, right)):
        assert torch.equal(x, y), (place, x.shape)


@contextmanager
def counted(module: Any, *names: str) -> Iterator[list[tuple[str, int]]]:
    """Calls of functions of a module: their names, and bytes of the tensor that they are given first."""
    calls: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            plain = getattr(module, name, None)
            if plain is not None:

                def call(*args: Any, plain: Any = plain, name: str = name, **kwargs: Any) -> Any:
                    tensor = args[0] if args else next(iter(kwargs.values()))
                    calls.append((name, tensor.nbytes if isinstance(tensor, Tensor) else 0))
                    return plain(*args, **kwargs)

                patch.setattr(module, name, call)
        yield calls


GATHERS = ("all_gather_into_tensor", "all_gather_single")  # PyTorch 2.11's name, and 2.13's


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _alike(rank: int, device: str, cases: Sequence[str]) -> None:
    alone = init_device_mesh(device, (2, 1), mesh_dim_names=("copies", "shards"))["shards"]
    for case in cases:
        seen = functools.partial(train, device=device, steps=2 if case == "default" else 1, last=False)
        expected = seen(*make(case, False, device))
        if device != "cpu":  # the control: else equal bits would prove nothing, and others no fault
            assert_equal(seen(*make(case, False, device)), expected)
        assert_equal(seen(*make(case, True, device)), expected)
        assert_equal(seen(*make(case, True, device, alone)), expected)
        if case in ("default", "cut blocks"):
            assert_equal(seen(*make(case, True, device, reshard_after_forward=False)), expected)
            with pytest.MonkeyPatch.context() as patch:  # as if it had to be gathered
                patch.setattr(sharded_weight, "holds_all", lambda param: False)
                assert_equal(seen(*make(case, True, device, alone)), expected)
    if "default" not in cases:
        return
    # Each process its own rows: nothing is equal by itself any more.
    seen = functools.partial(train, device=device, steps=2, last=False, apart=True)
    for options in ({}, {"wide": True}):
        expected = seen(*make("default", False, device, **options))
        assert_equal(seen(*make("default", True, device, **options)), expected)


IN_CI = ("default", "cut blocks", "transposed", "experts")


@two_of
@pytest.mark.parametrize("cases", [IN_CI, pytest.param([*CASES.keys() - IN_CI], marks=pytest.mark.nightly)], ids=str)
def test_losses_and_gradients_are_those_of_bf16_travel_and_of_one_process(device: str, cases: Sequence[str]) -> None:
    """Bit for bit, with accumulation, in FSDP2 over two processes and over one."""
    if device == "cuda":
        repeatable()
    on_two(_alike, device, device, cases)


def _unsharded(rank: int, case: str) -> None:
    """FSDP2 over two processes against none, whose rows are both processes' alike."""
    sharded = make(case, True)
    kind, recipe, overrides = CASES[case]
    model = make_model(kind, layers=2, **{**SMALL, **overrides})
    overcoat.convert(model, recipe)
    optimizer = overcoat.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        losses = passes(sharded[0], [step])
        loss = model(**make_batch(seed=step, batch=1, length=13)).loss
        loss.backward()
        assert_equal(losses, [loss.detach()])
        assert_equal(gradients(sharded[0]), [p.grad for p in model.parameters()])
        for one in (optimizer, sharded[1]):
            one.step()
            one.zero_grad()


@pytest.mark.parametrize("case", ["default", "experts"])
def test_losses_and_gradients_are_those_without_fsdp2(case: str) -> None:
    on_two(_unsharded, "cpu", case)


# ---- what travels ----------------------------------------------------------------------------------------------------


def _alone(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    (own, optimizer), (model, other) = make("default", False), make("default", True)
    for step in range(3):
        with counted(_fsdp_param_group, "foreach_reduce") as reduced:
            for of in (own, model):
                for seed in (2 * step, 2 * step + 1):  # without `set_requires_gradient_sync`: added to the shards'
                    of(**make_batch(seed=seed, batch=1, length=13)).loss.backward()
        assert_equal(gradients(own), gradients(model))
        # 3 groups, twice a step; of the other model the first time.
        assert len(reduced) == (6 if step else 9), len(reduced)
        for stepper in (optimizer, other):
            stepper.step()
            stepper.zero_grad()
    projection = model.model.layers[0].self_attn.q_proj
    for of in (own, model):
        of.eval()
    with torch.no_grad():
        assert_equal(*([of(**make_batch(seed=8, batch=1, length=13)).loss] for of in (own, model)))
    model.model.layers[0].unshard()
    kept = projection.weight.data_ptr()
    model.model.layers[0].reshard()
    assert kept == projection.weight.to_local().data_ptr()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    model.train()
    model.unshard()
    head = model.lm_head.weight
    model.reshard()
    assert head.data_ptr() == model.lm_head.weight.to_local().data_ptr()
    handle = overcoat.release_gradients(model, other)
    before = model.lm_head.weight.to_local().clone()
    model(**make_batch(seed=9, batch=1, length=13)).loss.backward()
    other.step()
    assert not torch.equal(before, model.lm_head.weight.to_local())
    assert all(param.grad is None for param in model.parameters())
    handle.remove()


def _in_a_trainer(rank: int) -> None:
    # FSDP2 itself lets the outermost module's weights grow stale, unless it is told.
    (own, optimizer), (model, other) = (make("default", False, reshard_after_forward=True) for _ in range(2))
    trainer = nn.ModuleDict({"net": model})
    before = [group.post_forward_mesh_info for _, group in fsdp_params(model).values()]
    overcoat.fp8_all_gather(trainer)
    for step in range(3):
        assert_equal(passes(own, [step]), passes(model, [step]))
        assert_equal(gradients(own), gradients(model))
        with torch.set_grad_enabled(step == 1):  # without a backward, before weights change
            assert_equal(*([of(**make_batch(seed=9)).loss.detach()] for of in (own, model)))
        for of, its in ((own, optimizer), (model, other)):
            its.step()
            its.zero_grad()
            of.eval()
        assert_equal(*([of(**make_batch(seed=8)).loss.detach()] for of in (own, model)))
        for of in (own, model):
            of.train()
    vars(trainer)[GATHER].remove()
    assert [group.post_forward_mesh_info for _, group in fsdp_params(model).values()] == before
    assert_equal(passes(own, [7]), passes(model, [7]))


def _collected(rank: int) -> None:
    model, optimizer = make("default", True)
    train(model, optimizer, steps=1)
    found = [weakref.ref(param) for param in [*model.parameters(), *optimizer.state[model.lm_head.weight].values()]]
    del model, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in found)


def _by_itself(rank: int) -> None:
    for check in (_alone, _in_a_trainer, _collected):
        check(rank)


def test_a_process_that_trains_alone_copies_nothing_calls_what_a_trainer_holds_and_frees_it() -> None:
    on_many(1, _by_itself, "cpu")


def _travels(rank: int) -> None:
    sizes, whole = [], []
    for fp8 in (False, True):
        model, _ = make("leanest", fp8)
        passes(model, [0])
        with counted(dist, *GATHERS) as gathers:
            passes(model, [1])
        sizes.append([size for _, size in gathers])
        model.eval()
        with torch.no_grad(), counted(dist, *GATHERS) as gathers:
            model(**make_batch(batch=1, length=13))
        whole.append([size for _, size in gathers])
    assert len(sizes[0]) == len(sizes[1])
    (plain,), (block,) = set(sizes[0]) - set(sizes[1]), set(sizes[1]) - set(sizes[0])
    assert sizes[0].count(plain) == 2 * 2  # of two blocks, forward and backward
    # Norms travel in BF16; of Llama-2-7B's blocks they are a smaller part.
    assert 0.5 * plain < block <= 0.52 * plain
    assert whole[0] == whole[1]  # in eval() in BF16

    # Maxima are found once a step, whatever the number of micro-batches, and reduced together; codes for each gather.
    model, optimizer = make("default", True)
    weights = 7 * len(layers_of(model))
    for _ in range(3):
        with (
            counted(sharded_weight, "stack_weights") as made,
            counted(torch, "_foreach_norm") as found,
            counted(dist, "all_reduce") as reduced,
            counted(dist, "reduce_scatter_tensor", "reduce_scatter_single") as scattered,
        ):
            for seed in range(3):
                passes(model, [seed, seed + 1])
        assert len(made) == weights * 2 * 2 * 3
        assert len(found) == 1
        assert reduced == [("all_reduce", 4 * 4 * len(layers_of(model)))]
        kept = [value for weight in sharded_weights(model) for value in vars(weight).values()]
        assert not any(value.numel() > 1 for value in kept if isinstance(value, Tensor))
        # Of two micro-batches the last one's gradients alone, one collective a block and one for the rest.
        assert len(scattered) == 3 * (len(layers_of(model)) + 1)
        # cuBLASLt refuses a scale that does not lie at a multiple of 16 bytes.
        scales = {weight.scale.data_ptr() for weight in sharded_weights(model)}
        assert len(scales) == 4 * len(layers_of(model))
        assert not any(place % 16 for place in scales)
        optimizer.step()
        optimizer.zero_grad()


def test_half_the_bytes_and_maxima_found_once_a_step() -> None:
    on_two(_travels, "cpu")


# ---- weights that somebody else changes ------------------------------------------------------------------------------


def _changed(rank: int) -> None:
    (plain, plain_optimizer), (model, optimizer) = make("default", False), make("default", True)
    name = "model.layers.1.mlp.down_proj.weight"

    def assert_alike() -> None:
        assert_equal(passes(model, [0]), passes(plain, [0]))
        assert_equal(gradients(model), gradients(plain))
        model.zero_grad(), plain.zero_grad()

    assert_alike()
    with torch.no_grad():
        for each in (plain, model):
            each.get_parameter(name).mul_(3.0)
    assert_alike()
    changed = {key: value * 2 for key, value in get_model_state_dict(plain).items()}
    for each in (plain, model):
        set_model_state_dict(each, changed)
    assert_alike()
    # Between the micro-batches of a step, by an optimizer that writes to shards unseen.
    for each in (plain, model):
        passes(each, [1])
        torch.optim.SGD(each.parameters(), lr=0.1, foreach=True).step()
        each.zero_grad()
    assert_alike()
    # After a step, before the first forward.
    for each, its in ((plain, plain_optimizer), (model, optimizer)):
        passes(each, [1])
        its.step()
        its.zero_grad()
        with torch.no_grad():
            each.get_parameter(name).mul_(3.0)
    assert_alike()
    # In `eval()` shards travel as they are, and back: gradients that wait are not lost.
    for each in (plain, model):
        each.set_requires_gradient_sync(False)
        each(**make_batch(seed=5)).loss.backward()
        each.eval()
        each(**make_batch(seed=6))
        each.train()
    assert_alike()
    # What no counter sees needs a word, in every process; also in the middle of a step.
    for each in (plain, model):
        each.set_requires_gradient_sync(False)
        each(**make_batch(seed=7)).loss.backward()
        each.get_parameter(name).data.mul_(4.0)
    overcoat.fp8_all_gather(model)
    assert_alike()
    if rank == 1:
        with torch.no_grad():
            model.get_parameter(name).to_local().mul_(0.5)
        with pytest.raises(RuntimeError, match=r"layers.1.mlp.down_proj.weight: its local tensor was written to"):
            model(**make_batch(batch=1, length=13))


def test_a_change_between_steps_is_noticed() -> None:
    on_two(_changed, "cpu")


# ---- backwards after other forwards ----------------------------------------------------------------------------------

# Forwards of numbered losses, or without gradients ("?1"); backwards, of a sum ("-01"), or not reduced yet ("~0").
ORDERS = (
    "train 0 eval 1 -0",
    "train 0 eval ?1 -0",
    "train 0 eval 1 train -0",
    "train 0 eval -0",
    "train 0 1 -1 -0",
    "train 0 1 -01",
    "train 0 eval 1 train -0 -1",
    "train 0 eval 1 -01",
    "train 0 eval 1 ~0 train 2 -2",
    "eval 0 train ?1 -0",
    "eval 0 train 1 -0 -1",
)


def play(model: Any, order: str, device: str) -> list[Tensor]:
    """Gradients after an order of forwards and backwards."""
    model.zero_grad()
    losses: dict[str, Tensor] = {}
    for word in order.split():
        if word in ("train", "eval"):
            model.train(word == "train")
        elif word[0] in "-~":
            model.set_requires_gradient_sync(word[0] == "-")
            sum(losses.pop(number) for number in word[1:]).backward()
        else:
            batch = make_batch(seed=int(word[-1]) + 100 * dist.get_rank(), batch=1, length=13)
            with torch.set_grad_enabled(word[0] != "?"):
                losses[word] = model(**{name: value.to(device) for name, value in batch.items()}).loss
    return gradients(model)


def _ordered(rank: int, device: str, case: str, ways: Sequence[str]) -> None:
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("copies", "shards"))
    options: dict[str, Any] = {"alone": {"mesh": mesh["shards"]}, "copies": {"mesh": mesh}}
    options["kept"] = {"reshard_after_forward": False}
    for way in ways:
        (plain, _), (model, _) = (make(case, fp8, device, **options.get(way, {})) for fp8 in (False, True))
        for each in (plain, model):  # then the first layer's input wants no gradient, and FSDP2 ends its backward late
            each.get_input_embeddings().requires_grad_(way != "frozen")
        for order in ORDERS:
            # A weight read in both modes has two gradients, which are added up before or after their reduction.
            apart = order.replace("-01", "-1 -0") if "eval" in order else order
            found, *expected = (play(each, of, device) for each, of in ((model, order), (plain, order), (plain, apart)))
            assert len({len(found), *map(len, expected)}) == 1, (way, order)
            for own, *those in zip(found, *expected, strict=True):
                assert any(torch.equal(own, other) for other in those), (way, order)


WAYS = ("alone", "kept", "frozen", "as ever")
ALL_WAYS = [(case, (*WAYS, "copies")) for case in CASES]
FEW = ("default", ("kept", "as ever"))


@two_of
@pytest.mark.parametrize(("case", "ways"), mostly_nightly([FEW, *ALL_WAYS], [FEW]), ids=str)
def test_a_backward_reads_what_its_forward_has_read_whatever_comes_between(
    device: str, case: str, ways: Sequence[str]
) -> None:
    on_two(_ordered, device, device, case, ways)


# ---- checkpoints and compiled code -----------------------------------------------------------------------------------


def _saved(rank: int, case: str, folder: str) -> None:
    (plain, plain_optimizer), (model, optimizer) = make(case, False), make(case, True)
    for run in ((plain, plain_optimizer), (model, optimizer)):
        train(*run, steps=2)
    states = []
    for each, its in ((plain, plain_optimizer), (model, optimizer)):
        states.append({"model": get_model_state_dict(each), "optim": get_optimizer_state_dict(each, its)})
    for name, value in states[1]["model"].items():
        assert type(value) is DTensor
        assert type(value.to_local()) is Tensor
        assert not vars(value.to_local())
        assert torch.equal(value.to_local(), states[0]["model"][name].to_local())
    dcp.save(states[1], checkpoint_id=folder)
    expected = train(model, optimizer, steps=1, first=2)
    again, its = make(case, True)
    state = {"model": get_model_state_dict(again), "optim": get_optimizer_state_dict(again, its)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, its, state["optim"])
    assert_equal(train(again, its, steps=1, first=2), expected)
    # Shards made anew, as `to_empty` makes them.
    again._apply(torch.clone)
    set_model_state_dict(again, get_model_state_dict(plain))
    assert_equal(passes(again, [9]), passes(plain, [9]))
    found = sharded_weights(again)
    assert len(found) == len(matrices(again))
    assert all(weight.is_fp8 for weight in found)


def sharded_weights(model: nn.Module) -> list[Any]:
    shards = [p._local_tensor for p in model.parameters() if isinstance(p, DTensor)]
    return [shard.fsdp_post_all_gather.__self__ for shard in shards if hasattr(shard, "fsdp_pre_all_gather")]


@pytest.mark.parametrize("case", ["default", "experts"])
def test_checkpoints_know_nothing_of_it(case: str, tmp_path: Any) -> None:
    on_two(_saved, "cpu", case, str(tmp_path))


def _accelerated(rank: int) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    found = []
    for fp8 in (False, True):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = make_model("llama", layers=2)
        overcoat.convert(model)
        model, optimizer = accelerator.prepare(model, overcoat.AdamW(model.parameters(), lr=1e-2))
        if fp8:
            assert len(overcoat.fp8_all_gather(model).fp8) == 14
        losses = []
        for step in range(3):
            loss = model(**make_batch(seed=2 * step + rank, batch=1, length=13)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(losses + [p.full_tensor() for p in model.parameters()])
        accelerator.free_memory()
    assert_equal(*found)


def _accelerated_here(rank: int) -> None:
    as_torchrun(rank)
    with sharding_on_cpus():
        _accelerated(rank)


def test_accelerates_fsdp2() -> None:
    on_two(_accelerated_here, "cpu")


def _adapted(rank: int, dora: bool) -> None:
    peft: Any = pytest.importorskip("peft")
    found = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        targets = ["down_proj"] if dora else "all-linear"
        config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False, use_dora=dora)
        model = peft.get_peft_model(make_model("llama", layers=1), config, autocast_adapter_dtype=False).train()
        overcoat.convert(model)
        fully_shard(model.base_model.model.model.layers[0])
        fully_shard(model)
        assert not fp8 or len(overcoat.fp8_all_gather(model).fp8) == 7 - dora  # its norms read 16 bits
        found.append([*passes(model, [0]), *gradients(model)])
        with model.disable_adapter():  # peft takes requires_grad from the adapters, and gives it back after a forward
            model(**make_batch(seed=2))
        found[-1] += [*passes(model, [3]), *gradients(model)]
        model.merge_adapter()  # to `weight.data`, which no counter sees
        with torch.no_grad():
            found[-1].append(model(**make_batch(seed=1)).loss)
    assert_equal(*found)


@pytest.mark.parametrize(("processes", "dora"), [(1, False), (2, False), (2, True)])
def test_base_weights_of_adapters_travel_in_fp8(processes: int, dora: bool) -> None:
    on_many(processes, _adapted, "cpu", dora)


# ---- what cannot be --------------------------------------------------------------------------------------------------


def _refused(rank: int) -> None:
    def build(recipe: Optional[Recipe] = None, convert: bool = True, **options: Any) -> Any:
        model = make_model("llama", layers=1)
        if convert:
            overcoat.convert(model, recipe)
        if options.pop("shard", True):
            fully_shard(model.model.layers[0], **options)
            fully_shard(model, **options)
        return model

    for match, model in (
        ("call fully_shard before", build(shard=False)),
        ("overcoat.convert it", build(convert=False)),
        ("CPUOffloadPolicy", build(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    ):
        with pytest.raises(ValueError, match=match):
            overcoat.fp8_all_gather(model)
    # Blocks that two weights share travel in BF16, and the others in FP8.
    model = build(Recipe(linear_scaling="block"))
    report = overcoat.fp8_all_gather(model)
    assert [name.split(".")[-2] for name in report.fp8] == ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    assert (
        report.left_alone["model.layers.0.mlp.up_proj.weight"]
        == "its 304 rows are no multiple of 128 and of 2 processes"
    )
    assert "5 weights travel in FP8" in str(report)
    passes(model, [0])
    overcoat.convert(model, Recipe())
    with pytest.raises(ValueError, match=r"call it again after overcoat.convert"):
        passes(model, [0])
    assert len(overcoat.fp8_all_gather(model).fp8) == 7
    passes(model, [0])
    # Nobody takes codes for numbers.
    model.model.layers[0].unshard()
    with pytest.raises(RuntimeError, match="cannot read a weight that was gathered in FP8"):
        model.model.layers[0].self_attn.q_proj.weight.sum()
    # Another module's weight, and a layer that was changed since: BF16, and the original forward.
    model.model.layers[0].reshard()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="q_proj has hooks"):
        overcoat.fp8_all_gather(model)
    with pytest.warns(UserWarning, match="original precision"):
        passes(model, [0])


def test_what_cannot_travel_in_fp8() -> None:
    on_two(_refused, "cpu")
