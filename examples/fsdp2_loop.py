"""PyTorch's FSDP2 in a loop of one's own: torchrun --nproc-per-node 2 examples/fsdp2_loop.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, count = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16().to(device).train()
overcoat.convert(model)  # <- Overcoat
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)  # <- Overcoat

losses = []
for batch in torch.randint(256, (5, count, 2, 64)).to(device):
    loss = model(input_ids=batch[rank], labels=batch[rank]).loss
    loss.backward()
    optimizer.step(clip_grad_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.item())
print(rank, losses)
dist.destroy_process_group()
