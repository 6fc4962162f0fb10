"""The prediction against what real models keep and store, on the CPU to the byte, and against recorded GPU runs."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import overcoat
from benchmarks.shapes import build_model
from overcoat import Recipe
from overcoat.estimate import Predictor, Setup, predict
from overcoat.estimate.dry_run import own_loss
from overcoat.estimate.phases import measure_step
from overcoat.estimate.predict import CONTEXT, LASTING
from overcoat.memory import optimizer_bytes, record_kept
from overcoat.models.dummy_batch import freeze_tower, images, tokens
from overcoat.models.shapes import MODELS
from overcoat.optim.state import bytes_to_offload
from overcoat.train.build import loss_for_estimates
from tests.benchmarks.peers import EXPERTS, SEEING
from tests.models.zoo import DISTINCT, KINDS, make_batch, make_model
from tests.nightly import mostly_nightly

BATCH, LENGTH = 2, 64
WIDTH = 256
LARGE_EXPERTS = EXPERTS.changed(hidden_size=WIDTH, intermediate_size=WIDTH)  # large enough for FP8
RECIPES = {
    "default": Recipe(),
    "paper": Recipe.paper(),
    "leanest": Recipe.leanest(),
    "attention bf16": Recipe(kept_attention="bf16"),
    "offloaded": Recipe(offload_blocks="all"),
    "block scales": Recipe(linear_scaling="block"),
    "fp8 head": Recipe(head="fp8"),
    "logits": Recipe(head=None),
    "int8 groups of 32": Recipe(kept_format="int8", group_size=32),
    "e4m3 gradients": Recipe(grad_format="e4m3"),
}


def kept_by(model, recipe, kind="causal", length=LENGTH):
    overcoat.convert(model, recipe)
    with record_kept(model) as kept:
        loss = model(**make_batch(kind, BATCH, length)).loss
    del loss
    return kept


# ---- kept activations -----------------------------------------------------------------------------------------------


KEPT = [
    *(("llama", recipe) for recipe in RECIPES),
    *((kind, "leanest") for kind in ("gemma2", "gpt_neox", "mixtral", "olmo2", "starcoder2")),  # each wiring once
    # Estimates of a vision-language model have images: below.
    *((kind, "default") for kind, (family, _) in KINDS.items() if family.backbone and kind != "llama"),
]


@pytest.mark.parametrize(
    ("kind", "recipe"), mostly_nightly(KEPT, [case for case in KEPT if case[0] in DISTINCT or case[1] == "leanest"])
)
def test_kept_activations_are_those_of_a_real_forward(kind, recipe):
    """By op and tensor; of every family: grouped-query heads, biases, q/k norms, sliding windows."""
    model = make_model(kind, layers=4 if recipe == "offloaded" else 2)  # the last blocks are not
    predicted = Predictor(model.config).kept(BATCH, LENGTH, Setup(RECIPES[recipe]))
    measured = kept_by(model, RECIPES[recipe])
    found, expected = predicted.by_tensor(), measured.by_tensor()
    if own := {name for name, module in model.named_modules() if type(module) is torch.nn.LayerNorm}:
        # PyTorch's own final LayerNorm keeps its statistics in FP32 on a GPU, and in BF16 on a CPU.
        for kept in (found, expected):
            assert sum(kept.pop(row) for row in list(kept) if row[0] in own) < 2 * BATCH * LENGTH * 256 * 2
    assert found == expected
    assert predicted.host_bytes == measured.host_bytes
    assert (predicted.host_bytes > 0) == (recipe == "offloaded")


def test_kept_activations_with_tied_embeddings_and_a_document_mask():
    def packed_loss(model, batch, sequence):
        ids = torch.empty((batch, sequence), dtype=torch.int64, device="meta")
        return model(input_ids=ids, labels=ids, position_ids=torch.empty_like(ids)).loss

    model = make_model("llama", layers=2, tie_word_embeddings=True)
    predicted = Predictor(model.config, packed_loss).kept(BATCH, 4 * LENGTH, Setup(document_mask=True))
    measured = kept_by(model, Recipe(), "packed", 4 * LENGTH)
    found, expected = predicted.by_tensor(), measured.by_tensor()
    # How many documents there are is known where there are tokens only.
    assert max(kept.pop(("block", "mask")) for kept in (found, expected)) < 100
    assert found == expected


def test_the_baseline_keeps_what_a_bf16_model_does():
    """In bytes: the fused attention of a GPU and that of a CPU keep the same, but for its random state."""
    model = make_model("llama", layers=2)
    predicted = Predictor(model.config).kept(BATCH, LENGTH, Setup(Recipe.bf16()))
    assert predicted.total_bytes == pytest.approx(kept_by(model, Recipe.bf16()).total_bytes, rel=1e-3)


def test_experts_keep_what_grouped_mm_saves():
    """By hand: BF16 of each token and choice, and where to find them."""
    saved = Predictor(EXPERTS.config()).kept(BATCH, LENGTH, Setup()).by_tensor()
    rows, hidden, columns = BATCH * LENGTH * 2, 128, 64
    activation = 2 * columns  # silu(gate), and its product with up
    # The gathered input, gate and up, down's output, and the router's weight of each.
    rest = hidden + 2 * columns + hidden + 1
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        assert saved[f"{experts}.act_fn", "bfloat16"] == 2 * rows * activation
        assert saved[experts, "bfloat16"] == 2 * rows * rest
        assert saved[experts, "int64"] == 8 * rows * 3  # tokens, their order and its inverse
        assert saved[experts, "int32"] == 4 * 8  # ends of the groups


def test_experts_in_fp8_keep_codes_in_slots():
    """By hand: 256 pairs of 128 tokens lie in tiles of 64 slots, the last of each of 8 experts not full."""
    saved = Predictor(LARGE_EXPERTS.config()).kept(BATCH, LENGTH, Setup()).by_tensor()
    tokens, pairs, layers = BATCH * LENGTH, 2 * BATCH * LENGTH, 2
    tiles = (pairs + 8 * 63) // 64
    slots = 64 * tiles
    expected = {
        "x": tokens * WIDTH,
        "codes": slots * 2 * WIDTH,
        "group_amax": 2 * slots * 2 * WIDTH // 128,
        "weights": 2 * pairs,
        "slots": 4 * pairs,
        "tokens": 4 * slots,
        "experts": 4 * tiles,
        "bounds": 4 * 9,
        "w1_amax": 4 * 8,
        "w2_amax": 4 * 8,
        "x_scale": 4,
        "h_scale": 4,
    }
    assert {name: size for (op, name), size in saved.items() if op == "experts"} == {
        name: layers * size for name, size in expected.items()
    }
    assert not [row for row in saved if row[0].endswith("mlp.experts")]  # by transformers


@pytest.mark.parametrize("label", ["block 2 forward", "block 1 backward"])
def test_one_weight_of_experts_is_there_in_fp8_at_a_time(label):
    """Of one layer's two, and little else of so few tokens."""
    width = 1024
    config = LARGE_EXPERTS.changed(hidden_size=width, intermediate_size=width).config()
    prediction = predict(config, 1, 16)
    found = dict(zip([phase.label for phase in prediction.phases], prediction.by_phase, strict=True))[label]
    assert found["workspace"] == pytest.approx(8 * 2 * width * width, rel=0.2)


