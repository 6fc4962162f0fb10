"""torchtitan's own Llama 3, by its converters and its container of optimizers: python examples/torchtitan_llama3.py"""

import torch
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.models.llama3 import model_registry

import overcoat


class Fp8:
    def build(self):  # as a converter's configuration, which is the converter
        return self

    def convert(self, config):
        def build(self):
            model = super(type(self), self).build()
            overcoat.convert(model)  # <- Overcoat
            return model

        config.__class__ = type("Config", (type(config),), {"__slots__": (), "build": build})
        return config


class Optimizers(OptimizersContainer):
    _resolve_optimizer_factory = staticmethod(lambda name: overcoat.AdamW)  # <- Overcoat
    _build_impl_kwargs = staticmethod(lambda config: {})  # neither `fused` nor `foreach`


model = model_registry("debugmodel", attn_backend="varlen", converters=[Fp8()]).model.build()
torch.manual_seed(0)
model.init_states()
model.bfloat16().train()
optimizers = Optimizers(default_adamw(lr=2e-5), model_parts=[model])
losses, positions = [], torch.arange(64).expand(2, -1)
for ids in torch.randint(2048, (5, 2, 64)):
    logits = model(ids, positions, model.get_attention_masks(positions))
    losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))
    losses[-1].backward()
    optimizers.step()
    optimizers.zero_grad()
