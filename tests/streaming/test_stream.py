"""`overcoat.stream`: the bits of the resident run with released gradients, from weights and states in host memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.checkpoint import checkpoint

import overcoat
from overcoat import Recipe, memory
from overcoat.block.linear import GatheredWeight
from overcoat.models.masks import causal_mask
from overcoat.streaming import choice
from tests.models.zoo import make_batch, make_model
from tests.optim import harness
from tests.waits import waiting_is_an_error

SMALL: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 128}
# The kind of model, the recipe, fields of its configuration.
CASES: dict[str, tuple[str, Recipe, dict[str, Any]]] = {
    "default": ("llama", Recipe(), SMALL),
    "leanest": ("qwen3", Recipe.leanest(), SMALL),
    "biases": ("qwen2", Recipe(head="fp8"), SMALL),
    "offloaded blocks": ("llama", Recipe(offload_blocks=1), SMALL),
    "tied": ("qwen3", Recipe(), {**SMALL, "tie_word_embeddings": True}),
    "block scales": ("llama", Recipe(linear_scaling="block"), WIDE),
    "reordered": ("glm4", Recipe(), SMALL),
    "transposed": ("gpt2", Recipe(), {"hidden_size": 128, "num_attention_heads": 2}),
    "experts": ("olmoe", Recipe.leanest(), {**SMALL, "num_experts": 3, "intermediate_size": 256}),
}


def make(case: str, device: Any, streamed: bool, seed: int = 0, layers: int = 3, **options: Any) -> Any:
    """A converted model and its optimizer, with released gradients or streamed."""
    kind, recipe, fields = CASES[case]
    model = make_model(kind, layers=layers, seed=seed, **fields)
    return (model, *prepare(model, recipe, device, streamed, **options))


def prepare(model: Any, recipe: Recipe, device: Any, streamed: bool, source: Any = None, **options: Any) -> Any:
    if not streamed:
        model.to(device)
    overcoat.convert(model, recipe)
    optimizer = overcoat.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    if streamed:
        return optimizer, overcoat.stream(model, optimizer, device=device, **(source or {}))
    return optimizer, overcoat.release_gradients(model, optimizer)


def loss_of(model: Any, step: int, device: Any) -> torch.Tensor:
    return model(**{name: value.to(device) for name, value in make_batch(seed=step, length=32).items()}).loss


def train(model: Any, optimizer: Any, device: Any, steps: int = 3, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def snapshot(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Copies of weights, buffers and states; `state_dict` waits for the last copies to the host."""
    states = optimizer.state_dict()["state"]
    values = [value for index in sorted(states) for value in states[index].values()]
    return [value.detach().cpu().clone() for value in (*model.state_dict().values(), *values)]


def assert_same_run(left: Any, right: Any, device: Any, steps: int = 3, first: int = 0) -> None:
    assert train(*left[:2], device, steps, first) == train(*right[:2], device, steps, first)
    harness.assert_same_bits(snapshot(*left[:2]), snapshot(*right[:2]))


def streamed_weights(handle: Any) -> list[torch.nn.Parameter]:
    return [param for stack in handle.stacks for param in stack.params]


# Several chunks of a stack's states, matrices cut.
MANY_CHUNKS = 3 * 40_000


