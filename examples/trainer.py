"""Hugging Face Trainer: python examples/trainer.py"""

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import overcoat

torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16()
overcoat.convert(model)  # <- Overcoat
optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)  # <- Overcoat

tokens = torch.randint(256, (16, 64)).tolist()
data = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
arguments = TrainingArguments(
    output_dir="runs/trainer",
    per_device_train_batch_size=2,
    max_steps=5,
    logging_steps=1,
    report_to="none",
)
trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
