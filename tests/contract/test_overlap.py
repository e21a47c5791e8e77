"""What happens to a unit after the engine's last answer does not keep the engine from the next one."""

import threading
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.capture import unit_run
from tests.support.jobs import Shop, conversations, request

IN_FLIGHT, IN_PROOF = 3, 2


class Counted:
    """`check_unit`, of which the first few calls wait for each other, and which counts those at once."""

    def __init__(self, together: int) -> None:
        self.most = 0
        self._now, self._begun, self._lock = 0, 0, threading.Lock()
        self._together = threading.Barrier(together, timeout=60.0)
        self._check = unit_run.check_unit

    def __call__(self, **given: Any) -> Any:
        with self._lock:
            self._begun += 1
            self._now += 1
            self.most = max(self.most, self._now)
            waits = self._begun <= self._together.parties
        try:
            if waits:
                self._together.wait()
            return self._check(**given)
        finally:
            with self._lock:
                self._now -= 1


def test_units_in_proof_make_room_in_the_engine_but_no_more_than_was_allowed(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop.open(tmp_path, target, unit_max_samples=5, units_in_flight=IN_FLIGHT, units_in_proof=IN_PROOF)
    check = Counted(IN_FLIGHT + IN_PROOF)
    monkeypatch.setattr(unit_run, "check_unit", check)
    job = shop.run(request(target, conversations(30)))
    assert job.state is JobState.COMPLETED, job.problem
    assert check.most == IN_FLIGHT + IN_PROOF
    shop.store.close()
