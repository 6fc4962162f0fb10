"""TRL, supervised fine-tuning: python examples/trl_sft.py"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import overcoat

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(254))]
word_level = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
# A real model: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16()
overcoat.convert(model)  # <- Overcoat
optimizer = overcoat.AdamW(model.parameters(), lr=2e-5)  # <- Overcoat

data = Dataset.from_list([{"prompt": f"w{i} w7", "completion": f" w{i + 9} w5 w{i}"} for i in range(16)])
arguments = SFTConfig(
    output_dir="runs/sft",
    per_device_train_batch_size=2,
    max_steps=5,
    logging_steps=1,
    report_to="none",
    bf16=False,  # the model is BF16 itself
)
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, optimizers=(optimizer, None))
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
