"""The supervisor: one worker after another, until it is stopped, the work is done, or it is of no use."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.work import supervisor as module
from service.work.supervisor import MAX_FAST_CRASHES, Supervisor
from service.work.worker_process import JOB_ENDED_CODES
from tests.support.children import DRAINS, IGNORES, Output, python, wait_for_end

GRACE_S = 600.0
"""Longer than any test: what ends before it did not wait for it."""


@pytest.fixture
def output() -> Iterator[Output]:
    with Output.opened() as output:
        yield output


def started(code: str, output: Output, grace_s: float = GRACE_S, **options: Any) -> Supervisor:
    supervisor = Supervisor(python(code), b"", grace_s, output=output.write, **options)
    supervisor.start()
    return supervisor


def test_it_ends_when_a_workers_work_is_done(output: Output):
    supervisor = started("raise SystemExit(3)", output, last_codes=JOB_ENDED_CODES)
    supervisor.join()
    assert not supervisor.gave_up.is_set()


def test_stopped_it_ends_its_worker_in_order(output: Output):
    supervisor = started(DRAINS, output)
    assert output.line() == "ready"
    supervisor.stop()
    supervisor.join()
    assert not supervisor.gave_up.is_set()


def test_stopped_before_it_began_it_starts_no_worker(output: Output):
    supervisor = Supervisor(python("print('born')"), b"", GRACE_S, output=output.write)
    supervisor.stop()
    supervisor.start()
    supervisor.join()
    output.write.close()
    assert output.line() == ""


def test_a_worker_that_does_not_drain_in_its_grace_is_killed(output: Output):
    supervisor = started(f"import os; print(os.getpid(), flush=True)\n{IGNORES}", output, grace_s=0.0)
    pid = int(output.line())
    assert output.line() == "ready"
    supervisor.stop()
    wait_for_end(pid)
    supervisor.join()
    assert not supervisor.gave_up.is_set()


def test_a_worker_that_was_killed_is_started_again(output: Output, tmp_path: Path):
    code = f"""
import os, pathlib, signal
lives = pathlib.Path({str(tmp_path / "lives")!r})
before = int(lives.read_text()) if lives.exists() else 0
lives.write_text(str(before + 1))
if before == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor = started(code, output, last_codes=frozenset({0}))
    supervisor.join()
    assert (tmp_path / "lives").read_text() == "2"


def test_it_gives_up_on_a_worker_that_cannot_live_and_says_so_once(
    output: Output, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.01)
    calls: list[str] = []
    code = "print('born', flush=True); raise SystemExit(9)"
    supervisor = started(code, output, on_giving_up=lambda: calls.append("given up"))
    supervisor.join()
    assert supervisor.gave_up.is_set()
    assert calls == ["given up"]
    output.write.close()
    assert output.read.read().split() == [b"born"] * MAX_FAST_CRASHES


def test_a_worker_that_was_given_up_is_tried_again_where_others_go_on(
    output: Output, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    answers = iter([True, True, False])
    code = "print('born', flush=True); raise SystemExit(9)"
    supervisor = started(code, output, on_giving_up=lambda: next(answers))
    supervisor.join()
    assert supervisor.gave_up.is_set()
    output.write.close()
    assert output.read.read().split() == [b"born"] * (MAX_FAST_CRASHES + 2)


def test_fast_crashes_are_waited_for_longer_and_longer_and_a_long_life_forgives_them(
    monkeypatch: pytest.MonkeyPatch,
):
    lives_s, now_s, delays_s = iter([1.0] * 4 + [3600.0] * 2 + [1.0] * 5), 0.0, []

    def live(_self: Supervisor, _worker: None) -> int:
        nonlocal now_s
        now_s += next(lives_s)
        return 1

    supervisor = Supervisor([], b"", GRACE_S)
    monkeypatch.setattr(module, "WorkerProcess", lambda *_: None)
    monkeypatch.setattr(Supervisor, "_live", live)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(supervisor._stopping, "wait", lambda delay_s: bool(delays_s.append(delay_s)))
    supervisor.run()
    assert delays_s == [0, 1, 2, 4, 8, 0, 0, 1, 2, 4, 8]
    assert supervisor.gave_up.is_set()


def test_it_gives_up_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.01)
    calls: list[str] = []
    supervisor = Supervisor(["/no/such/program"], b"", GRACE_S, on_giving_up=lambda: calls.append("given up"))
    supervisor.start()
    supervisor.join()
    assert calls == ["given up"] and supervisor.code == module.EXIT_WORKER_LOST