@pytest.mark.parametrize("case", CASES)
def test_streamed_steps_equal_resident_ones_bit_for_bit(case, device):
    resident, streamed = (make(case, device, way, offload_buffer=MANY_CHUNKS) for way in (False, True))
    assert len(streamed_weights(streamed[2])) == 3 * {"transposed": 4, "experts": 4}.get(
        case, 7 if case != "reordered" else 6
    )
    assert_same_run(resident, streamed, device)
    torch.testing.assert_close(resident[1].grad_norm, streamed[1].grad_norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("olmoe", Recipe.leanest()), ("gpt_oss", Recipe()), ("llama", Recipe(linear_scaling="block"))],
    ids=["experts", "experts with biases", "cut blocks"],
)
def test_weights_that_are_no_operands_travel_in_16_bits(kind, recipe, monkeypatch, device):
    """Experts and routers; all weights where blocks of 128 x 128 cannot be cut."""
    monkeypatch.setattr(choice, "LEAST_BYTES", 0)
    fields = {**SMALL, **({"num_experts": 3, "intermediate_size": 256} if kind == "olmoe" else {})}
    runs = []
    for way in (False, True):
        model = make_model(kind, layers=3, **fields)
        runs.append((model, *prepare(model, recipe, device, way)))
    left = [name for name, param in runs[1][0].model.layers.named_parameters() if param.dim() > 1]
    assert len(streamed_weights(runs[1][2])) == len(left)
    assert_same_run(*runs, device)
    found = []
    for model, *_ in runs:
        with torch.no_grad():
            found.append(model.eval()(**{k: v.to(device) for k, v in make_batch(length=8).items()}).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize(("resident", "streamed"), [(1, [1, 2]), (2, [2])])
def test_some_layers_stay_on_the_device(resident, streamed, device):
    model = make_model("llama", layers=3, **SMALL)
    run = (model, *prepare(model, Recipe(), device, True, {"resident": resident}))
    assert [layer.name for layer in run[2].layers] == [f"model.layers.{place}" for place in streamed]
    assert_same_run(make("default", device, False), run, device)


@pytest.mark.parametrize(
    "options",
    [{"moments": "fp32", "master": "bf16+16"}, {"moments": "fp8", "master": "bf16", "offload": True}],
    ids=["exact", "offloaded"],
)
def test_other_states_are_stepped_alike(options, device):
    assert_same_run(*(make("default", device, way, **options) for way in (False, True)), device)


def test_weights_and_states_are_in_host_memory(device):
    model, optimizer, handle = make("default", device, True)
    names, params = zip(*model.named_parameters(), strict=True)
    train(model, optimizer, device, 1)
    assert tuple(map(id, model.parameters())) == tuple(map(id, params))
    assert tuple(model.state_dict()) == names
    on_host = [param for param in params if param.device.type == "cpu"]
    assert device.type == "cpu" or len(on_host) == len(streamed_weights(handle)) == 21
    for param in streamed_weights(handle):
        state = optimizer.state[param]
        assert {value.device.type for name, value in state.items() if name != "step"} == {"cpu"}
        assert state["step"].device.type == device.type
        assert device.type == "cpu" or (param.is_pinned() and state["exp_avg"].is_pinned())


def test_only_codes_are_read_while_a_layer_trains(device):
    """And parameters are back after the forward, also one that fails."""
    model, *_ = make("default", device, True)
    seen: list[type] = []
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: seen.append(type(layer.mlp.up_proj._parameters["weight"])))
    loss_of(model, 0, device)
    assert seen == [GatheredWeight]

    def fail(*_):
        raise RuntimeError("on purpose")

    layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, 0, device)
    assert type(layer.mlp.up_proj.weight) is torch.nn.Parameter


def test_gradients_alive_are_those_of_two_layers(monkeypatch, device):
    model, optimizer, handle = make("leanest", device, True, layers=5)
    numbers = {id(param): layer.number for layer in handle.layers for stack in layer.stacks for param in stack.params}
    alive: list[tuple[int, Any]] = []
    counts, take = [], type(handle)._take

    def count(self, number, index, param, grad):
        if id(param) in numbers:
            alive.append((numbers[id(param)], weakref.ref(grad)))
            counts.append(len({number for number, of in alive if of() is not None}))
        take(self, number, index, param, grad)

    monkeypatch.setattr(type(handle), "_take", count)
    train(model, optimizer, device, 1)
    assert max(counts) == 2
    assert not any(of() is not None for _, of in alive)


def test_stand_ins_are_not_counted_as_saved(device):
    found = []
    for way in (False, True):
        model, *_ = make("default", device, way)
        with memory.record_kept(model) as kept:
            loss_of(model, 0, device)
        found.append(kept.total_bytes)
    assert found[0] == found[1]


def freeze_some(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].self_attn.v_proj.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)


def add_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("case", ["default", "leanest"])
@pytest.mark.parametrize("partly", [freeze_some, add_adapters])
def test_frozen_weights_stream_without_a_step(case, partly, device):
    runs = []
    for way in (False, True):
        model = make_model("llama", layers=3, **SMALL)
        model = partly(model) or model
        runs.append((model, *prepare(model, CASES[case][1], device, way)))
    assert_same_run(*runs, device)


