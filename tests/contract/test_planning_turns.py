"""A plan gives way to one of a higher priority, and heeds its job's end, wherever it is."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from schemas.names import job_id_from_content
from service.plan import planner
from service.plan.child.process import Child
from service.store import NewJob, PlanLease, jobs
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import run_planning
from tests.support.waiting import wait_until


@pytest.fixture
def shop(tmp_path: Path, target: Path) -> Shop:
    """A service whose units are small, and a source of many."""
    rows = ({"id": f"r{number}", "text": f"row {number}"} for number in range(400))
    source = tmp_path / "source"
    source.mkdir()
    (source / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Shop.open(tmp_path, target, unit_max_samples=20, source_roots=(source,), lease_s=1.0)


def submit(shop: Shop, target: Path, key: str, priority: int = 0) -> str:
    body = request(
        target, [], loss="all", source={"kind": "file", "path": str(shop.settings.source_roots[0])}
    )
    made = NewJob.of(job_id_from_content(key), key, body, priority=priority)
    return shop.store.write(jobs.submit, made)[0].id


def test_a_plan_waits_for_one_of_a_higher_priority_and_then_goes_on_where_it_was(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A job is planned. 2. After its first unit others come. 3. The higher one's plan is done first."""
    monkeypatch.setattr(planner, "GIVE_WAY_S", 0.0)
    first = submit(shop, target, "first")
    later: dict[int, str] = {}
    added: list[str] = []
    add_unit = planner._add_unit

    def adding(lease: PlanLease, *more: Any) -> None:
        add_unit(lease, *more)
        added.append(lease.job_id)
        if not later:
            later.update({priority: submit(shop, target, f"of {priority}", priority) for priority in (0, 50)})
        elif len(added) == 10:
            later[100] = submit(shop, target, "of 100", 100)

    monkeypatch.setattr(planner, "_add_unit", adding)
    assert run_planning(shop.store, shop.settings, "planner", lambda: False)
    planned = {job: shop.store.read(jobs.job, job).progress for job in (first, *later.values())}
    assert [job for job, progress in planned.items() if not progress.plan_done] == [later[0]]
    counts = [added.count(job) for job in (first, later[50], later[100])]
    assert counts == [20, 20, 20], "nothing is made again"
    last = {job: len(added) - added[::-1].index(job) for job in set(added)}
    assert last[later[100]] < last[later[50]] < last[first]
    shop.store.close()


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "outranked"])
def test_reading_a_large_source_for_its_fingerprint_ends_and_gives_way_as_a_plan_does(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """1. A source is read, for hours. 2. Its job is cancelled, or another is planned first."""
    monkeypatch.setattr(planner, "GIVE_WAY_S", 0.0)
    job_id = submit(shop, target, "first")
    file = shop.settings.source_roots[0] / "rows.jsonl"
    num_bytes, begun = file.stat().st_size, 0
    start = planner.tokenizing

    def starting(*given: Any) -> closing[Child]:
        nonlocal begun
        begun += 1
        os.truncate(file, 2**42 if begun == 1 else num_bytes)
        if begun == 1 and is_cancelled:
            shop.store.write(jobs.cancel, job_id)
        elif begun == 1:
            submit(shop, target, "another", 100)
        return start(*given)

    monkeypatch.setattr(planner, "tokenizing", starting)
    assert run_planning(shop.store, shop.settings, "planner", lambda: False)
    assert begun == (1 if is_cancelled else 2)
    state = JobState.CANCELLED if is_cancelled else JobState.RUNNING
    assert shop.store.read(jobs.state, job_id) is state
    shop.store.close()


@pytest.mark.parametrize("renamed", [False, True])
def test_a_source_that_is_overwritten_while_it_is_read_is_no_dataset(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """1. Its fingerprint is taken. 2. It is overwritten, as long as before. 3. The job fails by name."""
    file = shop.settings.source_roots[0] / "rows.jsonl"
    known_hashes = planner._known_hashes

    def overwriting(*given: Any) -> Path | None:
        other = file.read_text().replace("row", "cow")
        place = file.with_suffix(".new") if renamed else file
        place.write_text(other)
        place.rename(file)
        return known_hashes(*given)

    monkeypatch.setattr(planner, "_known_hashes", overwriting)
    job_id = submit(shop, target, "one")
    assert run_planning(shop.store, shop.settings, "planner", lambda: False)
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.FAILED and job.problem is not None
    assert (job.problem.type, job.problem.field) == ("urn:quarry:source-refused", "source.path")
    assert "'rows.jsonl' was changed while it was read" in job.problem.detail
    shop.store.close()


def test_a_plan_of_rows_that_each_cost_almost_too_much_does_not_hold_up_a_job_of_a_higher_priority(
    shop: Shop, target: Path
) -> None:
    """1. 2,000 such rows are planned  2. another job comes  3. it is planned while they are not."""
    loop = "{% for a in range(1500) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
    template = loop + "{% for message in messages %}{{ message.content }}{% endfor %}"
    slow = request(target, conversations(2000, longest=1), chat_template=template, loss="all")
    first = shop.submit(slow, "slow")
    stopped = threading.Event()
    with ThreadPoolExecutor() as threads:
        planning = threads.submit(run_planning, shop.store, shop.settings, "planner", stopped.is_set)
        try:
            wait_until(lambda: shop.store.read(jobs.job, first).progress.samples_planned > 0)
            second = submit(shop, target, "another's", 50)
            wait_until(lambda: shop.store.read(jobs.job, second).progress.plan_done)
            assert not shop.store.read(jobs.job, first).progress.plan_done
        finally:
            stopped.set()
        assert planning.result(30)
