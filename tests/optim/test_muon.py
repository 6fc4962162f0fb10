"""Muon: its direction against an exact SVD, torch.optim.Muon's path, parameter groups, resuming, and two processes."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import overcoat
from overcoat import AdamW, Muon, muon_groups, release_gradients
from overcoat.kernels.muon import COEFFICIENTS, flops, newton_schulz, segments
from overcoat.optim.muon import is_hidden_matrix
from overcoat.optim.muon_step import deal, matrices_of
from tests.optim.harness import assert_same_bits, set_grads, snapshot
from tests.optim.test_sharding import Experts, everything, load, save
from tests.optim.test_sharding import assert_same_bits as assert_same_named
from tests.processes import on_two, two_of

LR = {"lr": 0.02, "adamw_lr": 1e-3}


def model_of(seed=0, device="cpu"):
    torch.manual_seed(seed)
    layers = nn.Embedding(32, 96), nn.Linear(96, 301), nn.LayerNorm(301), nn.GELU(), Experts(301), nn.Linear(301, 72)
    return nn.Sequential(*layers).to(device).bfloat16()


def make(sharded=False, seed=0, released=False, device="cpu", **options):
    model = model_of(seed, device)
    if sharded:
        fully_shard(model[1])
        fully_shard(model)
    optimizer = Muon(muon_groups(model), **{**LR, **options})
    if released:
        release_gradients(model, optimizer, batch_bytes=40_000)
    return model, optimizer


def train(model, optimizer, steps, first=0, **kwargs):
    """Every process sees the same batch, so the averaged gradient is that of one process."""
    for step in range(first, first + steps):
        ids = torch.randint(32, (16,), generator=torch.Generator().manual_seed(step))
        model(ids.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step(**kwargs)
        optimizer.zero_grad()


# ---- the direction -----------------------------------------------------------------------------------------------


def matrix(shape, decades, seed=0):
    """A matrix whose singular values span so many decades."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return u * torch.logspace(0, -decades, len(s), dtype=torch.float64) @ v


def as_published(update, steps=5):
    """The iteration as published, BF16 after every product."""
    a, b, c = COEFFICIENTS
    x = update.bfloat16().float() if update.shape[0] <= update.shape[1] else update.bfloat16().float().mT
    x = (x / x.norm()).bfloat16().float()
    for _ in range(steps):
        gram = (x @ x.mT).bfloat16().float()
        x = (a * x + (b * gram + c * gram @ gram).bfloat16().float() @ x).bfloat16().float()
    return x if update.shape[0] <= update.shape[1] else x.mT


@pytest.mark.parametrize("decades", [0, 2, 4])
@pytest.mark.parametrize("shape", [(96, 96), (96, 300), (300, 96)])
def test_direction_against_svd(shape, decades):
    """Singular values within what the published iteration in BF16 gives, and the same singular vectors."""
    update = matrix(shape, decades).bfloat16().double()
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    exact = s / s.norm()
    for _ in range(5):
        a, b, c = COEFFICIENTS
        exact = a * exact + b * exact**3 + c * exact**5
    found = newton_schulz(update.bfloat16().unsqueeze(0), 5)[0].double()
    plain = as_published(update).double()
    truth = u * exact @ v
    assert (found - truth).norm() < 0.3 * (plain - truth).norm()
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.21
    large = exact > 0.7  # those that have converged
    assert ((u.mT @ found @ v.mT).diagonal()[large] - exact[large]).abs().max() < 0.02


def test_segments_take_the_least_work():
    assert segments(64, 64, 5) == (1, 1, 1, 1, 1)
    assert segments(64, 172, 5) == segments(172, 64, 5) == (3, 2)
    assert [sum(segments(8, 64, steps)) for steps in (1, 2, 3, 7)] == [1, 2, 3, 7]
    n = 4096**3
    assert flops(4096, 4096, 5) == 20 * n
    assert flops(4096, 8192, 5) == (14 + 2 * 6) * n