def test_evaluation_and_generation_use_the_weights_themselves(device):
    """In 16 bits, between steps, and after a copy to the device was begun for the next forward."""
    runs = [make("default", device, way) for way in (False, True)]
    found = []
    for model, optimizer, _ in runs:
        train(model, optimizer, device, 1)
        model.eval()
        ids = make_batch(length=8)["input_ids"].to(device)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        text = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        model.train()
        found.append((logits.cpu(), text.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert runs[1][2].wide
    assert_same_run(*runs, device, first=1)
    assert not runs[1][2].wide  # freed by the next forward in FP8


def test_a_resumed_run_is_the_same(tmp_path, device):
    whole, first = (make("default", device, True) for _ in range(2))
    train(*whole[:2], device, 4)
    train(*first[:2], device, 2)
    torch.save((first[0].state_dict(), first[1].state_dict()), tmp_path / "checkpoint")
    weights, states = torch.load(tmp_path / "checkpoint", weights_only=True)
    for way in (True, False):
        second = make("default", device, way, seed=7)
        if way:
            train(*second[:2], device, 1)  # codes of other weights have been made
        second[0].load_state_dict(weights)
        second[1].load_state_dict(states)
        train(*second[:2], device, 2, first=2)
        harness.assert_same_bits(snapshot(*whole[:2]), snapshot(*second[:2]))


def test_checkpoints_are_those_of_the_model_itself(tmp_path, device):
    model, optimizer, _ = make("default", device, True)
    train(model, optimizer, device, 2)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    for found in (loaded.state_dict(), {k: v.cpu() for k, v in get_model_state_dict(model).items()}):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    weight = model.model.layers[0].mlp.up_proj.weight
    assert model.state_dict()["model.layers.0.mlp.up_proj.weight"].data_ptr() == weight.data_ptr()  # no copy


@pytest.mark.parametrize("case", ["default", "leanest"])
def test_halves_of_a_step_are_the_step(case, device):
    """Powers of two change no bit of a gradient, nor of the sum of two halves."""
    whole, halves = make(case, device, False), make(case, device, True)
    for step in range(3):
        for (model, optimizer, handle), passes in ((whole, 1), (halves, 2)):
            for number in range(passes):
                with handle.accumulate() if number < passes - 1 else contextlib.nullcontext():
                    (loss_of(model, step, device) / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
    harness.assert_same_bits(snapshot(*whole[:2]), snapshot(*halves[:2]))


def steps_in_order(model: Any, optimizer: Any, handle: Any, device: Any, order: str) -> None:
    """Two steps. Forwards of numbered losses, or without gradients ("?1"); backwards, some in `accumulate` ("+0")."""
    for step in (0, 10):
        losses: dict[str, torch.Tensor] = {}
        for word in order.split():
            if word in ("train", "eval"):
                model.train(word == "train")
            elif word[0] in "-+":
                with handle.accumulate() if word[0] == "+" else contextlib.nullcontext():
                    losses.pop(word[1:]).backward()
            else:
                with torch.set_grad_enabled(word[0] != "?"):
                    losses[word] = loss_of(model, step + int(word[-1]), device)
        model.train()
        optimizer.step()
        optimizer.zero_grad()


# Each with what it must equal.
ORDERS = (
    ("0 eval 1 -0", "0 -0"),
    ("0 eval ?1 train -0", "0 -0"),
    ("0 eval -0", "0 -0"),
    ("0 1 +1 -0", "0 +0 1 -1"),
    ("0 eval ?2 +0 train 1 -1", "0 +0 1 -1"),
    ("0 +0 1 eval ?2 -1", "0 +0 1 -1"),
)


@pytest.mark.parametrize("case", ["default", "experts"])
def test_a_backward_counts_whatever_comes_between(case, device):
    found = {}
    for order in dict.fromkeys(order for pair in ORDERS for order in pair):
        run = make(case, device, True)
        steps_in_order(*run, device, order)
        found[order] = snapshot(*run[:2])
    resident = make(case, device, False)
    steps_in_order(*resident, device, "0 -0")
    found["resident"] = snapshot(*resident[:2])
    for order, expected in (*ORDERS, ("0 -0", "resident")):
        assert all(map(torch.equal, found[order], found[expected])), order


def test_gradients_are_added_up_in_fp32(device):
    model, optimizer, handle = make("default", device, True)
    plain = make_model("llama", layers=3, **SMALL).to(device)
    overcoat.convert(plain)
    names = {id(param): name for name, param in model.named_parameters()}
    expected: dict[str, Any] = {}
    with handle.accumulate():
        for step in range(3):
            for each in (model, plain):
                loss_of(each, step, device).backward()
            for name, param in plain.named_parameters():
                expected[name] = expected.get(name, 0) + param.grad.float()
                param.grad = None
    handle.synchronize()
    for stack in handle.stacks:
        for param, sums in zip(stack.params, stack.own.sums_in(stack.sums), strict=True):
            assert torch.equal(sums, expected[names[id(param)]].cpu())
    with pytest.raises(ValueError, match=r"outside of accumulate\(\)"):
        optimizer.step()
    optimizer.zero_grad()

    def closure() -> None:
        with handle.accumulate():
            loss_of(model, 0, device).backward()

    with pytest.raises(ValueError, match=r"outside of accumulate\(\)"):
        optimizer.step(closure)
    optimizer.zero_grad()
    assert_same_run((model, optimizer), make("default", device, False), device)


def test_the_norm_counts_gradients_of_all_passes(device):
    """Also of a weight that the last pass does not use, which `step` finds in its `grad`."""
    norms = []
    for streamed in (False, True):
        model = make_model("llama", layers=2, **SMALL)
        model.extra = torch.nn.Parameter(torch.ones(64))
        optimizer, handle = prepare(model, Recipe(), device, streamed)
        with handle.accumulate() if streamed else contextlib.nullcontext():
            if streamed:
                (3 * model.extra.sum()).backward()
        (loss_of(model, 0, device) + (0 if streamed else 3 * model.extra.sum())).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_remove_keeps_accumulated_gradients(device):
    model, _, handle = make("default", device, True)
    plain = make_model("llama", layers=3, **SMALL).to(device)
    overcoat.convert(plain)
    with handle.accumulate():
        loss_of(model, 0, device).backward()
    loss_of(plain, 0, device).backward()
    handle.remove()
    harness.assert_same_bits(*([param.grad for param in each.parameters()] for each in (model, plain)))


def test_remove_gives_back_a_resident_model(device):
    resident, streamed = (make("default", device, way) for way in (False, True))
    assert_same_run(resident, streamed, device, 2)
    streamed[2].remove()
    assert {param.device.type for param in streamed[0].parameters()} == {device.type}
    overcoat.release_gradients(*streamed[:2])
    assert_same_run(resident, streamed, device, 2, first=2)


def test_a_copied_model_is_not_streamed(device):
    model, optimizer, _ = make("default", "cpu", True)
    train(model, optimizer, "cpu", 1)
    copied = copy.deepcopy(model)
    loss_of(copied, 1, "cpu").backward()
    assert all(param.grad is not None for param in copied.parameters())
    train(model, optimizer, "cpu", 1, first=1)


def test_handle_and_model_are_freed():
    model, optimizer, handle = make("default", "cpu", True)
    train(model, optimizer, "cpu", 1)
    gone = [weakref.ref(each) for each in (model, handle)]
    del model, optimizer, handle
    gc.collect()
    assert [each() for each in gone] == [None, None]


# ---- loading ---------------------------------------------------------------------------------------------


def on_meta(kind: str = "llama", **fields: Any) -> Any:
    config = make_model(kind, layers=2, **(fields or SMALL)).config
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_read_into_their_place(tied, tmp_path, device):
    fields = {**SMALL, "tie_word_embeddings": tied}
    make_model("qwen3", layers=2, **fields).save_pretrained(tmp_path, max_shard_size="200KB")
    resident = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    streamed = on_meta("qwen3", **fields)
    runs = []
    for model, way in ((resident, False), (streamed, True)):
        before = list(map(id, model.parameters()))
        more = {"weights": tmp_path} if way else {}
        runs.append((model, *prepare(model, Recipe(), device, way, more)))
        assert list(map(id, model.parameters())) == before
    assert_same_run(*runs, device)


def test_random_weights_are_drawn_by_the_model(device):
    model = on_meta()
    torch.manual_seed(3)
    optimizer, handle = prepare(model, Recipe(), device, True, {"weights": "random"})
    assert all(abs(param.float().std().item() / 0.02 - 1) < 0.1 for param in streamed_weights(handle))
    assert all((norm.weight == 1).all() for name, norm in model.named_modules() if name.endswith("norm"))
    expected = type(model.model.rotary_emb)(model.config).inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq.cpu(), expected)
    # Others that stay on the device, or travel in another way, do not change what is drawn.
    for recipe, more in ((Recipe(), {"resident": 1}), (Recipe(linear_scaling="block"), {})):
        other = on_meta()
        torch.manual_seed(3)
        prepare(other, recipe, device, True, {"weights": "random", **more})
        for (name, x), y in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.equal(x.cpu(), y.cpu()), name
    losses = train(model, optimizer, device, 2)
    assert all(5 < loss < 8 for loss in losses)


def test_random_weights_are_those_of_modules_around_them(device):
    """GPT-2's attention and MLP draw their c_proj again, smaller by sqrt(2 L)."""
    model = on_meta("gpt2")
    _, handle = prepare(model, Recipe(), device, True, {"weights": "random", "resident": 1})
    assert len(handle.layers) == 1
    for layer in model.transformer.h:
        for of in (layer.attn, layer.mlp):
            assert of.c_proj.weight.float().std().item() == pytest.approx(0.02 / 4**0.5, rel=0.05)


def test_a_small_host_is_told_before_anything_moves(monkeypatch):
    monkeypatch.setattr(choice, "bytes_free", lambda: 2**20)
    model = make_model("llama", layers=2, **SMALL)
    places = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"needs 0\.0 GiB more host memory \(weights .* are free"):
        prepare(model, Recipe(), "cpu", True)
    assert [param.data_ptr() for param in model.parameters()] == places


@pytest.mark.parametrize(
    ("weights", "words"), [(None, "say where they come from"), ("nowhere", "has neither"), ("random", "leave out")]
)
def test_weights_must_come_from_somewhere(weights, words):
    model = make_model("llama", layers=2, **SMALL) if weights == "random" else on_meta()
    with pytest.raises(ValueError, match=words):
        prepare(model, Recipe(), "cpu", True, {"weights": weights})


# ---- what is refused -------------------------------------------------------------------------------------


def unconverted(model: Any) -> None:
    overcoat.convert(model, Recipe.bf16())


def released(model: Any) -> None:
    overcoat.release_gradients(model, overcoat.AdamW(model.parameters()))


def of_muon(model: Any) -> Any:
    return overcoat.Muon(overcoat.muon_groups(model), adamw_lr=1e-3)


def left_out(model: Any) -> Any:
    return [param for name, param in model.named_parameters() if "layers.1.mlp" not in name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_muon, "by AdamW alone, and .*q_proj"),
        (unconverted, "overcoat.convert it"),
        (released, "released already"),
        (left_out, r"layers\.1\.mlp.*not in the opt"),
    ],
)
def test_what_cannot_be_streamed_is_refused(change, words):
    model = make_model("llama", layers=2, **SMALL)
    overcoat.convert(model)
    made = change(model) or list(model.parameters())
    optimizer = made if isinstance(made, overcoat.Muon) else overcoat.AdamW(made)
    with pytest.raises(ValueError, match=words):
        overcoat.stream(model, optimizer)
    assert {type(param) for param in model.parameters()} == {torch.nn.Parameter}


