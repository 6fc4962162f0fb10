"""`overcoat.convert`: what it changes and what it must not change. `pytest tests/models/test_convert.py`."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    BitNetForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
)

import overcoat
from overcoat import Recipe
from overcoat.models.family import decoder_layers, families
from overcoat.models.refusals import ACTIVATIONS
from tests.models.zoo import (
    ENCODERS,
    KINDS,
    assert_equal,
    every_kind,
    gradients,
    make_batch,
    make_encoder,
    make_inputs,
    make_model,
    trained,
)

CORES = ("gpt_oss",)  # sinks, a window, experts: the most that a graph may break at


@pytest.fixture
def model() -> nn.Module:
    return make_model("llama", layers=2)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_names_and_state_dict_are_shared(kind: str) -> None:
    """And the name of the layers' class, by which Accelerate's FSDP and `infer_auto_device_map` find them."""
    model = make_model(kind, layers=2)
    before = dict(model.named_parameters())
    keys, kinds = list(model.state_dict()), {type(layer).__name__ for layer in decoder_layers(model).values()}
    report = overcoat.convert(model)
    after = dict(model.named_parameters())
    assert report.converted == list(decoder_layers(model))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == keys
    layer, *others = decoder_layers(model).values()
    assert {type(each).__name__ for each in (layer, *others)} == kinds <= {family.layer for family in families()}
    assert type(pickle.loads(pickle.dumps(layer))) is type(layer)


@pytest.mark.parametrize("kind", every_kind(("llama", "gpt2", "gemma2", "gpt_oss")))
def test_eval_and_generate_are_untouched(kind: str) -> None:
    model = make_model(kind, layers=2)
    original = copy.deepcopy(model).eval()
    overcoat.convert(model)
    model.eval()
    ids = make_batch()["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, original(input_ids=ids).logits)
    tokens = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids[:, :7], **tokens), original.generate(ids[:, :7], **tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_training_runs_in_fp8_and_fills_every_gradient(kind: str, device: torch.device) -> None:
    model = make_model(kind, layers=2).to(device)
    inputs = {name: value.to(device) for name, value in make_batch("left-padded").items()}
    original = copy.deepcopy(model)
    report = overcoat.convert(model)
    loss, exact = model(**inputs).loss, original(**inputs).loss
    assert {*report.running().values()} == {"FP8", "loss without logits"}
    assert abs(loss.item() - exact.item()) < 0.05
    loss.backward()
    exact.backward()
    found, expected = gradients(model), gradients(original)
    assert found.keys() == dict(model.named_parameters()).keys()
    # Losses agree to the last bit by chance; a whole matrix that does was not computed in FP8.
    assert [name for name, x in expected.items() if x.dim() > 1 and torch.equal(found[name], x)] == []


def test_saved_model_loads_in_plain_transformers(model: nn.Module, tmp_path) -> None:
    overcoat.convert(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded.model.layers[0]).__name__ == "LlamaDecoderLayer"
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    plain = make_model("llama", layers=2, seed=1)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


def test_converted_modules_copy_and_pickle(model: nn.Module) -> None:
    overcoat.convert(model)
    inputs = make_batch()
    expected = model(**inputs).loss
    assert torch.equal(copy.deepcopy(model)(**inputs).loss, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs).loss, expected)


def as_data_parallel(module: Any) -> Any:
    """A copy as nn.DataParallel makes them for each GPU: parameters are plain attributes."""
    copied = module._replicate_for_data_parallel()
    copied._modules = {name: as_data_parallel(part) for name, part in module._modules.items()}
    for name, parameter in module._parameters.items():
        setattr(copied, name, None if parameter is None else parameter * 1)
    return copied


def test_data_parallel_is_refused_in_words(model: nn.Module) -> None:
    overcoat.convert(model)
    with pytest.raises(ValueError, match=r"nn.DataParallel's copies, start a process for each GPU \(torchrun"):
        as_data_parallel(model)(**make_batch())


def test_filter_leaves_layers_alone_and_the_report_says_so(model: nn.Module) -> None:
    report = overcoat.convert(model, filter_fn=lambda module, name: not name.endswith(".1"))
    assert report.converted == ["model.layers.0"]
    assert report.left_alone == {"model.layers.1": "filter_fn said no"}
    text = str(report)
    assert "model.layers.0" in text
    assert "filter_fn said no" in text
    assert "1 of 2 decoder layers" in text


def test_converting_again_changes_the_recipe_and_bf16_undoes_it(model: nn.Module) -> None:
    original = copy.deepcopy(model)
    inputs = make_batch()
    overcoat.convert(model)
    default = model(**inputs).loss
    overcoat.convert(model, Recipe.paper())
    assert model.model.layers[0].overcoat_recipe == Recipe.paper()
    assert len(model.model._forward_pre_hooks) == 1
    report = overcoat.convert(model, Recipe.bf16())
    assert not report.converted
    assert type(model.model.layers[0]) is type(original.model.layers[0])
    assert torch.equal(model(**inputs).loss, original(**inputs).loss)
    assert not torch.equal(default, original(**inputs).loss)


@pytest.mark.parametrize("activation", [name for name, ours in ACTIVATIONS.items() if ours.startswith("gelu")])
def test_the_form_of_gelu_is_that_of_the_config(activation: str) -> None:
    """Between the two forms lie 1e-3 of h, 30 dB below FP8: they are told apart by the argument, not by the loss."""
    model = make_model("starcoder2", layers=1, hidden_act=activation)
    u = torch.linspace(-3, 3, 101)
    ours = ACTIVATIONS[activation]
    expected = F.gelu(u, approximate={"gelu": "none", "gelu_tanh": "tanh"}[ours])
    torch.testing.assert_close(model.model.layers[0].mlp.act(u), expected, rtol=1e-5, atol=1e-6)
    assert f"LayerNorm, biases, {ours}" in overcoat.convert(model).layers[0].detail
    model(**make_batch()).loss.backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("kind", every_kind(("llama", "gpt2", "mixtral")))
def test_a_module_replaced_as_a_whole_is_left_to_the_original(kind: str) -> None:
    model = make_model(kind, layers=2)
    original = copy.deepcopy(model)
    overcoat.convert(model)
    for layer in decoder_layers(model).values():
        layer.mlp = _Wrapped(layer.mlp)
    if kind in ("mixtral", "gpt_oss", "olmoe", "qwen3_moe"):  # experts run as they are, in whatever they are wrapped
        model(**make_batch())
        assert all(layer.overcoat_ran == "FP8" for layer in decoder_layers(model).values())
        return
    with pytest.warns(UserWarning, match="a module is not what .* has there .'_Wrapped'"):
        loss = model(**make_batch(), output_logits=True).loss
    assert torch.equal(loss, original(**make_batch()).loss)
    assert torch.equal(model.eval()(**make_batch()).loss, original.eval()(**make_batch()).loss)
    assert overcoat.convert(model).converted == []


def test_a_model_of_another_kind_is_refused_with_the_known_kinds() -> None:
    with pytest.raises(ValueError, match=r"docs/models\.md"):
        overcoat.convert(nn.Sequential(nn.Linear(4, 4)))
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    model = BitNetForCausalLM(BitNetConfig(num_hidden_layers=1, vocab_size=64, pad_token_id=0, **sizes))
    with pytest.warns(UserWarning, match="no decoder layer trains in FP8: BitNetDecoderLayer: no proposal"):
        report = overcoat.convert(model)
    assert list(report.left_alone) == ["model.layers.0"]


def test_a_layer_that_looks_like_llamas_is_not_taken_for_one() -> None:
    """HunYuan's norms of q and k come after the rotation, in its forward alone."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(num_hidden_layers=1, vocab_size=64, head_dim=16, **sizes))
    assert model.model.layers[0]._modules.keys() == make_model(layers=1).model.layers[0]._modules.keys()
    assert overcoat.convert(model, strict=True).in_part == {"model.layers.0": ("self_attn",)}


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; only silu, swish"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("llama", {"num_key_value_heads": 3}, "4 heads of q do not share 3 of k and v evenly"),
        ("starcoder2", {"hidden_act": "sigmoid"}, "hidden_act is 'sigmoid'; only silu, "),
        ("starcoder2", {"residual_dropout": 0.1}, "residual_dropout is 0.1"),
        ("starcoder2", {"attention_dropout": 0.2}, "attention_dropout is 0.2"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gpt2", {"resid_pdrop": 0.1}, "attn.resid_dropout.p is 0.1"),
        ("clip", {"attention_dropout": 0.1}, "self_attn.dropout is 0.1; only 0 is supported"),
        ("vit", {"hidden_dropout_prob": 0.1}, "dropout.p is 0.1"),
        ("vit", {"attention_probs_dropout_prob": 0.2}, "attention_dropout is 0.2"),
        ("dinov2", {"drop_path_rate": 0.3}, "drop_path.drop_prob is 0.3"),
        ("siglip", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ("bert", {"attention_probs_dropout_prob": 0.1}, "attention.self.dropout.p is 0.1"),
        ("bert", {"is_decoder": True}, "attention.self.is_causal is True; only attention of all tokens is supported"),
    ],
)
@pytest.mark.filterwarnings("ignore:no decoder layer trains")
def test_a_variant_that_cannot_be_done_right_runs_its_own_forward(
    kind: str, options: dict[str, Any], reason: str
) -> None:
    make = make_encoder if kind in ENCODERS else make_model
    report = overcoat.convert(make(kind, layers=1, **options))
    assert report.converted == []
    assert reason in report.layers[0].detail


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("gpt2", "attn.resid_dropout.p"),
        ("phi3", "resid_mlp_dropout.p"),
        ("seed_oss", "mlp.residual_dropout"),
        ("bert", "output.dropout.p"),
        ("clip", "self_attn.dropout"),
    ],
)
def test_dropout_that_is_switched_on_after_the_conversion_is_not_left_out(kind: str, place: str) -> None:
    model = (make_encoder if kind in ENCODERS else make_model)(kind, layers=1).train()
    overcoat.convert(model)
    (layer,) = decoder_layers(model).values()
    path, name = place.rsplit(".", 1)
    setattr(layer.get_submodule(path), name, 0.5)
    with pytest.warns(UserWarning, match=f"original precision: .*{place.removeprefix('mlp.')} is 0.5; only 0"):
        model(**(make_inputs(kind) if kind in ENCODERS else make_batch()))


