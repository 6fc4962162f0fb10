"""The Triton kernels of AdamW's step (kernels/adamw.py)."""
