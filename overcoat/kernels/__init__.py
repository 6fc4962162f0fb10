"""The numerical ops, one family per file: each op's reference, its launcher and its Triton kernel together.

    op             how an op is registered: schema, reference, kernel, shapes for torch.compile
    language       Triton, or stand-ins if it is not installed
    launch         a cache of compiled kernels that shortens repeated launches
    instructions   GPU instructions as device functions; hardware: the same as ops, for references
    device         helpers of all device functions: scales, casts to FP8, maxima
    codes          8-bit codes of saved tensors as device functions
    tiles          addresses of a tile's elements, and how they are loaded and stored
    partials       sums of programs' partial sums, in a fixed order
    multi_tensor   many tensors in one launch: addresses, tiles, the sum of their squares

op, language, launch, instructions and hardware import nothing else of the package, and `overcoat.formats` imports
`hardware`; all other files import `overcoat.formats`.
"""