def test_experts_are_counted_with_all_their_weights():
    config = EXPERTS.config()
    attention, norms = 128 * (128 + 2 * 64 + 128), 2 * 128 + 128 + 64  # and those of q and k
    layer = attention + norms + 8 * 3 * 128 * 64 + 8 * 128
    assert predict(config, BATCH, LENGTH).parameters == 2 * layer + 128 + 2 * 320 * 128


@pytest.mark.parametrize(("shape", "recipe"), [(EXPERTS, Recipe()), (LARGE_EXPERTS, Recipe.bf16())])
def test_eager_experts_in_bf16_are_refused_with_the_remedy(shape, recipe):
    config = shape.changed(experts_implementation="eager").config()
    with pytest.raises(ValueError, match="grouped_mm"):
        predict(config, BATCH, LENGTH, Setup(recipe))


def test_experts_in_fp8_need_no_implementation_of_transformers():
    eager = LARGE_EXPERTS.changed(experts_implementation="eager").config()
    found, expected = (predict(config, BATCH, LENGTH) for config in (eager, LARGE_EXPERTS.config()))
    assert (found.components, found.phases) == (expected.components, expected.phases)

    def loss_of(model, batch, sequence):
        raise NotImplementedError("another op")

    with pytest.raises(ValueError, match="another op"):
        Predictor(eager, loss_of).predict(BATCH, LENGTH)


