"""Streaming: weights and optimizer states of layers in host memory, on the GPU only while they are used."""