def accumulate(model: Any, optimizer: Any) -> None:
    for step in range(2):
        loss_of(model, step, "cpu").backward()


def backward_in_eval(model: Any, optimizer: Any) -> None:
    loss_of(model.eval(), 0, "cpu").backward()


def step_between(model: Any, optimizer: Any) -> None:
    """Of weights that autograd does not see: only those that are streamed are trained."""
    for name, param in model.named_parameters():
        param.requires_grad_("layers.0" in name and "proj" in name)
    first, second = (loss_of(model, step, "cpu") for step in range(2))
    second.backward()
    optimizer.step()
    first.backward()


def write_between(model: Any, optimizer: Any) -> None:
    loss = loss_of(model, 0, "cpu")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2.0)
    loss.backward()


def with_a_cache(model: Any, optimizer: Any) -> None:
    model(input_ids=make_batch()["input_ids"], use_cache=True)


def recompute(model: Any, optimizer: Any) -> None:
    x = torch.randn(1, 4, 128, dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(4)[None])
    checkpoint(model.model.layers[0], x, position_embeddings=tables, use_reentrant=False).sum().backward()


def move(model: Any, optimizer: Any) -> None:
    model.to(torch.float32)
    loss_of(model, 0, "cpu")


def unfreeze(model: Any, optimizer: Any) -> None:
    model.model.layers[1].requires_grad_(True)
    loss_of(model, 0, "cpu")


