"""Converted models in other people's scripts, with the real libraries: `pytest tests/models/test_scripts.py`."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import overcoat
from overcoat import Recipe
from overcoat.models.output import NO_LOGITS
from tests.models.test_vision_language import make_model as make_seeing
from tests.models.zoo import VOCAB, make_batch, make_model
from tests.nightly import mostly_nightly

NO_HEAD = Recipe(head=None)
REMEDY = re.escape("pass output_logits=True to the model, or convert it with Recipe(head=None)")


class RewardHead(nn.Module):
    """A hand-written model around the layers' owner, which it calls itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = model.model
        self.score = nn.Linear(256, 1, dtype=torch.bfloat16)
        nn.init.normal_(self.score.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.score(self.backbone(input_ids=input_ids).last_hidden_state).float().square().mean()


def losses(convert_inner: bool, wrap: Any, run: Any) -> Tensor:
    model = make_model("llama", layers=2)
    wrapper = wrap(model)
    report = overcoat.convert(model if convert_inner else wrapper, NO_HEAD)
    loss = run(wrapper, model)
    loss.backward()
    assert set(report.running().values()) == {"FP8"}
    assert all(p.grad is not None for p in model.model.layers.parameters())
    return loss.detach()


def in_lightning(model: nn.Module) -> Any:
    lightning: Any = pytest.importorskip("lightning")

    class Script(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], _: int = 0) -> Tensor:
            return self.model(**batch).loss

    return Script()


@pytest.mark.parametrize(
    ("wrap", "run"),
    [
        (in_lightning, lambda wrapper, model: wrapper.training_step(make_batch("packed"))),
        (RewardHead, lambda wrapper, model: wrapper(**make_batch())),
        (lambda model: nn.ModuleDict({"a": model}), lambda wrapper, model: wrapper["a"](**make_batch()).loss),
    ],
    ids=["lightning", "reward", "dict"],
)
@pytest.mark.filterwarnings("error:this layer", "error:no decoder layer")
def test_any_wrapper_is_the_inner_model(wrap: Any, run: Any) -> None:
    assert torch.equal(losses(True, wrap, run), losses(False, wrap, run))


def test_a_second_model_beside_the_first_is_told_of() -> None:
    models = nn.ModuleDict({"policy": make_model("llama", layers=1), "critic": make_model("qwen3", layers=1)})
    report = overcoat.convert(models)
    told = "critic: its loss is computed from all logits; convert it by itself, too"
    assert (report.head.name, report.parts) == ("policy.lm_head", [told])
    assert told in str(report)
    with pytest.raises(ValueError, match="critic is a second model, with a loss of its own: convert each by itself"):
        overcoat.convert(models, Recipe(z_loss=1e-4))
    overcoat.convert(models["critic"])
    assert overcoat.convert(models).parts == []
    overcoat.convert(models["critic"], Recipe(z_loss=0.1))
    overcoat.convert(models)
    assert models["critic"].overcoat_recipe == Recipe()
    for model in models.values():
        assert model(**make_batch()).logits is NO_LOGITS


def test_what_the_class_of_a_converted_module_makes_is_not_converted(tmp_path: Any) -> None:
    """Reference models, EMA copies and new layers are made by `type(model)`."""
    model, plain = make_model("llama", layers=2), make_model("llama", layers=2)
    overcoat.convert(model)
    model.save_pretrained(tmp_path)
    inputs = make_batch()
    loaded, expected = (type(each).from_pretrained(tmp_path, dtype=torch.bfloat16).train() for each in (model, plain))
    assert type(loaded) is type(plain)
    assert torch.equal(loaded(**inputs).logits, expected(**inputs).logits)
    made = type(model)(model.config)
    assert [type(module) for module in made.modules()] == [type(module) for module in plain.modules()]
    layer = type(model.model.layers[0])(model.config, 2)
    assert type(layer) is type(plain.model.layers[0])
    assert type(copy.deepcopy(model)) is type(pickle.loads(pickle.dumps(model))) is type(model)


WRAPPED = list(itertools.product((checkpoint_wrapper, functools.partial(torch.compile, backend="eager")), (0.0, 1e-4)))


@pytest.mark.parametrize(("wrap", "z_loss"), mostly_nightly(WRAPPED, WRAPPED[1:3]))
def test_layers_owner_that_was_wrapped_since_is_known(wrap: Any, z_loss: float) -> None:
    """Its attributes are the wrapped one's."""
    model = make_model("llama", layers=1)
    overcoat.convert(model, Recipe(z_loss=z_loss))
    expected = model(**make_batch()).loss
    torch.compiler.reset()
    model.model = wrap(model.model)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            result = model(**make_batch())
        assert torch.equal(result.loss, expected)
        assert result.logits is NO_LOGITS
        overcoat.convert(model, Recipe(z_loss=z_loss))


def test_layers_that_were_replaced_since_are_told_of() -> None:
    model = make_model("llama", layers=2)
    report = overcoat.convert(model)
    model.model.layers[1] = make_model("llama", layers=1).model.layers[0]
    model(**make_batch())
    running = report.running()
    assert (running["model.layers.0"], running["model.layers.1"][:5]) == ("FP8", "gone:")
    del model
    gc.collect()
    assert report.running() == {}


