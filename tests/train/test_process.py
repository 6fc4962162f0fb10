"""Signals, and what the processes of a run learn of each other's end."""

from __future__ import annotations

import io
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from overcoat import cli
from overcoat.train import process
from overcoat.train.config import Config
from overcoat.train.console import PrintableConsole
from overcoat.train.loop import naming_config
from overcoat.train.process import StopRequest
from tests.processes import on_two
from tests.train.runs import MakeConfig

GONE = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_ask_for_a_checkpoint(signum: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process._Groups, "is_ended", False)
    previous = signal.signal(signum, signal.SIG_DFL)  # nohup, under which tests may run, ignores SIGHUP
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signum)
            assert stop.agreed() == signum
    finally:
        signal.signal(signum, previous)


def test_nohup_is_respected() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.agreed() is None
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_the_end_of_another_is_not_blamed_on_the_configuration(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = make_config()
    with pytest.raises(ValueError, match=r"model\.config"), naming_config(config):
        raise RuntimeError(GONE)
    monkeypatch.setattr(process, "count", lambda: 2)
    with pytest.raises(RuntimeError, match="gloo"), naming_config(config):
        raise RuntimeError(GONE)
    wrapped = ValueError("another")
    wrapped.__cause__ = RuntimeError(GONE)
    assert process.follows_from_another(wrapped)


def _stop_while_waiting(rank: int) -> None:
    """The first is told to stop while the second keeps it waiting, and knows before the second comes."""
    with StopRequest() as stop:
        process.writing_group()
        if rank == 1:
            time.sleep(1)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
            start = time.monotonic()
            handle, seen = stop._handle, []
            signal.signal(signal.SIGUSR1, lambda *of: (seen.append(time.monotonic() - start), handle(*of)))
        process.wait_for_all()
        assert rank == 1 or seen[0] < 0.9
        assert stop.agreed() == signal.SIGUSR1


def test_signals_are_handled_while_a_process_waits() -> None:
    on_two(_stop_while_waiting, "cpu")


def _die(rank: int) -> None:
    process.writing_group()
    if rank == 1:
        time.sleep(0.2)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        process.wait_for_all()
    assert process.follows_from_another(raised.value)
    assert time.monotonic() - start < 30
    os._exit(0)


def test_the_end_of_a_process_ends_the_wait_for_it() -> None:
    on_two(_die, "cpu")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE = 'abc'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE = '-2'"),
        ({"RANK": "x"}, "RANK = 'x'"),
        ({"RANK": "2"}, "RANK = 2 in the environment, of 2 processes"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK = ''"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = '0'"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT = 'abc'"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_one_line(
    changed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, value in {**known, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said), process.joined("cpu"):
        pass
    assert not dist.is_initialized()


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    written = io.StringIO()
    PrintableConsole(file=written, force_terminal=True).print(
        "[bold]a\x1b[31mb\x9b2J\u202ec", markup=False, highlight=False
    )
    assert "a\\x1b[31mb\\x9b2J\\u202ec" in written.getvalue()
    (tmp_path / "a.toml").write_text('["\\u001b[31mx"]\ny = 1\n')
    assert cli.main(["train", str(tmp_path / "a.toml")]) == 2
    assert "unknown key \\x1b[31mx" in capsys.readouterr().err
