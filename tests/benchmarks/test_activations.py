"""Codes and probes on planted tensors, and the whole benchmark on a tiny model."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.activation_codes import (
    OURS,
    OURS_CENTERED,
    PAPER,
    activation_codes,
    attention_codes,
    gradient_codes,
    relative_error,
    sqnr,
)
from benchmarks.activation_probes import ATTENTION, BF16, GRADIENTS, attention_errors, probe
from benchmarks.activation_report import KEPT, layers_table, maximum_text, means_table
from benchmarks.activations import main
from overcoat.ops.attention import Heads, Rotary
from overcoat.train.configfile import build_config, dump_toml
from overcoat.train.tokenizer import train_tokenizer
from tests.train.conftest import TINY, corpus_files

__all__ = ["corpus_files"]  # a fixture


def gaussian(tokens=64, columns=256, seed=0):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


# ---- codes -------------------------------------------------------------------------------------------------


def test_sqnr_by_hand():
    assert sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5])) == pytest.approx(20.0)
    assert sqnr(torch.ones(3), torch.ones(3)) == math.inf
    assert relative_error(20.0) == pytest.approx(0.1)


def test_integer_grids_beat_e4m3_and_narrow_groups_beat_wide_ones():
    x = gaussian()
    found = {name: sqnr(x, code(x)) for name, code in activation_codes().items()}
    assert found["INT8 1xG"] > found[PAPER] + 8
    assert found[OURS] > found[PAPER] + 8
    assert found[PAPER] > found["E4M3 1xG"] > 30
    assert 28 < found["E4M3 per tensor"] < 33


def test_one_loud_token_hurts_blocks_of_tokens_but_no_groups_within_one():
    x = gaussian()
    quiet = sqnr(x[1:4], activation_codes()["INT8 1xG"](x)[1:4])
    x[0] *= 1e6
    for name, code in activation_codes().items():
        error = sqnr(x[1:4], code(x)[1:4])
        if name in ("E4M3 per tensor", "E4M3 4x4"):
            assert error < 5
        else:
            assert error > (quiet - 0.01 if name == "INT8 1xG" else 30)


def test_centering_removes_a_common_vector():
    x = gaussian() + 50 * gaussian(1, seed=1)
    noise = {name: float((code(x) - x).square().mean()) for name, code in attention_codes(64, 32).items()}
    for center in (OURS_CENTERED, "INT8 1xG, centered", "sqrt8 1xG, sequence means"):
        assert noise[center] < 0.02 * noise[OURS]
    # Each sequence another vector: one for all cannot take them out.
    x = gaussian() + 50 * gaussian(2, seed=1).repeat_interleave(32, 0)
    noise = {name: float((code(x) - x).square().mean()) for name, code in attention_codes(64, 32).items()}
    assert noise["sqrt8 1xG, sequence means"] < 0.02 * noise[OURS_CENTERED]


def test_gradient_codes_differ_in_resolution_and_range():
    x = gaussian()
    found = {name: sqnr(x, code(x)) for name, code in gradient_codes().items()}
    assert found["E4M3 per tensor"] > found["E5M2 per tensor"] + 5
    x[32:] *= 1e-7
    lost = {name: float((code(x) == 0).float().mean()) for name, code in gradient_codes().items()}
    assert lost["E4M3 per tensor"] > 0.4
    assert lost["E4M3 1x128"] < 0.01


# ---- probes ------------------------------------------------------------------------------------------------


def attention_inputs(device):
    """q, k, v, the gradient of o; no rotation; 2 sequences of 32 tokens, 2 heads of 64 that share one of k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(64, width, generator=generator).to(device) for width in (128, 64, 64, 128))
    rotary = Rotary(torch.ones(32, 64, device=device), torch.zeros(32, 64, device=device))
    return q, k, v, do, rotary, Heads(2, 2, 1, 64, 64**-0.5)


def test_a_common_key_vector_costs_gradients_unless_it_is_taken_out(device):
    q, k, v, do, rotary, heads = attention_inputs(device)
    k = k + 30 * torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).to(device)
    found = attention_errors((q, k, v), do, rotary, heads, ATTENTION)
    assert set(found) == {BF16, *ATTENTION}
    assert found[OURS_CENTERED]["dq"] > found[OURS]["dq"] + 6
    assert found["sqrt8 1xG, k centered"]["dq"] > found[OURS]["dq"] + 6
    assert found[OURS]["dq"] > found["E4M3 1xG"]["dq"]


def test_sharp_attention_wants_the_sum_that_fits_the_coded_scores(device):
    q, k, v, do, rotary, heads = attention_inputs(device)
    found = attention_errors((6 * q, k, v), do, rotary, heads, ATTENTION)
    assert found["sqrt8 1xG, centered, o again"]["dv"] > found[OURS_CENTERED]["dv"] + 6
    assert found[BF16]["dv"] > found[OURS_CENTERED]["dv"] + 6


