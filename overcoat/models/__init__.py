"""Which layers of which models run in FP8, and how they are swapped in."""
