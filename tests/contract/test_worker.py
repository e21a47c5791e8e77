"""The worker process as a whole: what keeps its parts alive must not end in silence."""

import pytest

import service.worker
from service.settings import Settings
from service.sweeper import sweep
from service.worker import run_worker


def test_a_worker_whose_keeper_broke_ends_with_its_error(tmp_path, monkeypatch):
    """1. The sweep at the start is well. 2. The next one cannot read its folder. 3. The worker ends."""
    sweeps = iter([sweep])

    def failing(store, settings):
        done = next(sweeps, None)
        if done is None:
            raise OSError(5, "the data folder cannot be read")
        return done(store, settings)

    monkeypatch.setattr(service.worker, "sweep", failing)
    monkeypatch.setattr(service.worker, "RESTART_S", 0.05)
    monkeypatch.setattr(service.worker, "SWEEP_S", 0.0)
    with pytest.raises(OSError, match="the data folder cannot be read"):
        run_worker(Settings(data_dir=tmp_path, poll_s=0.05))
