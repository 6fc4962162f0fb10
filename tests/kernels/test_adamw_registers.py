"""What ptxas makes of AdamW's kernel for Hopper, without a GPU: the registers its speed rests on, and no spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.compare import INTERPRETED

if INTERPRETED:
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overcoat.kernels import adamw_step
from overcoat.kernels.adamw import Hyper
from overcoat.kernels.adamw_step import adamw_kernel

CUOBJDUMP = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
POINTERS = {
    "tiles": "*i64", "table": "*i64", "grads": "*i64", "coefficients": "*fp32", "steps": "*fp32",
    "grad_factor": "*fp32", "skip": "*i1", "de8_first": "*fp32", "de8_second": "*fp32",
}  # fmt: skip
LAUNCH = ("num_warps", "maxnreg", "enable_fp_fusion")
DEFAULT, FP8 = ("sqrt8", "log8"), ("e4m3x", "e4m3x")


def resources(codes: tuple[str, str], master: str, grad: torch.dtype, align: int, skips: bool) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack) as compiled for sm_90."""
    hyper = Hyper(0.9, 0.95, 1e-8, 0.1, *codes, master, 128)
    constants = adamw_step._constants(torch.bfloat16, grad, hyper, skips, align == 16, align)
    launch = {name: constants[name] for name in LAUNCH if constants[name] is not None}
    values = {name: value for name, value in constants.items() if name not in LAUNCH}
    names = adamw_kernel.arg_names
    source = ASTSource(
        fn=adamw_kernel,
        signature={name: "constexpr" if name in values else POINTERS.get(name, "fp32") for name in names},
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in POINTERS if name not in ("grad_factor", "skip")
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton brings no cuobjdump")
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    ("codes", "master", "grad", "align", "registers"),
    [
        (DEFAULT, "bf16+8", torch.bfloat16, 16, 72),
        (DEFAULT, "bf16+8", torch.float32, 16, 72),
        (DEFAULT, "bf16+8", torch.bfloat16, 1, 255),
        (DEFAULT, "bf16", torch.bfloat16, 16, 72),
        (FP8, "bf16+8", torch.bfloat16, 16, 72),
        (FP8, "bf16", torch.bfloat16, 16, 80),
        (FP8, "bf16+8", torch.float32, 1, 255),
    ],
)
def test_registers(codes, master, grad, align, registers, skips):
    """Seven programs of 128 threads on a multiprocessor need at most 72; loads of single elements take all."""
    used, stack = resources(codes, master, grad, align, skips)
    assert stack <= (0 if align == 16 else 16)
    assert used <= registers
