"""The loss without logits against Hugging Face's, and what it leaves alone: `pytest tests/models/test_head.py`."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss import loss_utils
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import overcoat
from overcoat import Recipe
from overcoat.models.family import families
from overcoat.models.head import LossHead, why_head_replaced
from overcoat.models.output import NoLogits
from tests.emulation import sqnr
from tests.models.zoo import KINDS, VOCAB, assert_equal, gradients, make_batch, make_model, trained

# The head alone: the decoder layers compute what Hugging Face's do.
ONLY_HEAD = Recipe(fp8=False)


# For limits that are taken from the rounding of such a model.
WIDE = {"layers": 1, "intermediate_size": 688}


@pytest.fixture
def model() -> nn.Module:
    return make_model("llama", **WIDE)


def assert_same_training(model: nn.Module, original: nn.Module, inputs: dict[str, Any], **options: Any) -> None:
    """Loss and gradients to the rounding of BF16, which passes through the layers; k's bias is little else."""
    ours, theirs = model(**inputs, **options), original(**inputs, **options)
    assert isinstance(ours.logits, NoLogits)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-4, atol=0)
    assert ours.loss.dtype == theirs.loss.dtype
    ours.loss.backward()
    theirs.loss.backward()
    expected = gradients(original)
    assert gradients(model).keys() == expected.keys()
    for name, grad in gradients(model).items():
        assert sqnr(expected[name], grad) > (20 if name.endswith("k_proj.bias") else 35), name


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_hugging_face(kind: str, device: torch.device) -> None:
    original = make_model(kind, layers=1).to(device)
    model = copy.deepcopy(original)
    report = overcoat.convert(model, ONLY_HEAD)
    assert report.head is not None
    assert report.head.converted
    inputs = {name: value.to(device) for name, value in make_batch("left-padded").items()}
    assert_same_training(model, original, inputs)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_arguments_by_their_place_are_the_models_own(kind: str) -> None:
    """GPT-2 takes a cache in the second place, others the mask."""
    model, batch = make_model(kind, layers=1), make_batch("left-padded")
    overcoat.convert(model, ONLY_HEAD)
    mask = (batch["attention_mask"],) if kind == "llama" else (None, batch["attention_mask"])
    assert torch.equal(model(batch["input_ids"], *mask, labels=batch["labels"]).loss, model(**batch).loss)


def test_a_loss_with_a_term_for_the_router_is_of_all_logits() -> None:
    head = overcoat.convert(make_model("mixtral", layers=1, output_router_logits=True)).head
    assert head is not None
    assert (head.converted, "output_router_logits" in head.detail) == (False, True)


def test_the_conversion_leaves_one_recorder_of_router_logits_to_a_layer() -> None:
    model = make_model("mixtral", layers=2, output_router_logits=True)
    overcoat.convert(model)
    assert len(model(**make_batch("causal", 1, 16), use_cache=False).router_logits) == 2


@pytest.mark.parametrize("head", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"bias": True}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere2", {"bias": True, "logit_scale": 0.7}),
    ],
)
def test_a_bias_and_a_cap(kind: str, fields: dict[str, Any], head: Any) -> None:
    """In FP32, where nothing hides them; an FP8 head has them outside of its products."""
    fields = dict(fields)
    has_bias = fields.pop("bias", False)
    original: Any = make_model(kind, **WIDE, **fields).float()
    if has_bias:
        weight = original.lm_head.weight
        original.lm_head = nn.Linear(weight.shape[1], VOCAB)
        original.lm_head.weight = weight
        nn.init.normal_(original.lm_head.bias)
    model = copy.deepcopy(original)
    assert overcoat.convert(model, Recipe(fp8=False, head=head)).head.converted  # type: ignore[union-attr]
    limit = 90 if head == "bf16" else 15
    for options in ({}, {"num_items_in_batch": 50}):
        expected, found = (trained(each, {**make_batch("left-padded"), **options}) for each in (original, model))
        assert model.overcoat_ran == "loss without logits"
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5 if head == "bf16" else 0.01, atol=0)
        assert found.keys() == expected.keys()
        assert [name for name, grad in expected.items() if grad.dim() and sqnr(grad, found[name]) < limit] == []
    assert ("lm_head.bias" in found) == has_bias


