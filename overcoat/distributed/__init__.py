"""Several GPUs: FP8 all-gather of FSDP2's weights, context parallelism."""
