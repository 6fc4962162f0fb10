"""The numerical ops, a family a file: each op's reference, its launcher and its Triton kernel together.

    op             how an op is registered: schema, reference, kernel, shapes for torch.compile
    language       Triton, or what stands in where it is not installed
    launch         how a kernel is launched again for less host time
    instructions   the GPU's instructions as device functions; hardware: the same as ops, for references
    device         what device functions share: scales, casts to FP8, maxima
    codes          kept tensors' codes as device functions
    tiles          where the elements of a tile lie; block_tiles: with a scale for each block of 128
    partials       sums of programs' sums, always in the same order
    multi_tensor   many tensors in one launch: addresses, tiles, the sum of their squares

The first five import nothing of the package but each other, and `overcoat.formats` is written with `hardware`; all
others are written with `overcoat.formats`.
"""