def z_terms(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of log(sum exp)^2 over the tokens whose next one is a label."""
    lse = logits[:, :-1].float().logsumexp(-1)
    return (lse.square() * (labels[:, 1:] != -100)).sum()


@pytest.mark.parametrize("head", ["bf16", "fp8"])
@pytest.mark.parametrize("num_items", [None, 50])
def test_a_z_loss_is_pytorchs_formula(head: str, num_items: int | None) -> None:
    """In FP32, where nothing hides it; with an FP8 head beside the same head without it."""
    original = make_model("llama", **WIDE).float()
    inputs = make_batch("left-padded")
    count = num_items or int((inputs["labels"][:, 1:] != -100).sum())
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    losses, grads = [], []
    for z_loss in (0.0, 0.05):
        model = copy.deepcopy(original)
        overcoat.convert(model, Recipe(fp8=False, head=head, z_loss=z_loss))  # type: ignore[arg-type]
        loss = model(**inputs, **options).loss
        loss.backward()
        losses.append(loss)
        grads.append(gradients(model))
    result = original(**inputs, **options, output_hidden_states=True)
    extra = 0.05 * z_terms(result.logits, inputs["labels"]) / count
    torch.testing.assert_close(losses[1] - losses[0], extra, rtol=1e-5 if head == "bf16" else 0.01, atol=1e-5)
    assert extra > 0.1 * losses[0]
    (result.loss + extra).backward()
    for name, expected in gradients(original).items():
        assert sqnr(expected, grads[1][name]) > (90 if head == "bf16" else 15), name
        assert sqnr(grads[0][name], grads[1][name]) < 30, name  # it does change them


def test_a_z_loss_is_of_training_alone(model: nn.Module) -> None:
    inputs = make_batch()
    expected = copy.deepcopy(model).eval()(**inputs).loss
    report = overcoat.convert(model, Recipe(fp8=False, z_loss=0.1))
    assert report.head is not None
    assert "z-loss 0.1" in report.head.detail
    torch.testing.assert_close(model.eval()(**inputs).loss, expected)
    # Without logits the final norm rounds once, transformers' twice.
    torch.testing.assert_close(model(**inputs, output_logits=False).loss, expected, rtol=1e-5, atol=0)
    model.train()
    assert model(**inputs).loss > 1.1 * expected
    assert isinstance(model(input_ids=inputs["input_ids"]).logits, torch.Tensor)
    for options in ({"output_logits": True}, {"logits_to_keep": 3}):
        with pytest.raises(ValueError, match=r"z_loss = 0.1 is added where the loss needs no logits"):
            model(**inputs, **options)


def test_a_z_loss_is_refused_where_it_would_be_lost(model: nn.Module) -> None:
    recipe = Recipe(z_loss=1e-4)
    with pytest.raises(ValueError, match=r"z_loss = 0.0001 needs the converted loss, and filter_fn said no"):
        overcoat.convert(model, recipe, lambda _module, name: "head" not in name)
    with pytest.raises(ValueError, match="and there is no lm_head"):
        overcoat.convert(model.model, recipe)
    assert not isinstance(model.model.layers[0], overcoat.models.decoder.Fp8DecoderLayer)  # nothing was changed


def test_tied_embeddings_sum_their_gradients(device: torch.device) -> None:
    original = make_model("qwen2", layers=1, tie_word_embeddings=True).to(device)
    model = copy.deepcopy(original)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    overcoat.convert(model, ONLY_HEAD)
    inputs = {name: value.to(device) for name, value in make_batch().items()}
    assert_same_training(model, original, inputs)
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 50},
        {"num_items_in_batch": torch.tensor(50)},
        {"num_items_in_batch": torch.tensor([50])},
        {"ignore_index": 7},
        {"shift_labels": torch.arange(122).view(2, 61)},
    ],
    ids=["number", "tensor", "tensor of one", "ignore_index", "shift_labels"],
)
def test_arguments_of_the_loss_function(model: nn.Module, options: dict[str, Any]) -> None:
    original = copy.deepcopy(model)
    overcoat.convert(model, ONLY_HEAD)
    assert_same_training(model, original, make_batch(), **options)


def test_logits_are_there_when_asked_for(model: nn.Module) -> None:
    original = copy.deepcopy(model)
    overcoat.convert(model, ONLY_HEAD)
    inputs = make_batch()
    expected = original(**inputs)
    asked = model(**inputs, output_logits=True)
    assert torch.equal(asked.logits, expected.logits)
    assert torch.equal(asked.loss, expected.loss)
    ids = inputs["input_ids"]
    assert torch.equal(model(ids).logits, expected.logits)
    assert torch.equal(model(ids, logits_to_keep=1).logits, expected.logits[:, -1:])
    # A loss of the user's own, in train() mode.
    for each in (model, original):
        F.cross_entropy(each(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, grad in gradients(original).items():
        assert torch.equal(gradients(model)[name], grad), name


def test_eval_is_the_original_forward_unless_told_otherwise(model: nn.Module) -> None:
    original = copy.deepcopy(model).eval()
    overcoat.convert(model)
    model.eval()
    inputs = make_batch()
    expected, got = original(**inputs), model(**inputs)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)
    with torch.no_grad():
        lean = model(**inputs, output_logits=False)
    assert lean.logits is None
    torch.testing.assert_close(lean.loss, expected.loss.detach(), rtol=1e-5, atol=0)


def test_memory_of_the_logits_is_gone() -> None:
    """What waits for the backward at the head: the gradients of its inputs, not the logits in FP32."""
    model = make_model("llama", layers=1, vocab_size=4000)
    inputs = make_batch()
    with overcoat.memory.record_kept(model) as original:
        model(**inputs)
    overcoat.convert(model, ONLY_HEAD)
    with overcoat.memory.record_kept(model) as lean:
        model(**inputs)
    head = {name: size for (op, name), size in lean.by_tensor().items() if op == "linear_cross_entropy"}
    assert head == {"dhidden": 122 * 256 * 2, "dweight": 4000 * 256 * 2}
    assert original.total_bytes - lean.total_bytes > 122 * 4000 * 4 - sum(head.values())


def parallel(*_: Any) -> None:
    """As `parallelize_module` hooks what it cuts."""


parallel.__module__ = "torch.distributed.tensor._api"


class Scaled:
    """A loss function that is an object."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.factor * loss_utils.ForCausalLMLoss(*args, **options)


def test_a_loss_function_that_is_set_on_the_model_runs(model: Any) -> None:
    """Before the conversion and after: it may treat a few tokens in its own way."""
    changed = copy.deepcopy(model)
    changed.loss_function = Scaled()
    report = overcoat.convert(changed, ONLY_HEAD)
    assert "the loss function is" in report.head.detail
    overcoat.convert(model, ONLY_HEAD)
    before = model(**make_batch()).loss
    assert model.overcoat_ran == "loss without logits"
    model.loss_function = Scaled()
    model.loss_function.factor = 2.0
    with pytest.warns(UserWarning, match="the loss function is"):
        torch.testing.assert_close(model(**make_batch()).loss, 2 * before, rtol=1e-4, atol=0)


def test_a_cap_that_is_set_later_is_noticed() -> None:
    """The loss in place of logits is not what the model's own code caps."""
    model: Any = make_model("gemma2", layers=1, final_logit_softcapping=None)
    original = copy.deepcopy(model)
    overcoat.convert(model, ONLY_HEAD)
    model(**make_batch())
    model.config.final_logit_softcapping = original.config.final_logit_softcapping = 2.0
    torch.testing.assert_close(model(**make_batch()).loss, original(**make_batch()).loss, rtol=1e-3, atol=0)
    assert model.overcoat_ran == "loss without logits"


@pytest.mark.parametrize("owner", [LlamaRMSNorm, nn.Linear])
@pytest.mark.filterwarnings("ignore:the loss is computed")
def test_a_patched_class_of_the_end_runs(model: Any, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = copy.deepcopy(model)
    overcoat.convert(model, ONLY_HEAD)
    model(**make_batch())
    monkeypatch.setattr(owner, "forward", lambda self, x, own=owner.forward: 2 * own(self, x))
    torch.testing.assert_close(model(**make_batch()).loss, original(**make_batch()).loss, rtol=1e-4, atol=0)
    monkeypatch.undo()
    torch.testing.assert_close(model(**make_batch()).loss, original(**make_batch()).loss, rtol=1e-4, atol=0)
    assert model.overcoat_ran == "loss without logits"
    assert model.model.norm.overcoat_plain


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # Its gradient is that of the summed loss until the backward divides it: FP16 ends at 65504.
        (lambda model: model.half(), "FP16"),
        (lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head)), "lm_head is a Sequential"),
        (lambda model: model.lm_head.register_forward_hook(lambda *args: None), "lm_head has hooks"),
        (lambda model: model.lm_head.register_forward_hook(parallel), "lm_head has hooks"),
        (lambda model: setattr(model.lm_head, "forward", model.lm_head.forward), "forward of lm_head was replaced"),
        (lambda model: setattr(model, "loss_function", F.cross_entropy), "the loss function is cross_entropy"),
        (lambda model: setattr(model, "forward", model.forward), "forward was replaced on the object"),
    ],
)
def test_what_the_lean_loss_would_not_compute_is_left_alone(model: nn.Module, change: Any, reason: str) -> None:
    change(model)
    report = overcoat.convert(model)
    assert not report.head.converted
    assert reason in report.head.detail
    assert reason in str(report)
    assert type(model).__module__.startswith("transformers.")
    assert isinstance(model(model.dummy_inputs["input_ids"]).logits, torch.Tensor)