def small_model(**changes):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def test_probes_see_every_tensor_of_every_layer_and_leave_nothing_behind(device):
    model = small_model().to(device)
    ids = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    results, loss = probe(model, lambda: model(ids, labels=ids, use_cache=False).loss)
    assert loss == pytest.approx(math.log(320), rel=0.05)
    norms = [f"{norm}: {part}" for norm in ("input norm", "post attention norm") for part in ("x", "xhat")]
    seen = {*norms, "q", "k", "v", "o", "gate", "up", "product", "product of coded gate, up", "dq", "dk", "dv"}
    assert seen | set(GRADIENTS) < set(results.sqnr)
    for name, codes in results.sqnr.items():
        for code, values in codes.items():
            assert len(values) == 2, (name, code)
            assert all(15 < value < 90 for value in values), (name, code, values)
    assert set(results.lost) == set(GRADIENTS)
    # A norm's scale is per token, so coding x or xhat is the same but for the maxima's own rounding.
    x, xhat = (results.sqnr[f"input norm: {part}"][OURS] for part in ("x", "xhat"))
    assert xhat == pytest.approx(x, abs=0.2)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_probed_tensors_are_the_models_own(monkeypatch):
    model, seen = small_model(), {}

    def remember(self, name, layer, codes, *inputs, function=None):
        seen[name, layer] = inputs[0] if function is None else function(*(x.float() for x in inputs))

    monkeypatch.setattr("benchmarks.activation_probes.Results.measure", remember)
    ids = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(0))
    states = {}
    layer = model.model.layers[1]
    hook = layer.mlp.register_forward_pre_hook(lambda module, args: states.update(normed=args[0].flatten(0, 1)))
    probe(model, lambda: model(ids, labels=ids, use_cache=False).loss)
    hook.remove()
    torch.testing.assert_close(seen["post attention norm: output of coded x", 1], states["normed"])
    gate = states["normed"] @ layer.mlp.gate_proj.weight.t()
    torch.testing.assert_close(seen["gate", 1], gate)
    torch.testing.assert_close(seen["product", 1], torch.nn.functional.silu(gate) * seen["up", 1])
    torch.testing.assert_close(seen["product of coded gate, up", 1], seen["product", 1], rtol=1e-4, atol=1e-5)
    assert seen["ddown", 1].shape == seen["do_proj", 1].shape == (32, 64)
    assert seen["dgate_up", 1].shape == (32, 192)
    assert seen["dqkv", 1].shape == (32, 128)


def test_models_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="Linear is not Llama-shaped"):
        probe(torch.nn.Linear(2, 2), lambda: torch.zeros(()))


# ---- report ------------------------------------------------------------------------------------------------


def test_tables():
    planted = {name: {"a": [20.0, 40.0], "b": [10.0, 20.0]} for name in KEPT}
    assert "| gate | 30.0 (20.0) | 15.0 (10.0) |" in means_table(planted, KEPT)
    planted["q"] = {"c": [1.0, 3.0]}
    assert "| q |  |  | 2.0 (1.0) |" in means_table(planted, [*KEPT, "q"])
    assert "| 0 | 10.00 | 31.62 |" in layers_table(planted, KEPT)
    shapes = [{"tokens": 8192, "hidden": 4096, "one stage": 0.02, "two stages": 0.005}]
    assert "| two stages | 5.0 |" in maximum_text({"shapes": shapes})


@pytest.fixture
def tiny(tmp_path, corpus_files):
    """The tiny run as a config file."""
    config = tmp_path / "tiny.toml"
    values = {**TINY, "train": {**TINY["train"], "run_dir": "unused"}}
    config.write_text(dump_toml(build_config(values, [f"data.files={corpus_files}"])))
    return config


def test_from_training_to_figure(tmp_path, tiny, capsys):
    out = tmp_path / "activations.jsonl"
    common = ["--config", str(tiny), "--out", str(out), "--figures", str(tmp_path), "--data", str(tmp_path / "data")]
    main([*common, "--steps", "3", "--rows", "4"])
    (row,) = (json.loads(line) for line in out.read_text().splitlines() if '"errors"' in line)
    assert row["steps"] == 3
    assert row["num_tokens"] == 4 * 32
    assert row["loss"] == pytest.approx(row["held_out_loss"], rel=0.01)  # the same rows, in train mode
    assert all(math.isfinite(value) for codes in row["sqnr"].values() for v in codes.values() for value in v)
    text = capsys.readouterr().out
    for part in ("Relative error in %, by layer", "| post attention norm: xhat |", "| dgate_up |", "| dk |"):
        assert part in text
    assert (tmp_path / "activations.png").stat().st_size > 10_000
    main([*common, "--report"])
    assert capsys.readouterr().out == text


def test_a_checkpoint_instead(tmp_path, tiny, corpus_files, capsys):
    folder, out = tmp_path / "model", tmp_path / "rows.jsonl"
    small_model(num_key_value_heads=2).save_pretrained(folder)
    train_tokenizer(build_config(TINY, [f"data.files={corpus_files}"])).save_pretrained(folder)
    common = ["--config", str(tiny), "--out", str(out), "--figures", str(tmp_path)]
    main([*common, "--checkpoint", str(folder), "--rows", "2"])
    row = json.loads(out.read_text().splitlines()[0])
    assert row["model"] == "model"
    assert row["loss"] == pytest.approx(math.log(320), rel=0.05)
    assert "## Activations of model (a checkpoint), 64 tokens" in capsys.readouterr().out
