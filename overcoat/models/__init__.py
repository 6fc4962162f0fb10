"""Conversion of Hugging Face models: which layers run in FP8, and how they are swapped in."""
