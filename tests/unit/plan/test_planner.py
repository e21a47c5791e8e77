"""Planning a job against the real store: what stands afterwards, and what another planner finds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import service.plan.units
from schemas.dataset.columns import PLAN_SCHEMA
from schemas.generate import Generate
from schemas.job import JobState
from service.plan import planner
from service.plan.planner import resolve_capture
from service.store import commits, jobs, plans, units
from tests.support import templates
from tests.support.store_cases import Clock
from tests.unit.plan.house import BYTES_PER_TOKEN, JOB, House, chat

REPO = {"repo_id": "org/states"}


def test_a_plan_is_units_with_sealed_files_and_rejects(house: House) -> None:
    house.submit()
    assert house.plan() is True
    job = house.job()
    assert job.state is JobState.RUNNING and job.problem is None and job.progress.plan_done
    progress = job.progress
    assert (progress.samples_planned, progress.samples_rejected, progress.units_planned) == (12, 3, 3)
    rejects = [(r.position, r.source_id, r.reason) for r in house.store.read(commits.rejects, JOB)]
    assert rejects == [(i, f"bad-{i}", "no-sample") for i in (3, 7, 11)]
    lease = units.lease(house.store, "worker", 60)
    assert lease is not None and (lease.attempt_id.unit, lease.num_samples) == (0, 4)
    table = house.plan_table(0)
    assert table.schema.equals(PLAN_SCHEMA) and table.column("position").to_pylist() == [0, 1, 2, 4]
    assert table.column("source_id").to_pylist() == [f"rows.jsonl:{i}" for i in (0, 1, 2, 4)]
    lengths = [len(ids) for ids in table.column("input_ids").to_pylist()]
    assert table.column("prompt_tokens").to_pylist() == lengths and sum(lengths) == lease.num_tokens
    assert [len(mask) for mask in table.column("loss_mask").to_pylist()] == lengths
    assert all(1 in mask for mask in table.column("loss_mask").to_pylist())


def test_rejects_are_written_while_their_unit_is_filled_and_by_a_plan_made_again_only_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (planner, service.plan.units):
        monkeypatch.setattr(module, "DRAFT_REJECTS", 2)
    rows = [{"messages": chat("a")}, *({"id": f"bad-{i}"} for i in range(5)), {"messages": chat("b")}]
    house.source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    house.submit()
    house.plan(stop=lambda: house.job().progress.samples_rejected > 0)
    assert (house.job().progress.samples_rejected, house.units()) == (2, [])
    progress = house.plan_later().progress
    assert (progress.samples_planned, progress.samples_rejected, progress.units_planned) == (7, 5, 1)
    assert progress.plan_done and [unit.unit for unit in house.units()] == [0]
    rejects = house.store.read(commits.rejects, JOB)
    assert [reject.position for reject in rejects] == [1, 2, 3, 4, 5]


def test_the_identity_says_what_the_dataset_is(house: House) -> None:
    house.submit(loss="last_turn", storage={"compression": "planes"})
    house.plan()
    identity = house.job().identity
    assert identity is not None and identity.state_bytes_per_token == BYTES_PER_TOKEN
    assert (identity.layer_ids, identity.num_layers, identity.dtype) == ((2, 8), 8, "bfloat16")
    assert (identity.loss, identity.compression, identity.capture) == ("last_turn", "planes", None)
    assert identity.source_fingerprint.startswith("file:") and identity.template_sha256


def test_units_are_as_large_as_a_shard(house: House) -> None:
    house.write_rows(100)
    house.submit(storage={"shard_bytes": 65_536})
    house.settings = house.settings.model_copy(update={"unit_max_samples": 4096})
    house.plan()
    sizes = [unit.num_tokens * BYTES_PER_TOKEN for unit in house.units()]
    assert len(sizes) > 2 and all(0.8 * 65_536 < size <= 65_536 for size in sizes[:-1])


def test_more_units_than_names_have_digits_for_fail_the_job(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.plan.planner.MAX_UNITS", 1)
    house.submit()
    house.plan()
    problem = house.job().problem
    assert problem is not None and problem.field == "storage.shard_bytes"
    assert house.job().state is JobState.FAILED


@pytest.mark.parametrize(
    ("ranks", "hub", "state"),
    [(1, REPO, JobState.RUNNING), (2, REPO, JobState.FAILED), (2, None, JobState.RUNNING)],
)
def test_more_shards_than_a_folder_of_a_repository_takes_fail_a_job_that_is_pushed(
    house: House,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    hub: dict[str, str] | None,
    state: JobState,
) -> None:
    """Each rank of the engine writes a shard of a unit, of which there are three."""
    monkeypatch.setattr("service.artifacts.folder_limit.MAX_FOLDER_FILES", 3)
    house.settings = house.settings.model_copy(update={"tensor_parallel_size": ranks})
    house.submit(hub=hub)
    house.plan()
    job = house.job()
    assert job.state is state
    assert job.problem is None or job.problem.field == "storage.shard_bytes"


def test_the_same_plan_has_the_same_bytes_anywhere(house: House, tmp_path: Path) -> None:
    house.submit()
    house.plan()
    other = House(tmp_path / "other", Clock())
    other.submit()
    other.plan()
    for unit in range(3):
        assert house.plan_content(unit) == other.plan_content(unit)
    other.store.close()


def test_a_planner_that_stops_leaves_the_rest_to_the_next_one(house: House) -> None:
    """1. stop after the second unit  2. the lease runs out  3. another planner ends with the same plan."""
    house.submit()
    house.plan(stop=lambda: len(house.units()) >= 2)
    assert not house.job().progress.plan_done and len(house.units()) == 2
    before = [(unit, house.plan_content(unit.unit)) for unit in house.units()]
    progress = house.plan_later().progress
    assert progress.plan_done and (progress.samples_planned, progress.samples_rejected) == (12, 3)
    after = [(unit, house.plan_content(unit.unit)) for unit in house.units()]
    assert after[:2] == before and len(after) == 3


def test_a_source_that_changed_between_two_planners_fails_the_job(house: House) -> None:
    house.submit()
    house.plan(stop=lambda: len(house.units()) >= 1)
    house.write_rows(12, word="other")
    job = house.plan_later()
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.type == "urn:quarry:identity-changed" and "source_fingerprint" in job.problem.detail


def lose_the_lease(house: House) -> None:
    house.clock.advance(house.settings.lease_s + 1)
    assert plans.lease(house.store, "thief", 60) is not None


def cancel(house: House) -> None:
    house.store.write(jobs.cancel, JOB)


@pytest.mark.parametrize(
    ("happens", "state"), [(lose_the_lease, JobState.RUNNING), (cancel, JobState.CANCELLED)]
)
def test_a_planner_whose_job_is_not_its_own_any_more_adds_nothing(
    house: House, happens: Callable[[House], None], state: JobState
) -> None:
    house.submit()
    left = [happens]

    def stop() -> bool:
        while left:
            left.pop()(house)
        return False

    assert house.plan(stop=stop) is True
    assert house.units() == []
    assert house.job().state is state


def test_a_job_of_rejects_alone_is_planned_without_units(house: House) -> None:
    house.source.write_text('{"no": 1}\n{"no": 2}\n')
    house.submit()
    house.plan()
    job = house.job()
    assert job.state is JobState.RUNNING and job.progress.plan_done
    assert (job.progress.units_planned, job.progress.samples_rejected) == (0, 2)


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"model": "/nowhere"}, "unknown-model", "model"),
        ({"layers": [99]}, "unknown-layer", "layers"),
        ({"source": {"kind": "file", "path": "missing.jsonl"}}, "source-refused", "source.path"),
        ({"source": {"kind": "file", "path": "empty.jsonl"}}, "source-refused", "source.path"),
        ({"chat_template": "{% for %}"}, "template-refused", "chat_template"),
        ({"chat_template": "{{ raise_exception('never') }}"}, "template-refused", "chat_template"),
        ({"chat_template": templates.UNMARKED_TRAILER}, "template-refused", "chat_template"),
        ({"generate": {"max_tokens": 100_000}}, "option-refused", "generate.max_tokens"),
    ],
)
def test_what_the_request_gets_wrong_fails_the_job_and_names_the_field(
    house: House, options: dict[str, Any], kind: str, field: str
) -> None:
    (house.root / "empty.jsonl").touch()
    house.submit(**options)
    assert house.plan() is True
    job = house.job()
    assert job.state is JobState.FAILED and job.problem is not None and job.problem.cure
    assert (job.problem.type, job.problem.field) == (f"urn:quarry:{kind}", field)


def test_a_passing_error_is_tried_again_and_then_waits_for_a_person(house: House) -> None:
    """1. a file stands where plans go  2. three leases try  3. the job is blocked  4. resumed, it ends."""
    house.submit()
    house.settings.work_root.write_text("in the way")
    for attempt in range(house.settings.unit_attempts):
        assert house.job().state in {JobState.QUEUED, JobState.RUNNING}, attempt
        assert house.plan() is True
        house.clock.advance(house.settings.lease_s + 1)
    job = house.job()
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.type == "urn:quarry:write-failed"
    house.settings.work_root.unlink()
    house.store.write(jobs.resume, JOB)
    assert house.plan() is True
    assert house.job().progress.plan_done


def test_a_generate_job_is_planned_with_room_for_its_answers(house: House) -> None:
    house.submit(generate={"max_tokens": 200}, storage={"shard_bytes": 65_536})
    house.plan()
    identity = house.job().identity
    assert identity is not None and identity.capture == "one_pass"
    assert [unit.num_samples for unit in house.units()] == [1] * 9
    assert not any(house.plan_table(0).column("loss_mask").to_pylist()[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "one_pass"),
        ({"capture": "second_prefill"}, "second_prefill"),
        # The engine's front end finds it, and aborts the request with all its states.
        ({"stop": ("end",)}, "second_prefill"),
    ],
)
def test_capture_is_one_pass_but_where_it_cannot_be(options: dict[str, Any], expected: str) -> None:
    assert resolve_capture(None) is None
    assert resolve_capture(Generate(max_tokens=1, **options)) == expected


def test_a_stop_string_is_refused_in_one_pass() -> None:
    with pytest.raises(ValidationError, match=r"'stop' strings .* say 'capture': 'second_prefill' or 'auto'"):
        Generate(max_tokens=1, stop=("end",), capture="one_pass")
