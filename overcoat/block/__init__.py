"""A decoder block in FP8 as one autograd node: the description (spec.py), the parts, and the loops (run.py)."""
