"""Imported once, by the process that all those on the CPU are forked from: it takes longer than what most of them do.
Garbage collections, which each training asks for, do not look at it again."""

# ruff: noqa: F401
from overcoat.extras import importing

with importing():
    import peft
    import pytest
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.optim
    import transformers.generation.utils
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama

    import overcoat.train.run
    import tests.models.zoo
