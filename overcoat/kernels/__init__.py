"""The op catalogue: one family per file, each op with its reference, its fake and (on CUDA) its kernel."""