# ---- models that see ------------------------------------------------------------------------------------------------


def seeing_step(kind, setup, side):
    """A small model that is trained, and its inputs without labels' values."""
    model = build_model(SEEING[kind], torch.bfloat16, "cpu")
    if setup.freeze_tower:
        freeze_tower(model)
    overcoat.convert(model, setup.recipe)
    given = images(model, BATCH, LENGTH, side)
    return model, {**given, **tokens(model, BATCH, LENGTH, given)}


SIDES = {"llava": 16, "qwen3_vl": 24}
SEEN = [("llava", "default"), ("llava", "leanest"), ("llava", "bf16"), ("qwen3_vl", "default"), ("qwen3_vl", "leanest")]
SEEN = [(*case, frozen) for frozen in (False, True) for case in SEEN]


@pytest.mark.parametrize(("kind", "recipe", "frozen"), mostly_nightly(SEEN, SEEN[::2]))
def test_kept_activations_of_models_that_see(kind, recipe, frozen):
    """By op and tensor, but for LayerNorms' statistics, which are FP32 on a GPU; in BF16 in all."""
    side = SIDES[kind]
    setup = Setup({**RECIPES, "bf16": Recipe.bf16()}[recipe], freeze_tower=frozen)
    model, inputs = seeing_step(kind, setup, side)
    predictor = Predictor(model.config, functools.partial(own_loss, side=side))
    predicted = predictor.kept(BATCH, LENGTH, setup)
    with record_kept(model) as measured:
        loss = model(**inputs).loss
    del loss
    assert predicted.total_bytes == pytest.approx(measured.total_bytes, rel=0.01)
    if recipe == "bf16":
        return
    found, expected = predicted.by_tensor(), measured.by_tensor()
    norms = {name for name, module in model.named_modules() if type(module) is torch.nn.LayerNorm}
    assert {row: size for row, size in found.items() if row[0] not in norms} == {
        row: size for row, size in expected.items() if row[0] not in norms
    }
    tower = [row for row in found if row[0].startswith(model.overcoat_spec.vision)]
    assert frozen <= all(row[0].startswith(model.overcoat_spec.connector) for row in tower)


WITH_IMAGES = list(itertools.product(SIDES, ({}, {"freeze_tower": True}, {"freeze_tower": True, "accumulation": 2})))


@pytest.mark.parametrize(("kind", "options"), mostly_nightly(WITH_IMAGES, WITH_IMAGES[::2]))
def test_every_phase_of_a_real_step_with_images(kind, options):
    setup, side = Setup(**options), SIDES[kind]
    model, inputs = seeing_step(kind, setup, side)
    prediction = Predictor(model.config, functools.partial(own_loss, side=side)).predict(BATCH, LENGTH, setup)
    optimizer = overcoat.AdamW([p for p in model.parameters() if p.requires_grad], **setup.group)

    def step():
        for _ in range(setup.accumulation):
            model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure_step(model, optimizer) as measured:
        step()
    there = sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor))
    predicted = [phase._replace(peak=phase.peak - prediction.handle_bytes) for phase in prediction.phases]
    assert [phase.label for phase in predicted] == [phase.label for phase in measured]
    assert ("patch embedding backward" in {phase.label for phase in measured}) is not setup.freeze_tower
    for mine, real in zip(predicted, measured, strict=True):
        assert mine.peak == pytest.approx(real.peak, abs=2 * there + 65536), mine.label


def test_a_tower_in_bf16_that_asks_for_lengths_is_refused():
    with pytest.raises(ValueError, match="a qwen3_vl model does what PyTorch cannot do without data"):
        Predictor(SEEING["qwen3_vl"].config(), functools.partial(own_loss, side=24)).kept(1, 32, Setup(Recipe.bf16()))


def test_a_model_that_sees_is_estimated_on_one_gpu():
    with pytest.raises(ValueError, match="gpus 2: a llava model is estimated on one GPU only; use --gpus 1"):
        predict(SEEING["llava"].config(), 1, 32, gpus=2)
    with pytest.raises(ValueError, match="replicated: a llava model is estimated on one GPU only; use --gpus 1"):
        predict(SEEING["llava"].config(), 1, 32, Setup(replicated=True))


