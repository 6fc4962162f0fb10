"""What kernels/launch.py remembers of launches, and when it asks Triton: on a CPU, with nothing compiled."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks.kernels import SUBJECTS, recorded
from benchmarks.shapes import BlockShape
from overcoat.kernels import launch
from overcoat.kernels.op import CATALOGUE
from overcoat.models.shapes import Model, sizes
from tests.kernels.samples import SAMPLES, column_by_column, is_ours


def declared(x_ptr, y_ptr, n, eps, FLAG, BLOCK):
    """The arguments of a kernel: two pointers, two numbers, two flags that are passed by name."""


class Recorder(launch.Kernel):
    """A kernel that writes down by whom it is launched: by Triton, or at once."""

    def __init__(self):
        super().__init__(declared)
        self.by_triton, self.at_once = [], []

    def run(self, *args, grid, warmup, **options):
        assert not warmup
        self.by_triton.append((grid, args, options))
        number = len(self.by_triton)
        record = lambda *args: self.at_once.append((number, args))  # noqa: E731
        return SimpleNamespace(number=number, run=record, function=f"f{number}", packed_metadata=f"m{number}")

    def counts(self):
        return len(self.by_triton), len(self.at_once)


@pytest.fixture
def device(monkeypatch):
    """The current GPU's index, as Kernel reads it, and its stream."""
    current = SimpleNamespace(index=0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current.index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    return current


def aligned(dtype=torch.float32, offset=0):
    """8 elements whose address is a multiple of 16, plus `offset` elements."""
    buffer = torch.zeros(64, dtype=dtype)
    start = -buffer.data_ptr() % 16 // buffer.element_size()
    x = buffer[start + offset :][:8]
    assert (x.data_ptr() % 16 == 0) == (offset * x.element_size() % 16 == 0)
    return x


def ask(kernel, x=None, y=None, n=7, eps=0.5, grid=(3,), **options):
    x, y = aligned() if x is None else x, aligned() if y is None else y
    return kernel[grid](x, y, n, eps, **{"FLAG": True, "BLOCK": 64, "num_warps": 4, **options})


def test_a_launch_is_remembered(device):
    """The second goes to the compiled kernel, with its own tensors, grid and stream; launch options are not passed."""
    kernel = Recorder()
    first = ask(kernel)
    x, y = aligned(), aligned()
    assert ask(kernel, x, y, grid=(5, 2)) is first
    assert kernel.counts() == (1, 1)
    number, (*head, a, b, n, eps, flag, block) = kernel.at_once[0]
    assert number == first.number
    assert head == [5, 2, 1, 1000, first.function, first.packed_metadata, None, None, None]
    assert a is x
    assert b is y
    assert (n, eps, flag, block) == (7, 0.5, True, 64)


OTHERS = {
    "first dtype": {"x": torch.bfloat16},
    "second dtype": {"y": torch.float16},
    "a number": {"n": 8},
    "a fraction": {"eps": 0.25},
    "a flag": {"FLAG": False},
    "a size": {"BLOCK": 128},
    "warps": {"num_warps": 8},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_launch_is_not_mistaken_for_one_that_is_remembered(device, other):
    other = {name: aligned(value) if name in "xy" else value for name, value in other.items()}
    kernel = Recorder()
    first, second = ask(kernel), ask(kernel, **other)
    assert kernel.counts() == (2, 0)
    # Each is found again, neither has taken the other's place.
    assert ask(kernel, **other) is second
    assert ask(kernel) is first
    assert [number for number, _ in kernel.at_once] == [2, 1]


def test_a_tensor_in_blocks_is_known_by_its_dtype_and_blocks(device):
    """And what is remembered does not keep its memory."""
    kernel, seen = Recorder(), []

    def ask_for(block, dtype=torch.float32):
        x = aligned(dtype)
        seen.append(weakref.ref(x))
        return ask(kernel, y=launch.Blocks(x, x.shape, x.stride(), block))

    first = ask_for([4])
    others = [ask_for([8]), ask_for([4], torch.float16)]
    assert kernel.counts() == (3, 0)
    assert [ask_for([8]), ask_for([4], torch.float16), ask_for([4])] == [*others, first]
    assert kernel.counts() == (3, 3)
    kernel.by_triton, kernel.at_once = [], []
    assert not any(x() is not None for x in seen)


def test_every_gpu_has_its_own_kernel_and_stream(device):
    kernel = Recorder()
    ask(kernel)
    device.index = 1
    second = ask(kernel)
    assert kernel.counts() == (2, 0)
    assert ask(kernel) is second
    assert kernel.at_once[0][1][3] == 1001


@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize("offset", [1, 2, 3], ids=lambda offset: f"{4 * offset} bytes")
def test_tensors_that_are_not_aligned_go_through_triton(device, which, offset):
    """Before and after an aligned launch alike; what Triton compiles for them is not remembered."""
    kernel = Recorder()
    unaligned = {which: aligned(offset=offset)}
    ask(kernel, **unaligned)
    assert not kernel.entries
    first = ask(kernel)
    ask(kernel, **unaligned)
    assert kernel.counts() == (3, 0)
    assert ask(kernel, **{which: aligned(offset=4)}) is first
    assert kernel.counts() == (3, 1)


def test_tensors_after_other_arguments_are_refused(device):
    """Their alignment and dtype would not be looked at: by place and by name, and nothing is remembered."""
    for args, options in (((7, aligned()), {}), ((7, 0.5), {"FLAG": aligned()})):
        kernel = Recorder()
        with pytest.raises(TypeError, match="declared: tensors are passed first"):
            kernel[(1,)](aligned(), aligned(), *args, **options)
        assert not kernel.entries


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(device, hook):
    """Hooks that are added after a launch has been remembered, and those that are gone again."""
    kernel, chain, seen = Recorder(), getattr(triton.knobs.runtime, hook), lambda metadata: None
    ask(kernel)
    chain.add(seen)
    try:
        ask(kernel)
        assert kernel.counts() == (2, 0)
    finally:
        chain.remove(seen)
    ask(kernel)
    assert kernel.counts() == (2, 1)


class OnFirst(torch.Tensor):
    """A tensor that says it lies on GPU 0."""

    def get_device(self):
        return 0


@pytest.mark.parametrize("current", [0, 1])
def test_the_tensors_gpu_is_made_current(device, monkeypatch, current):
    """For the launch alone, by Triton and at once, and only if another one is."""
    made = []

    @contextlib.contextmanager
    def make_current(index):
        made.append(index)
        device.index, before = index, device.index
        yield
        device.index = before

    monkeypatch.setattr(torch.cuda, "device", make_current)
    device.index, kernel, x = current, Recorder(), aligned().as_subclass(OnFirst)
    for _ in range(2):
        ask(kernel, x)
    assert kernel.counts() == (1, 1)
    assert kernel.at_once[0][1][3] == 1000  # the stream
    assert made == [0, 0][: 2 * current]
    assert device.index == current


def test_programs_that_ask_what_others_have_found_are_one_warp():
    """Where warps decide differently whether to look for a maximum, those that look wait for those that do not."""
    from tests.kernels import variants  # not for the interpreter

    launched = variants.launched()
    for name in ("activation.activation_encode_kernel", "activation.activation_bound_kernel"):
        assert [variant.options["num_warps"] for variant in launched[name]] == [1] * len(launched[name])


# Tokens that all are multiples of 16, as batches' are, and more than a norm's backward has programs.
FIRST, LATER = ((5, 512), (5, 528)), ((6, 512), (3, 1056))


def test_other_numbers_of_tokens_compile_no_other_kernel(monkeypatch):
    """By Triton's own key of a launch: types, what is compiled in, what 16 divides."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys = set()

    def launched(kernel, grid, *args, **options):
        _, specialization, given = create_function_from_signature(kernel.signature, kernel.params, backend)(
            *args, **options
        )
        keys.add((kernel, str(specialization), str(given)))

    monkeypatch.setattr(launch.Kernel, "launch", launched)
    found = []
    for rows, length in FIRST + LATER:
        shape = BlockShape(Model("LlamaConfig", sizes(512, 1024, 1, 4, 2, 96)), rows, length)
        with torch.no_grad():
            for subject in SUBJECTS:
                with torch.enable_grad():
                    calls = recorded(subject, shape, "meta")
                for call in calls.values():
                    if is_launched(call.op):
                        call.op.kernel(*call.arguments)
        found.append(set(keys))
    # Sizes that a tile divides, and such that it does not; more of them have all been seen.
    first = found[len(FIRST) - 1]
    # Below 512 of them, the sums of programs' sums are compiled for each doubling.
    assert {kernel.__name__ for kernel, _, _ in found[-1] - first} <= {"_sum_partials_kernel"}
    assert len({kernel for kernel, _, _ in first}) >= 20


def is_launched(op):
    """Whether a kernel of ours does it by `launch`: not PyTorch's, nor those that read by descriptors."""
    return is_ours(op) and not op.reference.__module__.endswith(".grouped")


@pytest.mark.parametrize("name", [name for name in SAMPLES if is_launched(CATALOGUE[name])])
def test_kernels_are_told_of_tensors_that_are_dense(name, monkeypatch):
    """However arguments lie: only rows may be apart, where a kernel is told by how much."""
    launches = []
    monkeypatch.setattr(launch.Kernel, "launch", lambda kernel, grid, *args, **_: launches.append((kernel, args)))
    for sample in SAMPLES[name]:
        leaves, spec = tree_flatten(sample)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                other = column_by_column(leaf)
                CATALOGUE[name].kernel(*tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], spec))
    for kernel, args in launches:
        has_strides = any("stride" in parameter.name.lower() for parameter in kernel.params)
        for x in args:
            if isinstance(x, torch.Tensor):
                assert x.is_contiguous() or (has_strides and x.stride(-1) == 1), kernel.__name__