def test_scores_are_capped_as_the_layer_was_made() -> None:
    """transformers reads the configuration's cap once."""
    model = make_model("gemma2", layers=1)
    overcoat.convert(model)
    expected = model(**make_batch()).loss
    model.config.attn_logit_softcapping = None
    assert torch.equal(model(**make_batch()).loss, expected)
    model.model.layers[0].self_attn.attn_logit_softcapping = None
    assert not torch.equal(model(**make_batch()).loss, expected)


def test_a_mode_that_changes_functions_is_not_left_out() -> None:
    class Halved(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return 0.5 * result if function is F.linear else result

    model = make_model(layers=1)
    with Halved():
        expected = trained(model, make_batch())
        overcoat.convert(model, strict=True)  # as in Lightning's configure_model, which has a mode on
        with pytest.warns(UserWarning, match=r"precision: the mode tests.models.test_convert.*Halved is on"):
            assert_equal(trained(model, make_batch()), expected)


def test_quantized_weights_of_plain_linear_layers_are_left_to_the_original() -> None:
    """torchao's stay in nn.Linear, as tensors of a class that knows no op of ours."""

    class Quantized(torch.Tensor): ...

    model = make_model(layers=1)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Quantized))
    (row,) = overcoat.convert(model).layers
    assert not row.converted
    assert "mlp.up_proj has a weight of type tests.models.test_convert.Quantized, not a plain" in row.detail
    assert type(linear) is nn.Linear


