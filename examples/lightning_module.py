"""Lightning: python examples/lightning_module.py"""

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import overcoat


class LanguageModel(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.losses = []

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return overcoat.AdamW(self.model.parameters(), lr=2e-5, clip_grad_norm=1.0)  # <- Overcoat


torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16().train()
overcoat.convert(model)  # <- Overcoat

module = LanguageModel(model)
loader = DataLoader(torch.randint(256, (10, 64)), batch_size=2)
trainer = lightning.Trainer(max_epochs=1, precision="bf16-true", logger=False, enable_checkpointing=False)
trainer.fit(module, loader)
losses = module.losses
print(losses)
