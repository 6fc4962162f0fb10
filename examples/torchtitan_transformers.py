"""torchtitan's transformers backend, from a folder or a name of the hub: python examples/torchtitan_transformers.py"""

import torch
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.experiments.transformers_modeling_backend import model_registry
from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig
from transformers import LlamaConfig

import overcoat


class Optimizers(OptimizersContainer):
    _resolve_optimizer_factory = staticmethod(lambda name: overcoat.AdamW)  # <- Overcoat
    _build_impl_kwargs = staticmethod(lambda config: {})  # neither `fused` nor `foreach`


tiny = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
LlamaConfig(**tiny, num_attention_heads=2, architectures=["LlamaForCausalLM"]).save_pretrained("runs/tiny")
spec = model_registry("sft_full")
training = TrainingConfig(seq_len=64)
loss = CrossEntropyLoss.Config()
job = TransformersBackendConfig(hf_model="runs/tiny", model_spec=spec, loss=loss, training=training)
model = spec.model.update_from_config(config=job).build()
torch.manual_seed(0)
model.init_states()
model.bfloat16().train()
overcoat.convert(model)  # <- Overcoat
optimizers = Optimizers(default_adamw(lr=2e-5), model_parts=[model])
losses, positions = [], torch.arange(32).repeat(2, 2)  # two documents in a row
for ids in torch.randint(256, (5, 2, 64)):
    logits = model(ids, positions=positions)
    losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))
    losses[-1].backward()
    optimizers.step()
    optimizers.zero_grad()
print([loss.item() for loss in losses])