def test_weights_of_a_parameters_subclass_train_in_fp8() -> None:
    """Of those who mark parameters by it; it computes as any other."""

    class Marked(nn.Parameter): ...

    model = make_model(layers=1)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = Marked(linear.weight.detach())
    report = overcoat.convert(model)
    model(**make_batch()).loss.backward()
    assert report.running()["model.layers.0"] == "FP8"
    assert type(linear.weight) is Marked


def test_a_weight_that_is_no_parameter_is_refused() -> None:
    model = make_model(layers=1)
    overcoat.convert(model)
    linear = model.model.layers[0].mlp.up_proj
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight
    with pytest.raises(ValueError, match="the weight of a linear layer is no parameter"):
        model(**make_batch())


@pytest.mark.parametrize("name", ["attention_mask", "position_embeddings"])
def test_masks_and_angles_that_want_a_gradient_get_it(name: str) -> None:
    """A bias of scores, or a rotation, that is trained: attention in FP8 has no gradient for them."""
    layer = make_model(layers=1).model.layers[0]
    overcoat.convert(layer)
    tables = (torch.rand(1, 8, 64, dtype=torch.bfloat16), torch.rand(1, 8, 64, dtype=torch.bfloat16))
    inputs: dict[str, Any] = {"position_embeddings": tables, "attention_mask": torch.zeros(1, 1, 8, 8).bfloat16()}
    wanted = inputs[name] if isinstance(inputs[name], torch.Tensor) else inputs[name][0]
    wanted.requires_grad_()
    with pytest.warns(UserWarning, match=f"original precision: .*{name}.* want"):
        layer(torch.randn(1, 8, 256, dtype=torch.bfloat16), **inputs).pow(2).sum().backward()
    assert wanted.grad is not None


