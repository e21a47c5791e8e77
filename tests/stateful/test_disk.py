"""A disk that is full at any write call of a job blocks it by name; with space again, it completes."""

import logging
from pathlib import Path

import pytest

from schemas.job import JobState
from service.host import host_of
from tests.stateful.engine import reference_states
from tests.stateful.machine import work
from tests.stateful.oracle import Checkpoints
from tests.stateful.play import Play

EVERY = 5
"""Of about 130 calls: one in so many is met."""


@pytest.mark.slow
def test_a_full_disk_blocks_a_job_by_name_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.work.runner.RECORD_S", 0.02)
    monkeypatch.setattr("service.capture.canary.reference_states", reference_states)
    logging.disable(logging.WARNING)
    checkpoints, met = Checkpoints(tmp_path / "checkpoints"), 0
    while True:
        root = tmp_path / str(met)
        root.mkdir()
        play = Play(root, f"sqlite:///{root / 'quarry.db'}", checkpoints)
        host_of(play.store, play.service.settings)  # without its file a worker waits, and leases nothing
        play.submit(None, "a key", "base", (1,), frozenset({1, 2, 3}), canary="run")
        play.meet_full_disk(lambda play: work(play, "all"), 1 + met * EVERY, stays=met % 2 == 0)
        play.end()
        (job,) = play.service.jobs()
        assert job.state is JobState.COMPLETED, job.problem
        play.close()
        if not play.reached["full disks"]:
            break
        met += 1
    assert met > 20
    logging.disable(logging.NOTSET)
