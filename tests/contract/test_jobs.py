"""Whole jobs on the fake engine: every sample ends in a shard or among the rejects, whatever goes wrong."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from schemas.dataset.manifest import Manifest, VocabularyStats
from schemas.dataset.token_counts import read_counts
from schemas.generate import Generate
from schemas.job import JobState
from schemas.names import attempt_dir, canary_unit, manifest_path, token_freq_path
from schemas.receipts import AttemptId
from service.capture.attempt_files import land_left, remove_earlier
from service.errors import QuarryError
from service.proof.verify import verify_dataset
from service.store import TaskState, commits, jobs, tasks, units
from tests.support.fake_engine import FakeEngine, states_TH
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture, capture_until, sweep
from tests.support.tiny_model import random_target


def assert_whole(shop, job_id, *, written, rejected):
    """Every planned sample once, every state the fake's, and the dataset passes its own verification."""
    rows = shop.rows(job_id)
    assert len({row["sample_id"] for row in rows}) == len(rows) == written
    for row in rows:
        for k in (2, 4, 5, 8):
            truth = states_TH(row["input_ids"], k, 64, "bfloat16").view(torch.uint8).numpy().tobytes()
            assert row[f"layer_{k}"] == truth
    folder = shop.settings.dataset_dir(job_id)
    manifest = Manifest.model_validate_json((folder / manifest_path(job_id)).read_text())
    assert len(manifest.rejects) == rejected
    assert manifest.totals.samples_planned == written + rejected
    report = verify_dataset(folder)
    assert report.ok, report.findings
    said = Counter(t for row in rows for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m)
    assert read_counts((folder / token_freq_path(job_id)).read_bytes(), "counts") == said
    assert manifest.vocabulary == VocabularyStats(token_ids=len(said), coverage=())


def test_a_job_ends_with_every_sample_written_or_rejected_by_reason(shop, target):
    samples = [
        *conversations(60),
        {"id": "empty", "text": ""},
        {"id": "silent", "messages": [{"role": "user", "content": "no answer follows"}]},
        {"id": "foreign", "token_ids": [1, 2, 999_999]},
        {"id": "ids", "token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"id": "unsupervised", "token_ids": [5, 6, 8], "loss_mask": [0, 0, 0]},
        {"id": "refused by the engine", "token_ids": [13, 13, 8]},
    ]
    job = shop.run(request(target, samples))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=61, rejected=5)
    by_id = {reject.source_id: reject.reason for reject in shop.store.read(commits.rejects, job.id)}
    assert by_id.keys() == {"empty", "silent", "foreign", "unsupervised", "refused by the engine"}
    assert by_id["refused by the engine"] == "engine-refused"
    assert len(shop.store.read(commits.shards, job.id)) > 3


@pytest.mark.parametrize("capture", ["one_pass", "second_prefill"])
def test_a_generate_job_holds_prompt_and_answer(shop, target, capture):
    samples = [{"id": f"q{n}", "messages": [{"role": "user", "content": f"Question {n}"}]} for n in range(12)]
    body = request(target, samples, generate=Generate(max_tokens=7, capture=capture).model_dump())
    job = shop.run(body)
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=12, rejected=0)
    for row in shop.rows(job.id):
        answer = row["num_tokens"] - row["prompt_tokens"]
        assert answer == (6 if capture == "one_pass" else 7)
        assert row["loss_mask"] == [0] * row["prompt_tokens"] + [1] * answer


def test_a_dead_engine_costs_no_sample_and_its_units_no_attempt(shop, target, monkeypatch):
    deaths = iter([True, False])
    healthy = FakeEngine.run

    async def run(self, prompt):
        if self.requests == 5 and next(deaths, False):
            self.die()
        return await healthy(self, prompt)

    monkeypatch.setattr(FakeEngine, "run", run)
    job = shop.run(request(target, conversations(40)))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=40, rejected=0)
    rows = shop.store.read(units.of_job, job.id)
    assert {row.attempts for row in rows} == {1} and max(row.epoch for row in rows) > 1


def test_a_row_that_is_not_finite_is_rejected_and_the_rest_is_whole(shop, target, monkeypatch):
    healthy, computed = FakeEngine._compute, []

    def compute(self, token_ids, blocks):
        healthy(self, token_ids, blocks)
        computed.append(token_ids)
        if token_ids == computed[min(2, len(computed) - 1)]:
            self._cache[blocks[0], 1, 0, 3] = float("nan")

    monkeypatch.setattr(FakeEngine, "_compute", compute)
    job = shop.run(request(target, conversations(20)))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=19, rejected=1)
    assert [reject.reason for reject in shop.store.read(commits.rejects, job.id)] == ["not-finite"]