def test_what_changes_later_falls_back_with_a_warning(model: nn.Module) -> None:
    original = copy.deepcopy(model)
    overcoat.convert(model, ONLY_HEAD)
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    with pytest.warns(UserWarning, match="lm_head has hooks"):
        result = model(**make_batch())
    expected = original(**make_batch())
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.logits, expected.logits)
    model.lm_head = copy.deepcopy(original.lm_head)
    assert "convert the model again" in why_head_replaced(model)
    overcoat.convert(model, ONLY_HEAD)
    assert why_head_replaced(model) is None
    add_hook_to_module(model.lm_head, AlignDevicesHook("cpu"))  # calls the forward that it replaces
    assert why_head_replaced(model) is None
    model(**make_batch()).loss.backward()
    remove_hook_from_module(model.lm_head)
    for each in (model, original):
        each.lm_head.forward = lambda x, own=each.lm_head.forward: 2 * own(x)
    with pytest.warns(UserWarning, match="the forward of lm_head was replaced on the object"):
        assert torch.equal(model(**make_batch()).loss, original(**make_batch()).loss)


@pytest.mark.parametrize("name", ["fixed_cross_entropy", "ForCausalLMLoss"])
def test_a_loss_that_was_replaced_for_all_models_is_computed(model: nn.Module, name: str, monkeypatch: Any) -> None:
    overcoat.convert(model)
    expected, original = model(**make_batch()).loss, getattr(loss_utils, name)
    monkeypatch.setattr(loss_utils, name, lambda *args, **options: 2 * original(*args, **options))
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", loss_utils.ForCausalLMLoss)
    with pytest.warns(UserWarning, match="computed from all logits: .* has changed since it was converted"):
        torch.testing.assert_close(model(**make_batch()).loss, 2 * expected, rtol=1e-3, atol=0)
    assert "agrees with the proposed block only" in overcoat.convert(model).head.detail


