"""PEFT's LoRA: python examples/peft_lora.py"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16().to(device)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
overcoat.convert(model)  # <- Overcoat
optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)  # <- Overcoat

model.train()
losses = []
for batch in torch.randint(256, (5, 2, 64)).to(device):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step(clip_grad_norm=1.0)
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
model.save_pretrained("runs/adapter")