def test_a_folder_that_cannot_be_written_costs_attempts_and_then_fails_the_job_by_name(shop, target):
    job_id = shop.submit(request(target, conversations(20)))
    shop.plan()
    attempts = shop.settings.work_root / job_id / "attempts"
    attempts.write_bytes(b"not a folder")
    shop.capture(job_id)
    failed = shop.store.read(jobs.job, job_id)
    assert failed.state is JobState.FAILED
    assert failed.problem is not None and failed.problem.type == "urn:quarry:write-failed"
    attempts.unlink()
    shop.store.write(jobs.resume, job_id)
    shop.finish(job_id)
    assert_whole(shop, job_id, written=20, rejected=0)


def test_a_cancelled_job_stops_and_resumes_from_what_was_committed(shop, target):
    job_id = shop.submit(request(target, conversations(60)))
    shop.plan()

    def cancelled() -> bool:
        if shop.store.read(jobs.job, job_id).progress.units_done < 2:
            return False
        shop.store.write(jobs.cancel, job_id)
        return True

    capture_until(cancelled, Capture(shop.store, shop.settings, "worker"))
    done = [row.unit for row in shop.store.read(units.of_job, job_id) if row.state is TaskState.DONE]
    assert len(done) >= 2
    assert shop.store.read(jobs.job, job_id).state is JobState.CANCELLED
    epochs = {row.unit: row.epoch for row in shop.store.read(units.of_job, job_id)}
    shop.store.write(jobs.resume, job_id)
    shop.finish(job_id)
    assert_whole(shop, job_id, written=60, rejected=0)
    assert all(
        row.epoch == epochs[row.unit] for row in shop.store.read(units.of_job, job_id) if row.unit in done
    )


def test_a_worker_that_is_told_to_stop_gives_its_units_back_at_once(shop, target, monkeypatch):
    """1. Units are in an engine that takes for ever. 2. SIGTERM, and no time to drain."""
    monkeypatch.setenv("QUARRY_FAKE_STEP_S", "600")
    shop.settings = shop.settings.model_copy(update={"drain_s": 0.0})
    job_id = shop.submit(request(target, conversations(60)))
    shop.plan()
    loop = Capture(shop.store, shop.settings, "worker")
    capture_until(lambda: bool(loop._tasks()), loop)
    rows = shop.store.read(units.of_job, job_id)
    assert rows[0].epoch == 1
    assert {(row.state, row.attempts) for row in rows} == {(TaskState.PENDING, 0)}
    monkeypatch.delenv("QUARRY_FAKE_STEP_S")
    shop.finish(job_id)
    assert_whole(shop, job_id, written=60, rejected=0)


@pytest.mark.parametrize("lander", ["sweep", "acknowledgement", "publication"])
def test_files_of_a_commit_that_was_not_landed_are_landed_later(shop, target, lander):
    job_id = shop.submit(request(target, conversations(20)))
    shop.plan()
    shop.capture(job_id)
    dataset = shop.settings.dataset_dir(job_id)
    # Undo the landing, as a crash between commit and move would have left it.
    for commit in shop.store.read(commits.unit_commits, job_id):
        folder = shop.settings.work_root / attempt_dir(
            job_id, commit.attempt_id.unit, commit.attempt_id.epoch
        )
        folder.mkdir(parents=True)
        (dataset / commit.shards[0].path).rename(folder / Path(commit.shards[0].path).name)
    if lander == "sweep":  # whoever follows the job waits for them, perhaps before it can go on
        sweep(shop.store, shop.settings)
    if lander == "acknowledgement":
        land_left(shop.store, shop.settings, job_id)
    if lander != "publication":
        assert all((dataset / entry.path).is_file() for entry in shop.store.read(commits.shards, job_id))
    shop.publish()
    assert_whole(shop, job_id, written=20, rejected=0)


def test_the_sweeper_takes_the_lost_attempts_of_a_job_that_rests(shop, target):
    """1. A worker was lost over a unit and its canary. 2. The job goes on. 3. It is paused, and resumed."""
    job_id = shop.submit(request(target, conversations(20)))
    shop.plan()
    key = units.lease(shop.store, "a lost worker", 600.0).attempt_id
    lost = begin_attempts(shop, key, key.epoch)
    assert sweep(shop.store, shop.settings) == []
    shop.store.write(jobs.pause, job_id)
    assert sweep(shop.store, shop.settings) == lost
    shop.store.write(jobs.resume, job_id)
    shop.finish(job_id)
    assert_whole(shop, job_id, written=20, rejected=0)


def test_an_attempt_that_begins_while_its_job_is_swept_is_left_alone(shop, target, monkeypatch):
    """1. A paused job's folder is listed. 2. It is resumed, and an attempt begins. 3. The sweep goes on."""
    job_id = shop.submit(request(target, conversations(20)))
    shop.plan()
    shop.store.write(jobs.pause, job_id)
    lost = begin_attempts(shop, AttemptId(job_id=job_id, unit=0, epoch=7), 7)
    live = []
    stated = jobs.state

    def state(tx, job_id):
        seen = stated(tx, job_id)
        shop.store.write(jobs.resume, job_id)
        key = units.lease(shop.store, "a living worker", 600.0).attempt_id
        live.extend(begin_attempts(shop, key, key.epoch))
        return seen

    monkeypatch.setattr(jobs, "state", state)
    assert sweep(shop.store, shop.settings) == lost
    assert live and all(folder.exists() for folder in live)