def test_logits_of_a_product_that_was_replaced_are_computed(model: nn.Module, monkeypatch: Any) -> None:
    overcoat.convert(model, ONLY_HEAD)
    monkeypatch.setattr(F, "linear", lambda x, w, b=None, own=F.linear: own(x, w, b) / 2)
    with pytest.warns(UserWarning, match=r"from all logits: F.linear has changed"):
        model(**make_batch())


def test_a_hook_that_calls_lm_head_is_refused(model: nn.Module) -> None:
    """For logits of an earlier layer: it would get the loss, and take it for these."""

    def look(module: Any, args: Any, output: Tensor) -> None:
        model.lm_head(output).softmax(-1)

    overcoat.convert(model, ONLY_HEAD)
    model.model.layers[0].register_forward_hook(look)
    with pytest.raises(ValueError, match=r"lm_head was called twice .*: pass output_logits=True"):
        model(**make_batch())
    assert model(**make_batch(), output_logits=True).logits.dim() == 3


@pytest.mark.parametrize("shape", [(2, 60), (1, 61)])
def test_labels_of_another_shape_are_refused(model: nn.Module, shape: tuple[int, int]) -> None:
    overcoat.convert(model)
    with pytest.raises(ValueError, match=re.escape(f"labels of shape {shape} for hidden states (2, 61, ")):
        model(**{**make_batch(), "labels": torch.zeros(shape, dtype=torch.long)})


