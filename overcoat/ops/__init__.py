"""The ops of a decoder block, as `torch.autograd.Function`s over the op catalogue."""
