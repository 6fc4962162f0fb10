"""Families of models: how the modules of a layer become the branches of a block."""