# ---- optimizer states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moments", "master", "dtype"),
    [
        ("8bit", "bf16+8", "bfloat16"),
        ("fp8", "bf16+16", "bfloat16"),
        ("bf16", "bf16", "bfloat16"),
        (("de8x", "log8"), "bf16+16", "bfloat16"),
        ("fp32", "bf16+8", "float32"),
    ],
)
def test_states_are_those_of_a_real_optimizer(moments, master, dtype):
    setup = Setup(moments=moments, master=master, group_size=64, dtype=dtype)
    model = make_model("qwen2", layers=1, vocab_size=130, tie_word_embeddings=True).to(setup.torch_dtype)
    prediction = predict(model.config, 1, 32, setup)
    optimizer = overcoat.AdamW(model.parameters(), **setup.group)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    remainders = [state["remainder"].nbytes for state in optimizer.state.values() if "remainder" in state]
    components = prediction.components
    assert components["remainders"] == sum(remainders)
    assert components["moments"] + components["remainders"] == optimizer_bytes(optimizer)
    assert components["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    assert prediction.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_states_are_those_of_a_real_muon():
    model = make_model("mixtral", layers=1, vocab_size=130)
    adamw, muon = (predict(model.config, 1, 32, Setup(optimizer=name)) for name in ("adamw", "muon"))
    optimizer = overcoat.Muon(overcoat.muon_groups(model), lr=0.02, adamw_lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    components = muon.components
    assert components["moments"] + components["remainders"] == optimizer_bytes(optimizer)
    assert muon.phases[-1].peak > adamw.phases[-1].peak - adamw.components["moments"] + components["moments"]
    offloaded, owners = predict(model.config, 1, 32, Setup(optimizer="muon", offload=True)), optimizer.param_groups
    assert offloaded.host_bytes == sum(bytes_to_offload(p, group) for group in owners for p in group["params"])
    assert offloaded.components["moments"] == 4 * sum(len(group["params"]) for group in owners)  # the step counts
    assert offloaded.components["remainders"] == 0
    with pytest.raises(ValueError, match="moments 'log8'"):
        Setup(optimizer="muon", moments="log8")


# ---- the whole step -------------------------------------------------------------------------------------------------

# (name, kind, whether the head is the embedding, setup)
STEPS = (
    ("default", "llama", False, Setup()),
    ("tied", "llama", True, Setup()),
    ("leanest", "llama", False, Setup(Recipe.leanest())),
    ("logits", "llama", False, Setup(Recipe(head=None))),
    ("accumulation", "llama", False, Setup(accumulation=2)),
    ("released", "llama", False, Setup(release_gradients=True)),
    ("tied, released", "llama", True, Setup(release_gradients=True)),
    ("fp8 head, fp32 moments", "llama", False, Setup(Recipe(head="fp8"), moments="fp32", master="bf16+16")),
    ("two blocks offloaded", "llama", False, Setup(Recipe(offload_blocks=2))),
    ("all offloaded, released", "llama", False, Setup(Recipe(offload_blocks="all"), release_gradients=True)),
    ("experts", "mixtral", False, Setup()),
    ("experts with biases, transposed", "gpt_oss", False, Setup(release_gradients=True)),
)


@pytest.mark.parametrize(("kind", "tied", "setup"), [step[1:] for step in STEPS], ids=[step[0] for step in STEPS])
def test_every_phase_of_a_real_step(kind, tied, setup):
    """Peak and end of each phase of the second step, within what the scalars of a step take."""
    layers = 4 if setup.recipe.offload_blocks else 3  # the last two are not offloaded
    model = make_model(kind, layers=layers, vocab_size=2048, tie_word_embeddings=tied)
    prediction = predict(model.config, BATCH, LENGTH, setup)
    overcoat.convert(model, setup.recipe)
    optimizer = overcoat.AdamW(model.parameters(), **setup.group)
    if setup.release_gradients:
        overcoat.release_gradients(model, optimizer)

    def step():
        for index in range(setup.accumulation):
            model(**make_batch("causal", BATCH, LENGTH, seed=index)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure_step(model, optimizer) as measured:
        step()
    absent = prediction.handle_bytes  # a CPU has none
    predicted = [phase._replace(peak=phase.peak - absent, end=phase.end - absent) for phase in prediction.phases]
    assert [phase.label for phase in predicted] == [phase.label for phase in measured]
    for mine, real in zip(predicted[:-1], measured[:-1]):
        assert mine.peak == pytest.approx(real.peak, abs=8192), mine.label
        assert mine.end == pytest.approx(real.end, abs=8192), mine.label
    # The optimizer's own scalars, and the gradients are freed at its end.
    assert predicted[-1].peak == pytest.approx(measured[-1].peak, abs=32768)
    fullest = max(prediction.phases, key=lambda phase: phase.peak)
    assert prediction.peak_bytes == sum(prediction.components.values()) == fullest.peak
    assert prediction.moment == fullest.label
    assert set(LASTING) < set(prediction.components)
    assert prediction.total_bytes == prediction.peak_bytes + prediction.slack_bytes + CONTEXT


# ---- recorded runs of an H200: 124M, batch 32 x 1024 ----------------------------------------------------------------


def recorded(run, figure):
    rows = (Path(__file__).parents[2] / "benchmarks" / "results" / "training.jsonl").read_text().splitlines()
    return next(row["runs"][run][figure] for row in map(json.loads, rows) if run in row.get("runs", {}))


@pytest.mark.parametrize(
    ("run", "recipe", "since"),
    [
        ("BF16, FP32 moments", Recipe.bf16(), 96),
        ("Recipe(), q and k in 12 bits, bounds of gradients", Recipe(), 12 * 4 * 12),
    ],
)
def test_recorded_kept_bytes_to_the_byte(run, recipe, since):
    """What `record_kept` counted in those runs; since: fused attention's random state was not counted, and the maxima
    of a layer's four operands were not 16 bytes apart."""
    predicted = Predictor(MODELS["124m"].config(), loss_for_estimates(False)).kept(32, 1024, Setup(recipe))
    assert predicted.total_bytes == recorded(run, "kept_bytes") + since


@pytest.mark.parametrize(("frozen", "measured"), [(False, 47.1), (True, 45.7)], ids=["trained", "frozen"])
def test_measured_peaks_of_llava_within_one_percent(frozen, measured):
    """GiB on an H200, 4 x 2048, tower and text in FP8 (docs/benchmarks.md)."""
    peak = predict(MODELS["llava-1.5-7b"].config(), 4, 2048, Setup(freeze_tower=frozen)).peak_bytes
    assert peak / 2**30 == pytest.approx(measured, rel=0.01)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "float16.*choose one of bfloat16, float32"),
        ({"moments": "4bit"}, "unknown moments '4bit'"),
        ({"master": "fp8"}, "unknown master 'fp8'"),
        ({"group_size": 48}, "group_size 48 must be one of"),
        ({"accumulation": 0}, "at least 1"),
        ({"release_gradients": True, "accumulation": 4}, "cannot accumulate 4 forward passes"),
    ],
)
def test_a_setup_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Setup(), **change)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, 0, f"{name} 0 must be at least 1") for name in ("batch", "sequence", "gpus")),
        ("batch", 2**36, "at most"),
    ],
)
def test_numbers_that_cannot_be(name, value, said):
    with pytest.raises(ValueError, match=said):
        predict(make_model("llama", layers=1).config, **{"batch": 1, "sequence": 32, name: value})


@pytest.mark.parametrize("recipe", ["default", "leanest", "offloaded"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_model_runs_many_times(recipe, gpus):
    """One that was run with other rows, released and accumulating, holds what a new one does."""
    config, setup = make_model("llama", layers=4).config, Setup(RECIPES[recipe], all_gather="fp8")
    used = Predictor(config)
    for rows, changes in ((3, {}), (2, {"release_gradients": True}), (2, {"accumulation": 2})):
        used.predict(rows, LENGTH, replace(setup, **changes), gpus)
    assert used.predict(BATCH, LENGTH, setup, gpus) == Predictor(config).predict(BATCH, LENGTH, setup, gpus)
    assert len(used._models) == 1


def test_two_threads_run_dry_in_turn():
    """A dry run patches ops for all threads."""
    config, meeting = make_model("llama", layers=1).config, threading.Barrier(2)

    def loss_of(model, batch, sequence):
        with pytest.raises(threading.BrokenBarrierError):  # nobody comes
            meeting.wait(0.3)
        return own_loss(model, batch, sequence)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda batch: Predictor(config, loss_of).predict(batch, LENGTH).phases, (1, 2)))
    assert found == [predict(config, batch, LENGTH).phases for batch in (1, 2)]