@pytest.mark.filterwarnings("ignore:no decoder layer trains")
def test_a_layer_whose_parts_have_other_names_runs_its_own_forward() -> None:
    """As DINOv2's in older versions of transformers."""
    model = make_encoder("dinov2")
    for layer in decoder_layers(model).values():
        layer.attention._modules.pop("q_proj", None)
    report = overcoat.convert(model)
    assert report.converted == []
    assert "a module is not what Dinov2Layer has there" in str(report)


def test_a_layer_whose_own_forward_was_replaced_is_left_alone(model: nn.Module) -> None:
    layer = model.model.layers[1]
    layer.forward = layer.forward
    assert "was replaced on the object" in overcoat.convert(model).layers[1].detail


@pytest.mark.filterwarnings("error:this layer")
def test_generating_in_train_mode_reads_its_context(model: nn.Module) -> None:
    """With a cache, as GRPO does, and without a warning."""
    original = copy.deepcopy(model)
    report = overcoat.convert(model)
    ids = make_batch()["input_ids"][:, :7]
    tokens = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **tokens), original.generate(ids, **tokens))
    assert "use_cache=True" in report.running()["model.layers.0"]
    with pytest.warns(UserWarning, match="trains in its original precision: .*use_cache=True"):
        model(ids, use_cache=True)


def test_the_report_says_what_ran(model: nn.Module) -> None:
    """At the last forward, whatever was promised; of compiled code, what holds now."""
    report = overcoat.convert(model)
    names = ["model.layers.0", "model.layers.1", "lm_head"]
    assert list(report.running()) == names
    assert all("not seen to run" in ran for ran in report.running().values())
    model(**make_batch())
    assert list(report.running().values()) == ["FP8", "FP8", "loss without logits"]
    model(input_ids=make_batch()["input_ids"])
    assert report.running()["lm_head"] == "all logits"
    model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    with pytest.warns(UserWarning, match="mlp has hooks"):
        model(**make_batch())
    assert list(report.running().values()) == [
        "FP8", "original precision: mlp has hooks, which the FP8 block would not run", "loss without logits",
    ]  # fmt: skip
    model.eval()(**make_batch())
    assert report.running()["model.layers.0"] == "eval(): the original forward"
    assert pickle.loads(pickle.dumps(report)).converted == names[:2]
    del model
    fresh = make_model("llama", layers=1)
    report = overcoat.convert(fresh)
    fresh.model.layers[0].self_attn.register_forward_hook(lambda *args: None)
    assert "self_attn has hooks" in report.running()["model.layers.0"]


