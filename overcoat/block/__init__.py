"""A decoder block in FP8 as one autograd node: its description (spec), its parts, and the loops that run them."""