@pytest.mark.parametrize("scale", ["spectral", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_path_of_torchs_muon(nesterov, scale):
    start = [torch.randn(s, generator=torch.Generator().manual_seed(s[0])) for s in ((96, 160), (160, 96), (64, 64))]
    ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    group = {"params": ours, "algorithm": "muon"}
    name = {"spectral": "original"}.get(scale, scale)
    optimizers = (
        Muon([group], lr=0.02, nesterov=nesterov, scale=scale, state="fp32"),
        torch.optim.Muon(theirs, lr=0.02, nesterov=nesterov, adjust_lr_fn=name),
    )
    for step in range(4):
        for params, optimizer in zip((ours, theirs), optimizers):
            set_grads(params, step)
            optimizer.step()
    for mine, other, before in zip(ours, theirs, start):
        assert (mine - other).norm() < 0.03 * (other - before).norm()


@pytest.mark.parametrize(("state", "limit"), [("8bit", 0.1), ("fp8", 0.25), ("bf16", 0.02)])
def test_codes_change_the_update_little(state, limit):
    start = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    moved = {}
    for name in (state, "fp32"):
        param = nn.Parameter(start.clone())
        optimizer = Muon([{"params": [param], "algorithm": "muon"}], lr=0.02, weight_decay=0.0, state=name)
        for step in range(20):
            set_grads([param], step)
            optimizer.step()
        moved[name] = param.detach() - start
    assert 0 < (moved[state] - moved["fp32"]).norm() < limit * moved["fp32"].norm()


# ---- groups ------------------------------------------------------------------------------------------------------


def test_groups_of_a_model():
    model = model_of()
    groups = muon_groups(model)
    of = {id(p): g["algorithm"] for g in groups for p in g["params"]}
    names = {name: of[id(p)] for name, p in model.named_parameters()}
    assert {name for name, algorithm in names.items() if algorithm == "muon"} == {"1.weight", "4.weight", "5.weight"}
    assert [group.get("weight_decay") for group in groups] == [None, 0.0, 0.0]
    optimizer = Muon(groups, **LR)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 1e-3, 1e-3]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("model.layers.0.mlp.gate_proj.weight", (8, 8), True),
        ("model.layers.0.attention.output.dense.weight", (8, 8), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 8), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 8), False),
        ("model.layers.0.mlp.gate.weight", (4, 8), False),
        ("model.layers.0.mlp.router.weight", (4, 8), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), False),
        ("model.layers.0.linear_attn.conv1d.weight", (8, 1, 4), False),
        ("model.embed_tokens.weight", (8, 8), False),
        ("tok_embeddings.weight", (8, 8), False),
        ("transformer.wte.weight", (8, 8), False),
        ("lm_head.weight", (8, 8), False),
        ("output.weight", (8, 8), False),
        ("vision.pos_embed", (8, 8), False),
        ("model.norm.weight", (8,), False),
    ],
)
def test_hidden_matrices_by_name(name, shape, expected):
    assert is_hidden_matrix(name, torch.empty(shape)) == expected