class _Script(nn.Module):
    """A model inside of another, as Lightning has it: no `use_cache` of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss


@pytest.mark.parametrize("what", ["wrapper", "sequential", "whole", "inner"])
@pytest.mark.filterwarnings("error")
def test_whoever_is_converted_no_cache_is_built(what: str) -> None:
    """The hook that forbids it is on the module that owns the layers: equal losses, of packed sequences too."""
    inputs, losses = make_batch("packed"), []
    for convert_all in (True, False):
        model = make_model("llama", layers=2)
        script = _Script(model) if what == "wrapper" else nn.Sequential(_Script(model))
        chosen = {"whole": model, "inner": model.model}.get(what, script)
        overcoat.convert(model if convert_all else chosen, Recipe(head=None))
        assert len(model.model._forward_pre_hooks) == 1
        losses.append(script(inputs))
        assert model(**inputs).past_key_values is None
    assert torch.equal(*losses)


def test_a_list_of_layers_is_refused() -> None:
    """The module that calls them could not be told to build no cache."""
    with pytest.raises(ValueError, match="give it the model that calls them"):
        overcoat.convert(make_model("llama", layers=2).model.layers)


def test_a_layer_appended_since_is_that_of_the_original() -> None:
    """Without a cache: in it a copied layer, of the same layer_idx, would read the other's keys as well."""
    inputs, losses = {**make_batch(), "use_cache": False}, {}
    for when in ("never", "before", "after"):
        model = make_model("llama", layers=2)
        if when == "before":
            overcoat.convert(model)
        model.model.layers.append(copy.deepcopy(model.model.layers[1]))
        model.config.num_hidden_layers = 3
        if when == "after":
            overcoat.convert(model)
        losses[when] = [model(**inputs).loss, model.eval()(**inputs).loss]
    assert losses["before"] == losses["after"]
    assert losses["before"][1] == losses["never"][1]
    torch.testing.assert_close(losses["before"][0], losses["never"][0], rtol=1e-3, atol=0)


def test_the_bf16_recipe_takes_any_model() -> None:
    assert not overcoat.convert(nn.Linear(2, 2), Recipe.bf16()).layers