def hook(model: Any, optimizer: Any, kind: str = "register_hook") -> None:
    getattr(model.model.layers[0].mlp.up_proj.weight, kind)(torch.zeros_like)
    loss_of(model, 0, "cpu")


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (accumulate, r"inside `with handle\.accumulate"),
        (backward_in_eval, r"eval\(\) has no backward"),
        (step_between, r"layers\.0 were stepped .* between a forward and its backward: call backward\(\) first"),
        (write_between, r"layers\.0 were .* written to between a forward and its backward"),
        (with_a_cache, r"layers\.0 would train in its original precision.*cache"),
        (recompute, 'Recipe\\(checkpoint="block"\\)'),
        (move, r"was moved or replaced since overcoat\.stream"),
        (unfreeze, "told that it is frozen"),
        (hook, r"up_proj\.weight has a hook for its gradient"),
        (
            functools.partial(hook, kind="register_post_accumulate_grad_hook"),
            r"up_proj\.weight has a hook for its gradient",
        ),
    ],
)
def test_what_cannot_work_later_is_refused(do, words):
    model = make_model("llama", layers=2, **SMALL)
    model.model.layers[1].requires_grad_(False)
    optimizer, _ = prepare(model, Recipe(), "cpu", True)
    with pytest.raises(ValueError, match=words):
        do(model, optimizer)


