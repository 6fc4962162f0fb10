"""What a trace says of collectives: bytes by hand, and time that computing hides."""

from __future__ import annotations

from benchmarks.wire import wire


def _kernel(name: str, begin: float, end: float, **arguments: object) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": arguments}


def _collective(name: str, begin: float, end: float, sent: int, received: int, dtype: str) -> dict[str, object]:
    told = {"Collective name": name, "In msg nelems": sent, "Out msg nelems": received, "dtype": dtype, "Group size": 4}
    return _kernel("ncclDevKernel", begin, end, **told)


def test_bytes_and_hidden_time() -> None:
    events = [
        {"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0.0, "dur": 9e9},
        _kernel("gemm", 0.0, 1000.0),
        _collective("_allgather_base", 500.0, 1500.0, 100, 400, "Byte"),
        _kernel("gemm", 1200.0, 2000.0),
        _collective("_reduce_scatter_base", 3000.0, 4000.0, 400, 100, "BFloat16"),
        _collective("allreduce", 3500.0, 4500.0, 1, 1, "Float"),
    ]
    assert wire(events) == {"gathered": 300.0, "reduced": 600.0, "step_ms": 4.5, "nccl_ms": 2.5, "exposed_ms": 1.7}
