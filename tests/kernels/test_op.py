"""Every op of the catalogue through opcheck and torch.compile: `pytest tests/kernels/test_op.py`.

opcheck runs each op on the samples of samples.py and compares the real result with the fake's (shape, dtype, strides),
with the schema (nothing mutated or aliased that the schema does not name) and with itself under AOT dispatch.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import overcoat.kernels
from overcoat.kernels import op as catalogue
from overcoat.kernels.op import CATALOGUE, op
from tests.kernels.samples import SAMPLES, column_by_column, normal
from tests.nightly import mostly_nightly

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

for module in pkgutil.iter_modules(overcoat.kernels.__path__):
    if not module.ispkg:
        importlib.import_module(f"overcoat.kernels.{module.name}")


def test_no_op_escapes():
    missing = [
        f"{name} ({op.reference.__module__})" for name, op in CATALOGUE.items() if is_ours(op) and name not in SAMPLES
    ]
    assert not missing, f"add arguments to tests/kernels/samples.py for {', '.join(missing)}"
    assert set(SAMPLES) <= set(CATALOGUE)


def is_ours(op):
    """Whether the op belongs to a file of overcoat.kernels."""
    return op.reference.__module__.rpartition(".")[0] == "overcoat.kernels"


def bits(x):
    """A tensor's bytes."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).view(-1).view(torch.uint8)


def on(device, arguments):
    """A copy of the arguments on a device, strides kept."""

    def move(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    return tree_map_only(torch.Tensor, move, arguments)


def run(name, arguments):
    """The op's results, and the arguments after it, as lists of tensors."""
    results = CATALOGUE[name](*arguments)
    return tensors(results), tensors(arguments)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def telling(name):
    """Of an op's samples the last, and one of those with the most tensors."""
    samples = SAMPLES[name]
    most = max(samples, key=lambda sample: len(tensors(sample)))
    return [most] if most is samples[-1] else [most, samples[-1]]


@pytest.mark.parametrize("name", list(SAMPLES))
def test_opcheck(name, device):
    """Shapes of all samples; more of the one with the most tensors."""
    for sample in SAMPLES[name]:
        arguments = on(device, sample)
        checks = ["test_faketensor"]
        if sample is telling(name)[0]:
            checks.append("test_autograd_registration")
            if all(x.dtype not in FLOAT8 for x in tensors(arguments)):
                checks.append("test_schema")  # compares inputs by allclose, which FP8 lacks; below bytes are compared
        torch.library.opcheck(CATALOGUE[name], arguments, test_utils=checks)


# One result and several, tensors in lists, written arguments: `op` registers all others as one of these.
REGISTERED = ("gemm", "norm_backward", "stack_codes", "qk_rope_encode12_")


@pytest.mark.parametrize("name", mostly_nightly(SAMPLES, REGISTERED))
def test_results_under_aot_dispatch(name, device):
    arguments = on(device, telling(name)[0])
    torch.library.opcheck(CATALOGUE[name], arguments, test_utils=["test_aot_dispatch_dynamic"])


@pytest.mark.parametrize("name", list(SAMPLES))
def test_compiled_code_depends_on_no_size(name):
    """A shape function that makes a Python number of one, as len() does, has code compiled again for every other."""
    leaves, spec = tree_flatten(SAMPLES[name][-1])
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*given):
        filled = dict(enumerate(leaves)) | dict(zip(places, given))
        return CATALOGUE[name](*tree_unflatten(list(filled.values()), spec))

    graph = make_fx(call, tracing_mode="symbolic")(*[leaves[place] for place in places])
    guards = [str(guard.expr) for guard in graph.shape_env.guards]
    assert not [guard for guard in guards if re.fullmatch(r"Eq\(s\d+, \d+\)", guard)]


