"""torchtitan's own Llama 3, whose layers compute what transformers' do from the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor

import overcoat
from overcoat import Recipe

if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    pytest.skip("torchtitan 0.3 needs a PyTorch after 2.11", allow_module_level=True)
llama3: Any = pytest.importorskip("torchtitan.models.llama3", reason="torchtitan needs Python 3.11")
WIDTH, LENGTH = 64, 64


def make_titan(backend: str = "varlen", fused: bool = True, num_kv: int = 2) -> Any:
    spec = llama3.model_registry("debugmodel", attn_backend=backend)
    rope = dataclasses.replace(spec.model.layers[0].attention.rope, dim=WIDTH, max_seq_len=LENGTH, scaling="none")
    shape = {"dim": 256, "n_heads": 4, "n_kv_heads": num_kv, "hidden_dim": 688}
    spec.model.layers = llama3._build_llama3_layers(
        n_layers=2, rope=rope, attn_backend=backend, fuse_qkv=fused, **shape
    )
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
    return model.bfloat16().train()


def make_twin(model: Any, num_kv: int) -> Any:
    """transformers' model with the same weights, and the same angles: these it rounds to BF16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=num_kv, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    twin = LlamaForCausalLM(config).bfloat16().train()
    twin.load_state_dict(as_transformers(model))
    cos, sin = twin.model.rotary_emb(torch.empty(0, dtype=torch.bfloat16), torch.arange(LENGTH)[None])
    for layer in model.layers.values():
        layer.attention.rope.cache = torch.complex(cos[0, :, : WIDTH // 2].float(), sin[0, :, : WIDTH // 2].float())
    return twin


def as_transformers(model: Any) -> dict[str, Tensor]:
    return llama3.Llama3StateDictAdapter(model.config, None).to_hf(model.state_dict())


@pytest.mark.parametrize(("backend", "fused", "num_kv"), [("varlen", True, 2), ("varlen", False, 2), ("flex", True, 4)])
def test_layers_are_transformers_bit_for_bit(backend: str, fused: bool, num_kv: int) -> None:
    """Two documents a row; q, k and v in one layer by group of heads, or in three."""
    model = make_titan(backend, fused, num_kv)
    twin = make_twin(model, num_kv)
    report = overcoat.convert(model)
    overcoat.convert(twin, Recipe(head=None))
    assert report.head is None
    ids = torch.randint(2048, (2, LENGTH))
    positions = torch.cat([torch.arange(40), torch.arange(24)]).expand(2, -1).contiguous()
    results: dict[str, Tensor] = {}
    model.layers["1"].register_forward_hook(lambda *given: results.update(titan=given[2]))
    twin.model.layers[1].register_forward_hook(lambda *given: results.update(twin=given[2]))
    model(ids, positions, model.get_attention_masks(positions))
    twin(input_ids=ids, position_ids=positions)
    assert set(report.running().values()) == {"FP8"}
    assert torch.equal(results["titan"], results["twin"])
    gradient = torch.randn_like(results["twin"])
    for result in results.values():
        result.backward(gradient)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    gradients = as_transformers(model)
    compared = [name for name, parameter in twin.named_parameters() if parameter.grad is not None]
    assert len(compared) == 19  # all but the final norm and lm_head
    assert all(torch.equal(gradients[name], twin.get_parameter(name).grad) for name in compared)


def test_what_was_not_read_is_left_alone() -> None:
    def reason(change: Any) -> str:
        model = make_titan()
        change(model.layers["0"])
        report = overcoat.convert(model)
        assert report.converted == ["layers.1"]
        return report.layers[0].detail

    class Other(torch.nn.Linear):
        pass

    def hooked(layer: Any) -> None:
        layer.attention.inner_attention.register_forward_hook(lambda *given: None)  # context parallelism does

    def renamed(layer: Any) -> None:
        layer.feed_forward.w1.__class__ = Other

    def windowed(layer: Any) -> None:
        layer.attention.inner_attention.window_size = (128, 0)

    assert "attention.inner_attention has hooks" in reason(hooked)
    assert "Other, not torchtitan" in reason(renamed)
    assert "window_size is (128, 0)" in reason(windowed)


def test_divided_weights_are_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = make_titan()
    overcoat.convert(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        wo = model.layers["0"].attention.wo
        wo.weight = torch.nn.Parameter(distribute_tensor(wo.weight.detach(), mesh, [Shard(1)]))
        positions = torch.arange(LENGTH)[None]
        with pytest.raises(ValueError, match="tensor_parallel_degree=1"):
            model(positions, positions, model.get_attention_masks(positions))
    finally:
        dist.destroy_process_group()
