"""Nights of a schedule on which anything may happen, on the fake engine."""

import random
from pathlib import Path

import pytest

from schemas.job import JobState
from service.store import jobs
from tests.support.nights import Faults, hang, names, open_nights, plan_some

TEMPLATES = ("", "other")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_written_once_whatever_happens_at_night(
    tmp_path: Path, target: Path, url: str, faults: Faults, seed: int
) -> None:
    """Nights of dropped files, failures, deaths, resumes, replaced jobs and other templates; then quiet ones.

    Under each template no sample is there twice, and under the last one every sample is there.
    """
    chance = random.Random(seed)
    nights = open_nights(tmp_path, target, url, changed_recipe="begin_anew")
    dropped = 0
    for _ in range(8):
        if chance.random() < 0.8:
            repeated = chance.sample(range(dropped), min(dropped, 2))
            fresh = range(dropped, dropped + chance.randrange(1, 30))
            dropped = fresh.stop
            nights.drop([*repeated, *fresh])
        if chance.random() < 0.2:
            nights.change_template(chance.choice(TEMPLATES))
        nights.change(overlap=chance.choice(["queue", "replace"]))
        last = nights.jobs()[-1:]
        if last and last[0].state is JobState.FAILED and chance.random() < 0.3:
            nights.store.write(jobs.resume, last[0].id)
        nights.submit()
        match chance.choice(["well", "engine fails", "worker dies", "planner dies"]):
            case "engine fails":
                faults.fail_after(chance.randrange(30))
            case "worker dies":
                nights.shop.plan()
                hang(nights, faults, chance.randrange(30))
                continue
            case "planner dies":
                plan_some(nights, chance.randrange(3))
                continue
        nights.work()
        faults.mend()
    for _ in range(3):
        nights.night()
    assert nights.run().job_state is JobState.COMPLETED, nights.job().problem
    written = nights.written()
    for counts in written.values():
        assert set(counts.values()) == {1}
    identity = nights.job().identity
    assert identity is not None
    assert sorted(written[identity.template_sha256]) == sorted(names(range(dropped)))
    nights.store.close()