@pytest.mark.parametrize("name", list(SAMPLES))
def test_op_is_deterministic_mutates_nothing_else_and_returns_no_views(name, device):
    mutated = [argument.alias_info is not None for argument in CATALOGUE[name]._schema.arguments]
    for sample in SAMPLES[name]:
        arguments = on(device, sample)
        first, inputs = run(name, arguments)
        second, _ = run(name, on(device, sample))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(bits(a), bits(b))
            assert a.numel() == 0 or all(
                a.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in inputs
            )
            if len(a) > 1 if a.dim() else True:  # one row is contiguous in a wider buffer: not worth a copy
                assert a.untyped_storage().nbytes() == a.numel() * a.element_size(), "the result drags padding along"
        for before, after, may_change in zip(sample, arguments, mutated):
            for x, y in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if isinstance(x, torch.Tensor) and not may_change:
                    assert torch.equal(bits(x), bits(y.cpu()))


@pytest.mark.parametrize("name", list(SAMPLES))
def test_arguments_may_be_noncontiguous(name, device):
    """One after the other: the same bits, laid out as the shape function says, which compiled code does not check."""
    for sample in telling(name):
        check_noncontiguous(name, *tree_flatten(on(device, sample)))


def check_noncontiguous(name, leaves, spec):
    leaves = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in leaves]
    expected, after = run(name, tree_map_only(torch.Tensor, torch.clone, tree_unflatten(leaves, spec)))
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            continue
        other = tree_map_only(torch.Tensor, torch.clone, [*leaves])
        other[place] = column_by_column(leaf)
        with FakeTensorMode() as mode:
            fakes = tensors(
                CATALOGUE[name](*tree_map_only(torch.Tensor, mode.from_tensor, tree_unflatten(other, spec)))
            )
        results, changed = run(name, tree_unflatten(other, spec))
        for fake, result, value in zip(fakes, results, expected, strict=True):
            assert layout(fake) == layout(result), place
            assert torch.equal(bits(result), bits(value)), place
        assert all(torch.equal(bits(x), bits(value)) for x, value in zip(changed, after, strict=True)), place


def layout(x):
    """What compiled code takes for granted; where there is one number, a stride says nothing."""
    return x.dtype, *((size, stride) for size, stride in zip(x.shape, x.stride()) if size != 1)


class Elsewhere(torch.Tensor):
    """A tensor that is more than one."""


class Asking(TorchFunctionMode):
    """A mode that answers for PyTorch's functions, ops among them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is CATALOGUE["amax"]:
            return CATALOGUE["amax"].reference(*args)
        return function(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """A mode that answers for the op."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is CATALOGUE["amax"]
        return CATALOGUE["amax"].reference(*args)


@contextlib.contextmanager
def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield


ONLOOKERS = {
    "nobody": (contextlib.nullcontext, lambda x: x),
    "a parameter": (contextlib.nullcontext, torch.nn.Parameter),
    "autograd": (torch.enable_grad, lambda x: x),
    "a mode": (Watching, lambda x: x),
    "a mode of functions": (Asking, lambda x: x),
    "a default device": (lambda: torch.device("cpu"), lambda x: x),
    "a view with the other sign": (contextlib.nullcontext, torch._neg_view),
    "a profiler": (profiled, lambda x: x),
    "a subclass": (contextlib.nullcontext, lambda x: x.as_subclass(Elsewhere)),
    "the CPU": (contextlib.nullcontext, lambda x: x.cpu()),
}


@pytest.fixture
def as_on_a_gpu(request, device, monkeypatch):
    """Tensors on the CPU count as a GPU's, where the CPU itself is not what is asked about."""
    if device.type == "cpu":
        monkeypatch.setattr(catalogue, "_is_cuda", lambda x: "the CPU" not in request.node.name)
    return device


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("onlooker", list(ONLOOKERS))
def test_the_dispatcher_is_spared_where_nobody_looks_on(onlooker, once, as_on_a_gpu, monkeypatch):
    """On the short way the kernel that the overload knows is called, on the long one that of the registration."""
    amax, short = CATALOGUE["amax"], []
    monkeypatch.setattr(amax, "kernel", lambda x: short.append(x) or amax.reference(x))
    inside, prepare = ONLOOKERS[onlooker]
    x = normal(4, 32)
    prepared = prepare(x.to(as_on_a_gpu))
    with torch.no_grad(), inside():
        result = catalogue.check_dispatcher_once(amax)(prepared) if once else amax(prepared)
    assert result.item() == x.abs().amax().item()
    assert len(short) == (onlooker in ("nobody", "a parameter", "a default device"))


