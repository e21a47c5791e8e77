"""A plan begun again: what it goes on from, wherever the Hub's branches went, and what it refuses."""

import json
from typing import Any

import pytest

from schemas.job import JobState
from schemas.names import frozen_source_path
from service.store import jobs, plans
from tests.support import templates
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import regular_blob
from tests.unit.plan.house import JOB, House, chat


def rows(word: str) -> bytes:
    lines = ({"id": f"{word}-{i}", "messages": chat(word)} for i in range(12))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.fixture
def hub(hub: FakeHub, house: House) -> FakeHub:
    hub.add_repo("org/set", {"train.jsonl": rows("first")})
    hub.add_repo("org/model", {path.name: path.read_bytes() for path in house.model.iterdir()}, kind="model")
    house.settings = house.settings.model_copy(update={"hub_endpoint": hub.url})
    return hub


def begin(house: House, **options: Any) -> None:
    """Plan one unit of a new job, and let the planner's lease run out."""
    house.submit(**options)
    house.plan(stop=lambda: len(house.units()) >= 1)
    assert len(house.units()) == 1
    house.clock.advance(house.settings.lease_s + 1)


def source_ids(house: House, unit: int) -> list[str]:
    ids: list[str] = house.plan_table(unit).column("source_id").to_pylist()
    return ids


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_dataset_that_moved_is_planned_on_at_the_commit_it_was_begun_at(
    house: House, hub: FakeHub, revision: str | None
) -> None:
    """1. one unit is planned, the planner ends  2. the dataset's main moves  3. the next one goes on."""
    begun_at = hub.repo("org/set").head.oid
    begin(house, source={"kind": "hub", "repo_id": "org/set", "revision": revision})
    hub.repo("org/set").add("other rows", {"train.jsonl": regular_blob(rows("second"))})
    assert house.plan(owner="second") is True
    job = house.job()
    assert job.problem is None and job.state is JobState.RUNNING and job.progress.plan_done
    assert job.progress.samples_planned == 12
    assert job.identity is not None and begun_at in job.identity.source_fingerprint
    planned = [name for unit in range(3) for name in source_ids(house, unit)]
    assert planned == [f"first-{i}" for i in range(12)]


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_that_moved_is_planned_on_at_the_commit_it_was_begun_at(
    house: House, hub: FakeHub, revision: str | None
) -> None:
    """1. one unit is planned, the planner ends  2. the model's template changes  3. the next one goes on."""
    begun_at = hub.repo("org/model", "model").head.oid
    begin(house, model="org/model", revision=revision)
    changed = {"chat_template.jinja": regular_blob(templates.LLAMA3.encode())}
    hub.repo("org/model", "model").add("other template", changed)
    assert house.plan(owner="second") is True
    job = house.job()
    assert job.problem is None and job.state is JobState.RUNNING and job.progress.plan_done
    assert job.identity is not None and job.identity.revision == begun_at


@pytest.mark.parametrize("path", [".", "*.jsonl"])
def test_a_folder_that_grew_is_planned_on_as_it_was_begun(house: House, path: str) -> None:
    """1. one unit is planned, the planner ends  2. more files come  3. the next one goes on."""
    folder = house.model.parent / "rows"
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(rows("first"))
    house.settings = house.settings.model_copy(update={"source_roots": (folder,)})
    begin(house, source={"kind": "file", "path": path})
    (folder / "a.jsonl").write_bytes(rows("second"))
    assert house.plan(owner="second") is True
    job = house.job()
    assert job.problem is None and job.progress.plan_done and job.progress.samples_planned == 12
    planned = [name for unit in range(3) for name in source_ids(house, unit)]
    assert planned == [f"first-{i}" for i in range(12)]


def test_a_job_that_is_not_begun_takes_the_dataset_as_it_is_now(house: House, hub: FakeHub) -> None:
    house.submit(source={"kind": "hub", "repo_id": "org/set"})
    hub.repo("org/set").add("other rows", {"train.jsonl": regular_blob(rows("second"))})
    house.plan()
    assert source_ids(house, 0) == [f"second-{i}" for i in range(4)]


def test_a_local_model_that_changed_is_refused_and_goes_on_when_it_is_put_back(house: House) -> None:
    begin(house)
    template = (house.model / "chat_template.jinja").read_text()
    (house.model / "chat_template.jinja").write_text(templates.LLAMA3)
    house.plan(owner="second")
    job = house.job()
    assert job.state is JobState.FAILED and job.problem is not None and job.problem.cure
    assert (job.problem.type, job.problem.field) == ("urn:quarry:identity-changed", "model")
    assert "was changed since the job was planned" in job.problem.detail
    (house.model / "chat_template.jinja").write_text(template)
    house.store.write(jobs.resume, JOB)
    house.plan(owner="third")
    assert house.job().progress.plan_done


@pytest.mark.parametrize("content", [None, "[", "\x00"])
def test_a_job_whose_note_of_its_source_is_lost_or_broken_says_so(house: House, content: str | None) -> None:
    begin(house)
    path = house.settings.work_root / frozen_source_path(JOB)
    path.unlink()
    if content is not None:
        path.write_text(content)
    house.plan(owner="second")
    problem = house.store.read(jobs.events, JOB)[-1].problem
    assert problem is not None and problem.type == "urn:quarry:write-failed"
    assert "source.json" in problem.detail and problem.cure


def test_a_lease_says_what_is_fixed_already(house: House) -> None:
    house.submit()
    first = plans.lease(house.store, "first", 60)
    assert first is not None and first.identity is None
    house.clock.advance(61)
    house.plan(stop=lambda: len(house.units()) >= 2)
    house.clock.advance(house.settings.lease_s + 1)
    lease = plans.lease(house.store, "second", 60)
    assert lease is not None and lease.identity == house.job().identity is not None


def test_the_plan_of_a_unit_is_never_replaced_by_another(house: House) -> None:
    """1. a unit is planned  2. a setting changes  3. the plan is refused, the unit's is as it was.

    4. put back, the setting lets the plan go on.
    """
    begin(house)
    settings, before = house.settings, house.plan_content(0)
    house.settings = settings.model_copy(update={"unit_max_samples": 3})
    house.plan(owner="second")
    job = house.job()
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.type == "urn:quarry:identity-changed"
    assert "QUARRY_UNIT_MAX_SAMPLES" in str(job.problem.cure)
    assert house.plan_content(0) == before
    house.settings = settings
    house.store.write(jobs.resume, JOB)
    house.plan(owner="third")
    assert house.job().progress.plan_done and house.plan_content(0) == before