@pytest.mark.filterwarnings("ignore:this layer")
@pytest.mark.parametrize("by_config", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # whose layers are told, and are not
def test_attentions_are_the_models_own(kind: str, by_config: bool) -> None:
    """Not an empty tuple, of which a distillation's loss would be 0."""
    model = make_model(kind, layers=2, attn_implementation="eager", use_cache=False)
    options = {} if by_config else {"output_attentions": True}
    model.config.output_attentions = by_config
    expected = model(**make_batch(), **options).attentions
    report = overcoat.convert(model)
    found = model(**make_batch(), **options).attentions
    assert len(found) == 2
    assert all(map(torch.equal, found, expected))
    assert all("output_attentions" in ran for name, ran in report.running().items() if "lm_head" not in name)
    model.config.output_attentions = False
    model(**make_batch())
    assert set(report.running().values()) == {"FP8", "loss without logits"}


def test_hooks_on_layers_and_gradients_run(model: nn.Module) -> None:
    overcoat.convert(model)
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append("forward"))
    model.model.layers[1].register_full_backward_hook(lambda module, gi, go: seen.append("backward"))
    model.model.layers[0].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda p: seen.append("parameter"))
    model(**make_batch()).loss.backward()
    assert seen == ["forward", "backward", "parameter"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(model: nn.Module, reentrant: bool) -> None:
    overcoat.convert(model)
    expected = trained(model, make_batch())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal(trained(model, make_batch()), expected)


@pytest.mark.parametrize("saved", ["attention", "qk_rope_encode12_", "gemm"])
def test_selective_checkpointing_gives_the_same_gradients_or_none(model: nn.Module, saved: str) -> None:
    """Of all that it may save, q, k and v are written to by the op after theirs."""
    overcoat.convert(model)
    expected = trained(model, make_batch())
    contexts = functools.partial(create_selective_checkpoint_contexts, [getattr(torch.ops.overcoat, saved).default])
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    if saved == "gemm":
        with pytest.raises(RuntimeError, match="cached during selective activation checkpoint has been mutated"):
            trained(model, make_batch())
    else:
        assert_equal(trained(model, make_batch()), expected)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("llama", "layers.1.mlp"),
        ("starcoder2", "layers.1.mlp"),
        ("starcoder2", "mlp.c_fc.bias"),
        ("starcoder2", "layers.0.self_attn.q"),
        ("starcoder2", "layernorm"),
    ],
)
def test_frozen_parameters_get_no_gradient(kind: str, part: str) -> None:
    model = make_model(kind, layers=2)
    overcoat.convert(model)
    expected = trained(model, make_batch())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    found = trained(model, make_batch())
    assert len(found) > 1
    assert_equal(found, {name: value for name, value in expected.items() if name == "loss" or part in name})


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(head=None), Recipe(fp8=False)], ids=["all", "layers", "head"])
def test_transforms_of_functions_are_refused_with_the_remedy(recipe: Recipe) -> None:
    model = make_model(layers=1)
    overcoat.convert(model, recipe)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), make_batch()).loss

    loss(dict(model.named_parameters())).backward()
    with pytest.raises(RuntimeError, match=r"torch.func: .*or do not convert this model"):
        torch.func.grad(loss)(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match=r"torch.jit.trace: .* trace in eval\(\) .*or do not convert this model"):
        torch.jit.trace(model, example_kwarg_inputs=make_batch())
    result, weight = model(**make_batch()).loss, model.get_input_embeddings().weight

    def gradient(factors: torch.Tensor, batched: bool) -> Any:
        return torch.autograd.grad(result, weight, factors, retain_graph=True, is_grads_batched=batched)

    for run in (lambda x: gradient(x, True), torch.func.vmap(lambda x: gradient(x, False))):
        with pytest.raises(RuntimeError, match=r"is_grads_batched=True or vmap: .*or do not convert this model"):
            run(torch.ones(3))


def test_training_in_eval_mode_is_told() -> None:
    """As `from_pretrained` gives a model: it would train in BF16 without a word."""
    model = make_model("llama", layers=1).eval()
    overcoat.convert(model)
    with pytest.warns(UserWarning, match=r"in its original precision, in eval\(\): call train\(\)"):
        trained(model, make_batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(**make_batch())
        trained(model.train(), make_batch())


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        # Llama's with blocks and in test_head.py; wirings: tests/block/test_run.py.
        *(pytest.param(*kind.values, Recipe(), marks=kind.marks) for kind in every_kind(CORES)),
        ("llama", Recipe(linear_scaling="block")),
        pytest.param("starcoder2", Recipe.leanest(), marks=pytest.mark.nightly),
        pytest.param("olmo2", Recipe.leanest(), marks=pytest.mark.nightly),
        pytest.param("starcoder2", Recipe(linear_scaling="block"), marks=pytest.mark.nightly),
    ],
)
def test_compiles_without_graph_breaks(kind: str, recipe: Recipe, device: torch.device) -> None:
    model = make_model(kind, layers=1).to(device)
    overcoat.convert(model, recipe)
    inputs = {name: value.to(device) for name, value in make_batch(length=64).items()}
    # A wrapped layer gets transformers' mask, whose kernel on a GPU is another than a window's bounds: here, too.
    model.base_model.register_forward_pre_hook(lambda *_: None)
    expected = trained(model, inputs)
    torch.compiler.reset()
    for name, layer in decoder_layers(model).items():
        model.set_submodule(name, torch.compile(layer, backend="aot_eager", fullgraph=True))
    assert_equal(trained(model, inputs), expected)