def test_tracing_vmap_and_fake_tensors_take_the_long_way(as_on_a_gpu, monkeypatch):
    amax, device = CATALOGUE["amax"], as_on_a_gpu
    monkeypatch.setattr(amax, "kernel", lambda x: pytest.fail("the kernel was called"))
    with torch.no_grad():
        with FakeTensorMode() as mode:
            fake = torch.empty(4, 32, device=device)
            assert isinstance(amax(fake), FakeTensor)
        assert isinstance(amax(mode.from_tensor(torch.empty(4, 32, device=device))), FakeTensor)
        x = normal(2, 4, 32)
        assert torch.vmap(amax)(x.to(device)).tolist() == x.abs().amax((1, 2)).tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(lambda x: amax(x) + 1, (x.to(device),), check_trace=False)
        assert "overcoat::amax" in str(traced.graph)


@pytest.mark.gpu
def test_compiled_code_spares_the_dispatcher(monkeypatch):
    amax, short = CATALOGUE["amax"], []
    monkeypatch.setattr(amax, "kernel", lambda x: short.append(x) or amax.reference(x))
    torch.compiler.reset()
    compiled = torch.compile(lambda x: amax(x) * 2, fullgraph=True)
    x = normal(4, 32).cuda()
    with torch.no_grad():
        values = [compiled(x).item() for _ in range(3)]
    assert values == [x.abs().amax().item() * 2] * 3
    assert len(short) == 3


def test_the_short_way_takes_arguments_by_name_and_counts_what_is_written(monkeypatch):
    """As if it lay on a GPU. Compiled code, too, calls an op that returns nothing. An empty list lies nowhere."""

    @op(mutates=("x",))
    def test_only_shift_(x: torch.Tensor, step: float) -> None:
        """Shift in place."""
        x.add_(step)

    @test_only_shift_.fake
    def _(x, step):
        return None

    try:
        assert test_only_shift_.__doc__ == "Shift in place."
        assert "Tensor(a0!) x" in str(test_only_shift_._schema)
        y = torch.zeros(3)
        torch.compiler.reset()
        torch.compile(test_only_shift_, fullgraph=True)(y, 2.0)
        torch.compiler.reset()
        assert y.tolist() == [2, 2, 2]

        @test_only_shift_.cuda
        def _(x, step):
            x.untyped_storage()[0] = int(step)  # unseen by PyTorch, as a kernel's writes are

        monkeypatch.setattr(catalogue, "_dispatcher_is_idle", lambda: True)
        monkeypatch.setattr(catalogue, "_is_cuda", torch.is_tensor)
        for args, kwargs in (((7.0,), {}), ((), {"step": 7.0})):
            x = torch.zeros(3, dtype=torch.uint8)
            before = x._version
            test_only_shift_(x, *args, **kwargs)
            assert x.tolist() == [7, 0, 0]
            assert x._version == before + 1
        written = torch.zeros(3, dtype=torch.uint8)
        test_only_shift_.kernel(step=5.0, x=written)
        assert (written.tolist(), written._version) == ([5, 0, 0], 1)
    finally:
        del CATALOGUE["test_only_shift_"]
    with pytest.raises((RuntimeError, ValueError), match="cat"):  # the reference's
        CATALOGUE["stack_codes"]([], False)


@pytest.mark.parametrize("name", ["gemm", "attention"])
def test_autocast_does_not_reach_into_a_reference(name):
    """FP32 products inside an op stay FP32 in a region that autocasts the model around it."""
    for args in SAMPLES[name]:
        expected = tree_leaves(CATALOGUE[name](*args))
        with torch.autocast("cpu", torch.bfloat16):
            results = tree_leaves(CATALOGUE[name](*args))
        for result, value in zip(results, expected):
            assert result.dtype == value.dtype
            assert torch.equal(result, value)
