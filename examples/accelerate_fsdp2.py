"""Accelerate with FSDP2, on GPUs: accelerate launch --num_processes 2 examples/accelerate_fsdp2.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(fsdp_plugin=plugin)
torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16()
overcoat.convert(model)  # <- Overcoat
optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)  # <- Overcoat

loader = DataLoader(torch.randint(256, (20, 64)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
losses = []
for batch in loader:
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print(losses)
accelerator.end_training()