@pytest.mark.gpu
def test_a_gpu_without_fp8_is_refused_before_anything_changes(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overcoat.models.convert.has_float8_tensor_cores", lambda device: False)
    model = model.cuda()
    with pytest.raises(ValueError, match=r"no FP8 tensor cores.*Recipe\.bf16"):
        overcoat.convert(model)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_gpu_without_products_of_blocks_is_refused_with_the_remedy(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is the device's; on a CPU the reference multiplies, whatever the scales."""
    recipe = Recipe(linear_scaling="block")
    report = overcoat.convert(model, recipe)
    assert "1x128 and 128x128 blocks" in str(report)
    overcoat.convert(model, Recipe.bf16())
    monkeypatch.setattr("overcoat.models.convert.has_float8_tensor_cores", lambda device: True)
    monkeypatch.setattr("overcoat.models.convert.why_no_block_gemm", lambda device: "it is a Blackwell")
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    with pytest.raises(ValueError, match=r"linear_scaling = 'block'.*it is a Blackwell.*linear_scaling='tensor'"):
        overcoat.convert(model, recipe)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_a_wrapped_layer_keeps_its_class():
    """As `fully_shard` does: a subclass of what the layer is."""
    model = make_model(layers=2)
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (type(layer),), {})
    report = overcoat.convert(model)
    assert [row.converted for row in report.layers] == [False, True]
    assert "wrapped already, as FSDPLlamaDecoderLayer" in report.layers[0].detail
    second = model.model.layers[1]
    second.__class__ = type("FSDPLayer", (type(second),), {})
    with pytest.raises(ValueError, match="convert it before wrapping"):
        overcoat.convert(model, Recipe.bf16())
    assert type(second).__name__ == "FSDPLayer"


def test_parameters_that_zero_3_partitioned_are_left_alone():
    """As `deepspeed.zero.Init` leaves them before its engine hooks the modules: without data."""
    model = make_model(layers=2)
    for parameter in model.parameters():
        parameter.ds_id, parameter.data = 0, parameter.new_empty(0)
    with pytest.warns(UserWarning, match="trains in FP8: self_attn.q_proj.weight is partitioned by ZeRO-3"):
        report = overcoat.convert(model)
    assert report.head is not None
    assert (report.head.converted, report.head.detail[:30]) == (False, "lm_head.weight is partitioned ")
    with pytest.raises(ValueError, match="is partitioned by ZeRO-3: only the model's own code gathers it"):
        overcoat.convert(model, strict=True)


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [(None, None, "takes a model"), ("gpt2", None, "not 'gpt2'"), (nn.Linear(1, 1), "paper", "from_name")],
    ids=["none", "name", "name of a recipe"],
)
def test_arguments_of_other_types_are_named(model, recipe, message):
    with pytest.raises(TypeError, match=message):
        overcoat.convert(model, recipe)


def test_positions_of_another_length_are_refused() -> None:
    """Angles are taken in turn: 8 of them would have served 16 tokens, where transformers refuses."""
    model = make_model("llama", layers=1)
    overcoat.convert(model)
    ids = make_batch(batch=2, length=16)["input_ids"]
    with pytest.raises(ValueError, match=r"position_ids are 8 positions, but the input has \(2, 16\) tokens"):
        model(input_ids=ids, labels=ids, position_ids=torch.arange(8)[None] + 10**6)


def test_blocks_of_a_wrapped_model_are_offloaded():
    """PyTorch's wrapper leaves its own name out of those of parameters."""
    wrapped = checkpoint_wrapper(make_model(layers=4))
    report = overcoat.convert(wrapped, Recipe(offload_blocks="all"))
    assert sum("in host memory" in row.detail for row in report.layers) == 2  # but the last two


def test_a_layer_that_is_left_alone_later_gets_a_mask_that_it_reads() -> None:
    model = make_model("llama", layers=2)
    original = copy.deepcopy(model)
    overcoat.convert(model)
    overcoat.convert(model, filter_fn=lambda module, name: not name.endswith(".1"))
    torch.testing.assert_close(model(**make_batch()).loss, original(**make_batch()).loss, rtol=2e-3, atol=0)
    overcoat.convert(model, Recipe(fp8=False))
    torch.testing.assert_close(model(**make_batch()).loss, original(**make_batch()).loss, rtol=1e-4, atol=0)