def test_no_vision_language_model_beside_another_builds_a_cache() -> None:
    """SmolVLM makes one before it calls the text's owner."""
    models = nn.ModuleDict({"text": make_model("llama", layers=1), "sees": make_seeing("SmolVLM", torch.bfloat16)})
    report = overcoat.convert(models)
    ids = make_batch()["input_ids"] % 80
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        models["sees"](input_ids=ids, labels=ids)
    assert report.running()["sees.model.text_model.layers.0"] == "FP8"


def test_layers_owner_that_was_replaced_since_is_told_of() -> None:
    model, plain = make_model("llama", layers=1), make_model("llama", layers=1)
    overcoat.convert(model)
    model.model = copy.deepcopy(plain.model)
    with pytest.warns(UserWarning, match="all logits: model was replaced since: its layers are as they came; convert"):
        result = model(**make_batch())
    assert torch.equal(result.logits, plain(**make_batch()).logits)
    overcoat.convert(model)
    assert model(**make_batch()).logits is NO_LOGITS


# ---- logits that are not there --------------------------------------------------------------------------------------

USES: dict[str, Any] = {
    "slice": lambda logits: logits[..., :-1, :],
    "method": lambda logits: logits.float(),
    "function": lambda logits: F.log_softmax(logits, -1),
    "product": lambda logits: logits * 2,
    "length": len,
    "iteration": list,
}


@pytest.mark.parametrize("use", USES)
def test_the_first_use_of_missing_logits_names_the_remedy(use: str) -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    with pytest.raises((ValueError, AttributeError), match=REMEDY):
        USES[use](model(**make_batch()).logits)


def test_missing_logits_are_missed_as_items_too() -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    result = model(**make_batch())
    for key in ("logits", 1, -1):
        with pytest.raises(ValueError, match=REMEDY):
            result[key]
    assert result.get("logits") is NO_LOGITS
    assert result["loss"] is result[0] is result.get("loss") is result[:1][0]
    assert result.get("hidden_states") is None
    more = model(**make_batch(), output_hidden_states=True)
    assert more[-1] is more.hidden_states
    with pytest.raises(ValueError, match=REMEDY):
        more[-2]
    whole = model(**make_batch(), output_logits=True)
    assert whole["logits"] is whole[1] is whole[-1] is whole.get("logits") is whole.logits


def test_missing_logits_keep_their_place_in_a_tuple() -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    loss, logits = model(**make_batch(), return_dict=False)
    assert torch.equal(loss, model(**make_batch()).loss)
    with pytest.raises(ValueError, match=REMEDY):
        logits[..., :-1, :]
    more = model(**make_batch(), return_dict=False, output_hidden_states=True)
    whole = model(**make_batch(), return_dict=False, output_hidden_states=True, output_logits=True)
    assert len(more) == len(whole) == 3
    assert len(more[2]) == len(whole[2]) == 2
    compiled = torch.compile(model, backend="eager")(**make_batch(), return_dict=False, output_hidden_states=True)
    assert compiled[1] is None
    assert len(compiled) == 3
    assert len(model(**make_batch(), return_dict=False, output_logits=False)) == 1  # as transformers leaves out None


def test_missing_logits_outlive_what_libraries_do_with_results() -> None:
    """They are no item of the result, and whoever makes a result of its items makes them again."""
    from torch.utils._pytree import tree_map
    from transformers.modeling_outputs import CausalLMOutputWithPast

    accelerate: Any = pytest.importorskip("accelerate")
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    result = model(**make_batch())
    assert isinstance(result, CausalLMOutputWithPast)
    assert list(result) == ["loss"]
    assert result.to_tuple() == (result.loss,)
    assert result.logits is NO_LOGITS
    assert not hasattr(result.logits, "dtype")
    in_fp32 = accelerate.utils.convert_to_fp32(result)
    assert in_fp32.logits is NO_LOGITS
    assert torch.equal(in_fp32.loss, result.loss)
    assert tree_map(lambda x: x, result).logits is NO_LOGITS
    copied = type(result)((name, result[name]) for name in result)  # as DataParallel's gather
    assert copied.logits is NO_LOGITS
    detached = CausalLMOutputWithPast(loss=result.loss.detach())
    restored = pickle.loads(pickle.dumps(type(result)(loss=result.loss.detach())))
    assert type(restored) is type(detached)
    assert torch.equal(restored.loss, detached.loss)
    assert copy.deepcopy(NO_LOGITS) is pickle.loads(pickle.dumps(NO_LOGITS)) is NO_LOGITS
    assert model(**make_batch(), output_logits=True).logits.shape[-1] == VOCAB


# ---- TRL ------------------------------------------------------------------------------------------------------------


def test_a_z_loss_warns_without_labels_and_where_it_is_added_does_not(recwarn: pytest.WarningsRecorder) -> None:
    model = make_model("llama", layers=1)
    overcoat.convert(model, Recipe(z_loss=1e-4))
    inputs = make_batch()
    model(**inputs).loss.backward()
    with torch.no_grad():
        model(input_ids=inputs["input_ids"])
    model.eval()(input_ids=inputs["input_ids"])
    assert not [warning for warning in recwarn if "z_loss" in str(warning.message)]
    with pytest.warns(UserWarning, match="z_loss"):
        model.train()(input_ids=inputs["input_ids"])
    overcoat.convert(model)
    recwarn.clear()
    model(input_ids=inputs["input_ids"])
    assert not [warning for warning in recwarn if "z_loss" in str(warning.message)]