def test_the_next_attempt_removes_what_a_lost_one_left(shop, target):
    """What a later one has written is not touched."""
    job_id = shop.submit(request(target, conversations(20)))
    shop.plan()
    key = units.lease(shop.store, "a worker", 600.0).attempt_id
    earlier, later = begin_attempts(shop, key, key.epoch), begin_attempts(shop, key, key.epoch + 2)
    remove_earlier(shop.settings, AttemptId(job_id=job_id, unit=key.unit, epoch=key.epoch + 1))
    assert not earlier[0].exists()
    assert later[0].exists()


def begin_attempts(shop, key, epoch):
    """Leave what an attempt at a unit, and at the canary before it, leaves when it is lost."""
    numbers = (key.unit, canary_unit(key.unit))
    folders = [shop.settings.work_root / attempt_dir(key.job_id, number, epoch) for number in numbers]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / ".train-00000.parquet.tmp").write_bytes(b"half")
    return folders


def test_a_completed_jobs_plans_are_swept(shop, target):
    job = shop.run(request(target, conversations(5)))
    assert sweep(shop.store, shop.settings) == [shop.settings.work_root / job.id]


def test_a_model_that_changed_after_planning_is_refused_before_anything_is_captured(tmp_path):
    target = random_target(tmp_path / "models" / "mine", arch="llama", hidden=64, max_position=256)
    shop = Shop.open(tmp_path, target)
    job_id = shop.submit(request(target, conversations(5, longest=4)))
    shop.plan()
    random_target(target, arch="llama", hidden=64, max_position=256, tied=True)
    shop.capture(job_id)
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.FAILED
    assert job.problem is not None
    assert (job.problem.type, job.problem.field) == ("urn:quarry:identity-changed", "model")
    assert job.progress.samples_written == 0
    shop.store.close()


def test_an_engine_is_started_anew_only_for_a_job_that_it_cannot_serve(shop, target, monkeypatch):
    started = []
    start = FakeEngine.start

    async def counted(self, spec, settings, link):
        started.append(spec.layer_ids)
        await start(self, spec, settings, link)

    monkeypatch.setattr(FakeEngine, "start", counted)
    bodies = [
        request(target, conversations(4)),
        request(target, conversations(6)),
        request(target, conversations(4), layers="eagle"),
        request(target, conversations(5), layers="mtp"),
    ]
    job_ids = [shop.submit(body, str(number)) for number, body in enumerate(bodies)]
    shop.plan()
    shop.capture(job_ids[-1])
    shop.publish()
    assert [shop.store.read(jobs.job, job_id).state for job_id in job_ids] == [JobState.COMPLETED] * 4
    assert started == [(2, 4, 5, 8), (8,)]


def test_a_worker_whose_heartbeat_broke_ends_loudly_and_gives_its_units_back(tmp_path, target, monkeypatch):
    shop = Shop.open(tmp_path, target, lease_s=1.0)
    job_id = shop.submit(request(target, conversations(20)))
    shop.plan()
    healthy, extend = FakeEngine.run, tasks.extend

    async def slow(self, prompt):
        await asyncio.sleep(1.0)
        return await healthy(self, prompt)

    def broken(tx, leases, ttl_s):
        raise RuntimeError("a bug in the heartbeat")

    monkeypatch.setattr(FakeEngine, "run", slow)
    monkeypatch.setattr(tasks, "extend", broken)
    with pytest.raises(QuarryError, match="leases are no longer kept"):
        shop.capture(job_id)
    assert not any(row.state is TaskState.LEASED for row in shop.store.read(units.of_job, job_id))
    monkeypatch.setattr(FakeEngine, "run", healthy)
    monkeypatch.setattr(tasks, "extend", extend)
    shop.finish(job_id)
    assert_whole(shop, job_id, written=20, rejected=0)
    shop.store.close()


def test_an_engine_that_died_behind_a_living_socket_is_replaced_before_the_attempts_run_out(
    shop, target, monkeypatch
):
    """1. The first engine answers nothing any more, but its connector lives. 2. A second one is started."""
    started, healthy, start = [], FakeEngine.run, FakeEngine.start

    async def counted(self, spec, settings, link):
        started.append(self)
        await start(self, spec, settings, link)

    async def run(self, prompt):
        if self is started[0] and self.requests == 5:
            self._dead = True
        return await healthy(self, prompt)

    monkeypatch.setattr(FakeEngine, "start", counted)
    monkeypatch.setattr(FakeEngine, "run", run)
    job = shop.run(request(target, conversations(40)))
    assert job.state is JobState.COMPLETED, job.problem
    assert len(started) == 2
    assert_whole(shop, job.id, written=40, rejected=0)
