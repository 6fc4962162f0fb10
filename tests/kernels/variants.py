"""The ways in which kernels are launched, each compiled to PTX for sm_90 on a machine without a GPU.

The launchers run on CPU tensors; what they would launch is written down instead. Compilation ends before ptxas and
leaves nothing in Triton's cache.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any, Iterator, NamedTuple

import pytest
import torch
from triton._C.libtriton import ir
from triton._utils import canonicalize_ptr_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

import overcoat.kernels
from overcoat.kernels.launch import Blocks, Kernel
from overcoat.kernels.multi_tensor import Gradients
from overcoat.kernels.op import CATALOGUE
from tests.kernels.adamw_cases import arguments, step_one_by_one
from tests.kernels.muon_cases import muon_step
from tests.kernels.samples import SAMPLES, is_ours

TARGET = GPUTarget("cuda", 90, 32)
# TTIR that makes FP8 of something: Triton's cast, and inline assembly.
TO_FLOAT8 = re.compile(r"tt\.fp_to_fp .*-> \S*f8E|cvt\.rn\.satfinite\.e\dm\dx2")


class Variant(NamedTuple):
    """One launch as the compiler sees it; tensors are aligned to 16 bytes."""

    kernel: Kernel
    types: dict[str, str]  # of each argument, in Triton's words; "constexpr" where the value is compiled in
    constants: dict[str, Any]
    options: dict[str, Any]
    aligned: bool  # whether sizes are divisible by 16: rows are then read and written in vectors, else byte by byte

    @classmethod
    def of(cls, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any], aligned: bool) -> Variant:
        values = {**dict(zip(kernel.arg_names, args)), **options}
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        if "ALIGN" in constants:  # where widths lie in a table, launchers promise with it what Triton cannot see
            constants["ALIGN"] = 16 if aligned else 1
        types = {p.name: "constexpr" if p.is_constexpr else _type_of(values[p.name]) for p in kernel.params}
        return cls(kernel, types, constants, {k: v for k, v in options.items() if k not in types}, aligned)

    def kind(self) -> tuple[Any, ...]:
        """Equal where launches differ in numbers alone; to save time, aligned ones also where they differ in flags.

        What has been lost so far was lost where rows are stored byte by byte. Not made: some sizes divisible by 16 and
        others not, as real launches have them, whose rows are stored as in one of the two that are.
        """
        flags = [(name, str(value)) for name, value in self.constants.items() if type(value) is not int]
        told = [flag for flag in flags if flag[0] == "PADDED"] if self.aligned else flags
        return self.kernel, self.aligned, *self.types.values(), *told

    def ptx(self, *, ttir_alone: bool = False) -> str:
        """PTX for sm_90; "" if the kernel makes no FP8. ttir_alone: what Triton's own language refuses is found so far,
        in a tenth of the time."""
        names, backend = self.kernel.arg_names, make_backend(TARGET)
        divisible = ("*", "i32") if self.aligned else "*"
        source = ASTSource(
            self.kernel,
            self.types,
            {(names.index(name),): value for name, value in self.constants.items()},
            {
                (p.num,): [["tt.divisibility", 16]]
                for p in self.kernel.params
                if self.types[p.name].startswith(divisible) and not p.do_not_specialize
            },
        )
        options, context = backend.parse_options(dict(self.options)), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        generate, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        code = source.make_ir(TARGET, options, generate, modules, context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        for stage in ("ttir", "ttgir", "llir", "ptx")[: 1 if ttir_alone else 4]:
            code = stages[stage](code, {})
            if stage == "ttir" and not TO_FLOAT8.search(str(code)):
                return ""
        return str(code)


def _type_of(value: Any) -> str:
    if isinstance(value, Blocks):
        dtype, *block = value.dtype
        return f"tensordesc<{canonicalize_ptr_dtype(dtype, False).lstrip('*')}{block}>"
    if isinstance(value, torch.Tensor):
        return canonicalize_ptr_dtype(value.dtype, False)
    assert type(value) in (int, float), value
    return "i32" if isinstance(value, int) else "fp32"


def name_of(kernel: Kernel) -> str:
    """Module and function: several modules have a `_norm_kernel`."""
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__.lstrip('_')}"


def entry_kernels() -> dict[str, Kernel]:
    """Every entry kernel of overcoat.kernels by its name."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(overcoat.kernels.__path__, "overcoat.kernels.")
    ]
    found = {x for module in modules for x in vars(module).values() if isinstance(x, Kernel)}
    return {name_of(kernel): kernel for kernel in sorted(found, key=name_of)}


def launched() -> dict[str, list[Variant]]:
    """What the ops' samples and the optimizer launch, one variant of each kind, by the kernel's name."""
    seen: dict[tuple[Any, ...], Variant] = {}

    def record(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        for aligned in (False, True):
            variant = Variant.of(kernel, args, options, aligned)
            seen[variant.kind()] = variant  # of several sizes the last, the largest
            if aligned and "PADDED" in variant.constants:  # samples have tokens to pad, real batches seldom
                whole = variant._replace(constants={**variant.constants, "PADDED": False})
                seen[whole.kind()] = whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", record)
        for launch, args in _calls():
            launch(*args)
    result: dict[str, list[Variant]] = {}
    for variant in seen.values():
        result.setdefault(name_of(variant.kernel), []).append(variant)
    return result


def _calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Launchers and their arguments."""
    for name, samples in SAMPLES.items():
        op = CATALOGUE[name]
        if is_ours(op):
            yield from ((op.kernel, args) for args in samples)
    for moments in (("e4m3", "e5m2"), ("e5m2x", "e4m3x")):
        step = arguments(moments, "bf16+8", shapes=((4, 256), (5, 130)))
        yield step_one_by_one, (step, step[5])
    yield muon_step, ()
    yield Gradients([3, 5], torch.device("cpu")).sums_of_squares, ()