# ---- on a GPU --------------------------------------------------------------------------------------------


def test_a_streamed_model_makes_no_mask():
    """transformers would look for documents in position_ids, and the host wait for them."""
    model, *_ = make("default", "cpu", True, layers=2)
    mask = causal_mask(model, {"input_ids": make_batch()["input_ids"]})
    assert mask is not None
    assert mask.numel() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["default", "leanest"])
def test_the_host_never_waits(case):
    model, optimizer, _ = make(case, "cuda", True, layers=5)
    train(model, optimizer, "cuda", 2)
    batch = {name: value.cuda() for name, value in make_batch(length=32).items()}
    with waiting_is_an_error():
        for _ in range(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.gpu
def test_many_steps_of_a_wide_model_are_the_same():
    """Copies take as long as layers compute: whoever reads too early reads the layer before."""
    fields = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    runs = []
    for way in (False, True):
        model = make_model("llama", layers=6, **fields)
        runs.append((model, *prepare(model, Recipe.leanest(), torch.device("cuda"), way, offload_buffer=3 * 2**23)))
    assert_same_run(*runs, "cuda", steps=8)


@pytest.mark.gpu
def test_memory_of_the_gpu_does_not_grow_with_layers():
    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    peaks = []
    for layers in (4, 12):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = make_model("llama", layers=layers, **fields)
        run = (model, *prepare(model, Recipe.leanest(), torch.device("cuda"), True))
        train(*run[:2], "cuda", 1)
        torch.cuda.reset_peak_memory_stats()
        train(*run[:2], "cuda", 2)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, run
    assert peaks[1] - peaks[0] < 2 * 2**20  # norms, step counts, inputs of layers; a layer's weights take 34 MB


@pytest.mark.filterwarnings("error:NotImplemented:DeprecationWarning")  # a TypeError from Python 3.14 on
def test_streaming_does_nothing_that_newer_pythons_refuse():
    make("default", "cpu", True, layers=1)


def test_a_weight_frozen_between_passes_does_not_lose_their_sum_in_silence():
    model, _, handle = make("default", "cpu", True, layers=2)
    with handle.accumulate():
        model(**make_batch(length=32)).loss.backward()
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj\.weight has gradients of passes before"):
        model(**make_batch(length=32)).loss.backward()