def test_heads_routers_and_fused_weights_of_transformers_models():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}
    config = transformers.MixtralConfig(**size, intermediate_size=48, num_local_experts=6, num_key_value_heads=2)
    model = transformers.MixtralForCausalLM(config)
    hidden = {id(p) for g in muon_groups(model) if g["algorithm"] == "muon" for p in g["params"]}
    others = [name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in hidden]
    assert sorted(name.split(".")[-2] for name in others) == ["embed_tokens", "gate", "lm_head"]
    few = transformers.MixtralConfig(**size, intermediate_size=48, num_local_experts=8, num_key_value_heads=1)
    model = transformers.MixtralForCausalLM(few)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = [names[id(p)] for g in muon_groups(model) if g["algorithm"] == "muon" for p in g["params"]]
    assert any("k_proj" in name for name in hidden)  # with as many rows as there are experts
    config = transformers.Phi3Config(**size, intermediate_size=48, num_key_value_heads=2, pad_token_id=0)
    model = transformers.Phi3ForCausalLM(config)
    splits = {group["splits"] for group in muon_groups(model) if group["algorithm"] == "muon"}
    assert splits == {None, (32, 16, 16)}
    assert {group.get("splits") for group in muon_groups(model, qkv="whole")} == {None}
    config = transformers.GptOssConfig(**size, intermediate_size=48, num_local_experts=4, head_dim=8)
    model = transformers.GptOssForCausalLM(config)
    (transposed,) = (group["params"] for group in muon_groups(model) if group.get("transposed"))
    assert {param.dim() for param in transposed} == {3}
    kinds = {"layer_types": ["linear_attention"], "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads = {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = transformers.Qwen3_5TextConfig(**size, **kinds, **heads, intermediate_size=48)
    groups = muon_groups(transformers.Qwen3_5ForCausalLM(config))
    assert {group["splits"] for group in groups if group["algorithm"] == "muon"} == {None, (16, 16, 32)}
    config = transformers.GPTNeoXConfig(**size, intermediate_size=48)
    with pytest.raises(ValueError, match="qkv='whole'"):
        muon_groups(transformers.GPTNeoXForCausalLM(config))


@pytest.mark.parametrize(
    ("shape", "transposed", "ratio"), [((64, 16), False, 2), ((64, 16), True, 1), ((16, 64), True, 2)]
)
def test_spectral_scale_is_by_outputs_over_inputs(shape, transposed, ratio):
    moved = []
    for options in ({"transposed": transposed}, {"scale": "match_rms_adamw"}):
        param = nn.Parameter(torch.zeros(shape))
        param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        Muon([{"params": [param], "algorithm": "muon", **options}], **LR).step()
        moved.append(param.detach())
    torch.testing.assert_close(moved[0], moved[1] * ratio / (0.2 * 8))


def test_parameters_without_elements_take_no_step():
    params = [nn.Parameter(torch.ones(shape)) for shape in ((0, 4), (4, 0), (2, 0, 3), (0, 3, 3), (4, 4))]
    for param in params:
        param.grad = torch.ones_like(param)
    Muon([{"params": params, "algorithm": "muon"}], **LR).step()
    assert (params[-1] != 1).all()


def test_splits_are_matrices_of_their_own():
    start = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in start.split([32, 16])]
    fused = Muon([{"params": [whole], "algorithm": "muon", "splits": (32, 16)}], master="bf16+16", **LR)
    apart = Muon([{"params": parts, "algorithm": "muon"}], master="bf16+16", **LR)
    for step in range(3):
        set_grads([whole], step)
        for part, grad in zip(parts, whole.grad.split([32, 16])):
            part.grad = grad.clone()
        fused.step()
        apart.step()
    assert (torch.cat([part.detach() for part in parts]) - whole.detach()).abs().max() < 0.02


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"params": [torch.ones(2, 2)]}, "muon_groups"),
        ({"params": [("a", torch.ones(2, 2)), ("b", torch.ones(2))]}, "adamw_lr"),
        ({"params": [{"params": [torch.ones(2)], "algorithm": "muon"}]}, "adamw"),
        ({"params": [{"params": [torch.ones(2, 2)], "algorithm": "lion"}]}, "algorithm"),
        ({"params": [{"params": [torch.ones(2, 2)], "algorithm": "muon", "splits": (1, 2)}]}, "splits"),
        ({"params": [("a", torch.ones(2, 2))], "momentum": 1.0}, "momentum"),
        ({"params": [("a", torch.ones(2, 2))], "steps": 0}, "steps"),
        ({"params": [("a", torch.ones(2, 2))], "scale": "none"}, "scale"),
        ({"params": [("a", torch.ones(2, 2))], "state": "int4"}, "state"),
    ],
)
def test_refusals_name_the_value(options, word):
    params = options["params"]
    for entry in params if not isinstance(params[0], dict) else params[0]["params"]:
        (entry[1] if isinstance(entry, tuple) else entry).requires_grad_()
    with pytest.raises(ValueError, match=word):
        Muon(**options)


