"""The tables and figures of COAT (arXiv 2410.19313), repeated."""