def test_the_bf16_recipe_and_no_head_undo_it(model: nn.Module) -> None:
    kinds = type(model), type(model.lm_head)
    for recipe in (Recipe.bf16(), Recipe(head=None)):
        overcoat.convert(model)
        assert isinstance(model.lm_head, LossHead)
        assert overcoat.convert(model, recipe).head.detail == "Recipe.head is None"
        assert (type(model), type(model.lm_head)) == kinds
        assert isinstance(model(**make_batch()).logits, torch.Tensor)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_others_read_of_the_class_stays(kind: str, tmp_path: Any) -> None:
    model = make_model(kind, layers=1)
    original = type(model)
    overcoat.convert(model)
    assert isinstance(model, original)
    assert type(model).__name__ == original.__name__ in {family.causal for family in families()}
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [original.__name__]
    # The HF Trainer drops the columns of a dataset that forward has no argument for.
    parameters = inspect.signature(model.forward).parameters
    assert parameters.keys() >= inspect.signature(original.forward).parameters.keys() - {"self", "cache_position"}
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert torch.equal(again(**make_batch()).loss, model(**make_batch()).loss)
    assert type(copy.deepcopy(model)) is type(model)


def test_compiles_without_graph_breaks(model: nn.Module) -> None:
    overcoat.convert(model)
    inputs = {**make_batch(length=64), "use_cache": False}
    expected = trained(model, inputs)
    torch.compiler.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    assert_equal(trained(model, inputs), expected)


@pytest.mark.filterwarnings("ignore:the loss is computed")
def test_another_loss_compiles_code_of_its_own(model: Any) -> None:
    """Of a copy, and of the model itself after its first compilation."""
    overcoat.convert(model, ONLY_HEAD)
    inputs = {**make_batch(length=64), "use_cache": False}
    changed = copy.deepcopy(model)
    changed.loss_function = Scaled()
    changed.loss_function.factor = 2.0
    torch.compiler.reset()
    losses = [torch.compile(each, backend="aot_eager")(**inputs).loss for each in (model, changed)]
    model.loss_function = changed.loss_function
    losses.append(torch.compile(model, backend="aot_eager")(**inputs).loss)
    torch.testing.assert_close(torch.stack(losses[1:]), 2 * losses[0].expand(2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_whole_model(model: nn.Module, reentrant: bool) -> None:
    overcoat.convert(model)
    inputs = make_batch()
    embedded = model.model.embed_tokens(inputs["input_ids"]).detach()
    results = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=reentrant)):
        model.zero_grad()
        x = embedded.clone().requires_grad_()
        loss = wrap(lambda x: model(inputs_embeds=x, labels=inputs["labels"]).loss, x)
        (loss / 3).backward()
        results.append((loss.detach(), x.grad, gradients(model)["lm_head.weight"].clone()))
    for expected, got in zip(*results):
        assert torch.equal(expected, got)


def test_accumulation_weighs_every_token_the_same(model: nn.Module) -> None:
    """Two micro-batches with `num_items_in_batch` give the gradient of one batch, as the HF Trainer does it."""
    overcoat.convert(model, ONLY_HEAD)
    whole = make_batch("right-padded", batch=4)
    items = int((whole["labels"][:, 1:] != -100).sum())
    expected = trained(model, {**whole, "num_items_in_batch": items})
    model.zero_grad()
    for half in (slice(0, 2), slice(2, 4)):
        part = {name: value[half] for name, value in whole.items()}
        model(**part, num_items_in_batch=items).loss.backward()
    for name, grad in gradients(model).items():
        assert sqnr(expected[name], grad) > 35, name


@pytest.mark.parametrize("with_labels", [False, True])
def test_a_second_thread_is_refused(model: nn.Module, with_labels: bool) -> None:
    """It would take the first one's loss, whose labels are others, for its own, or for logits."""
    overcoat.convert(model)
    inputs, errors = make_batch(), []
    expected = model(**inputs).loss

    def second() -> None:
        try:
            model(**{name: x for name, x in make_batch(seed=1).items() if with_labels or name != "labels"})
        except ValueError as error:
            errors.append(str(error))

    def meanwhile(*_: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    hook = model.model.layers[0].register_forward_hook(meanwhile)
    assert torch.equal(model(**inputs).loss, expected)
    assert len(errors) == 1
    assert "copy.deepcopy" in errors[0]
    assert torch.equal(model(**inputs).loss, expected)