def test_adamw_refuses_groups_of_matrices():
    with pytest.raises(ValueError, match=r"overcoat\.Muon"):
        AdamW([{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": "muon"}])


@pytest.mark.parametrize("other", ["adamw", "lion"])
def test_an_algorithm_changed_after_a_step_is_refused(other):
    model, optimizer = make()
    train(model, optimizer, 1)
    number = [group["algorithm"] for group in optimizer.param_groups].index("muon")
    optimizer.param_groups[number]["algorithm"] = other
    with pytest.raises(ValueError, match=rf"\[{number}\]\['algorithm'\] is '{other}'.*'muon'"):
        train(model, optimizer, 1)


# ---- one optimizer -----------------------------------------------------------------------------------------------


def test_bytes_of_state():
    model, optimizer = make()
    train(model, optimizer, 1)
    weight = model[1].weight
    state = {name: value for name, value in optimizer.state[weight].items() if name != "step"}
    assert set(state) == {"exp_avg", "exp_avg_amax", "remainder"}
    assert optimizer.state[model[0].weight].keys() == fields_of_adamw(model[0].weight)


def fields_of_adamw(param):
    twin = nn.Parameter(param.detach().clone())
    twin.grad = torch.ones_like(twin)
    optimizer = AdamW([twin])
    optimizer.step()
    return optimizer.state[twin].keys()


def test_clips_and_skips_over_all_parameters():
    model, optimizer = make()
    train(model, optimizer, 1, clip_grad_norm=1e-3)
    before = snapshot(model.parameters(), optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model[2].bias.grad[3] = torch.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same_bits(before, snapshot(model.parameters(), optimizer))


@pytest.mark.parametrize("state", ["8bit", "fp8", "bf16"])
def test_resumes_bit_for_bit(state):
    model, optimizer = make(state=state)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again, other = make(seed=5, state=state)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    twin, copied = copy.deepcopy((model, optimizer))
    for run in ((model, optimizer), (again, other), (twin, copied)):
        train(*run, 2, first=2)
    for run in ((again, other), (twin, copied)):
        assert_same_bits(snapshot(model.parameters(), optimizer), snapshot(run[0].parameters(), run[1]))


@pytest.mark.parametrize("saves_muon", [True, False])
def test_a_state_of_the_other_algorithm_is_refused(saves_muon):
    muon = make()[1]
    adamw = overcoat.AdamW([{"params": group["params"]} for group in muon.param_groups])
    saving, loading = (muon, adamw) if saves_muon else (adamw, muon)
    with pytest.raises(ValueError, match=r"saved by .* steps the group by"):
        loading.load_state_dict(saving.state_dict())


def test_a_state_of_other_codes_is_refused():
    model, optimizer = make()
    train(model, optimizer, 1)
    with pytest.raises(ValueError, match="moments"):
        make(state="fp8")[1].load_state_dict(optimizer.state_dict())


def test_released_gradients_take_the_same_steps():
    plain, released = make(), make(released=True)
    for run in (plain, released):
        train(*run, 3)
    assert_same_bits(snapshot(plain[0].parameters(), plain[1]), snapshot(released[0].parameters(), released[1]))


def test_batches_of_small_matrices_give_the_bits_of_each_alone():
    start = [torch.randn(24, 40, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(5)]
    together = [nn.Parameter(x.clone()) for x in start]
    optimizer = Muon([{"params": together, "algorithm": "muon"}], **LR, master="bf16+16")
    set_grads(together, 0)
    optimizer.step()
    for number, (x, param) in enumerate(zip(start, together)):
        alone = nn.Parameter(x.clone())
        alone.grad = param.grad.clone()
        Muon([{"params": [alone], "algorithm": "muon"}], **LR, master="bf16+16").step()
        assert torch.equal(alone, param), number


# ---- shards ------------------------------------------------------------------------------------------------------


def test_matrices_are_dealt_evenly():
    params = [torch.empty(shape, device="meta") for shape in [(64, 64)] * 8 + [(64, 172)] * 6]
    matrices = [matrix for i, p in enumerate(params) for matrix in matrices_of(i, p, None, 4)]
    hands = deal(matrices, 4, 5)
    work = [sum(flops(matrix.rows, matrix.columns, 5) for matrix in hand) for hand in hands]
    assert sorted(matrix for hand in hands for matrix in hand) == sorted(matrices)
    assert max(work) < 1.3 * min(work)


def test_rows_of_a_split_matrix_on_three_processes():
    found = matrices_of(0, torch.empty(7, 5, device="meta"), (4, 3), 3)  # rows 0-2, 3-5, 6
    assert [matrix.bounds for matrix in found] == [((0, 3), (3, 4), (4, 4)), ((0, 0), (0, 2), (2, 3))]


def _steps_alike(rank, device):
    for options in ({}, {"state": "fp8", "master": "bf16+16"}):
        plain = make(device=device, **options)
        train(*plain, 3)
        for released, offloaded in itertools.product((False, True), (False, True)):
            others = {"offload": True, "offload_buffer": 3 * 4096} if offloaded else {}
            sharded = make(True, released=released, device=device, **options, **others)
            train(*sharded, 3)
            sharded[1].wait_for_offload()
            assert_same_named(everything(*plain), everything(*sharded))


@two_of
def test_two_processes_step_as_one(device):
    on_two(_steps_alike, device, device)


def _save_on_two(rank, folder):
    sharded = make(True)
    train(*sharded, 2)
    save(*sharded, folder)


def _load_on_two(rank, folder):
    sharded = make(True, seed=9)
    load(*sharded, f"{folder}/one")
    train(*sharded, 1, first=3)
    assert_same_named(torch.load(f"{folder}/end.pt"), everything(*sharded))


def test_checkpoints_of_two_load_on_one_and_back(tmp_path):
    on_two(_save_on_two, "cpu", str(tmp_path / "two"))
    plain, loaded = make(), make(seed=5)
    train(*plain, 2)
    load(*loaded, str(tmp_path / "two"))
    assert_same_named(everything(*plain), everything(*loaded))
    for run in (plain, loaded):
        train(*run, 1, first=2)
    save(*loaded, str(tmp_path / "one"))
    train(*plain, 1, first=3)
    torch.save(everything(*plain), tmp_path / "end.pt")
    on_two(_load_on_two, "cpu", str(tmp_path))


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_no_sync_and_a_cuda_graph():
    model, optimizer = make(device="cuda")
    train(model, optimizer, 2)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(clip_grad_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    twin, other = copy.deepcopy((model, optimizer))
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        theirs.grad = mine.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
        other.step()
    assert_same_bits(snapshot(model.parameters(), optimizer), snapshot(twin.parameters(), other))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 2048), (2048, 5632), (5632, 2048), (1024, 2752)])
def test_large_matrices_on_a_gpu(shape):
    """By kernels and cuBLAS, beside the reference."""
    update = torch.randn(2, *shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    expected = newton_schulz(update, 5)
    found = overcoat.kernels.muon.orthogonalize(update.clone(), 5)
    assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.gpu
def test_temporary_memory_is_bounded():
    params = [nn.Parameter(torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)) for _ in range(12)]
    optimizer = Muon([{"params": params, "algorithm": "muon"}], lr=0.02)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    rounds = 2**24 * 2  # bytes of u in one round
    assert torch.cuda.max_memory_allocated() - held < 5.01 * rounds  # and the norms
