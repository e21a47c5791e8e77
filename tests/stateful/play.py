"""What users and fate do, each with what is noted of it: the machine's rules say when."""

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from schemas.job import JobState
from schemas.keys import NewKey, Scope
from schemas.request import ExtractRequest, Sample
from schemas.schedule import NewSchedule, ScheduleChange
from service.control import keys as key_control, scheduling
from service.control.deletion import delete_job
from service.control.submit import submit
from service.errors import Conflict, NotFound, QuotaExceeded
from service.settings import Settings
from service.store import JobRow, Store, jobs, keys, schedules
from tests.stateful.engine import ENGINE, FAULT
from tests.stateful.oracle import (
    FIRST,
    OWNERS,
    Checkpoints,
    Found,
    JobRecord,
    ScheduleRecord,
    check_job,
    check_schedule,
    check_state,
    rows_of,
    sample,
    tokens_of,
)
from tests.stateful.service import LoggedErrors, Service

MODELS = ("base", "right")
REFUSALS = (Conflict, NotFound, QuotaExceeded)
"""What a user may be told."""


class Play:
    """A service, and what is known of it."""

    def __init__(self, root: Path, url: str, checkpoints: Checkpoints) -> None:
        self.root, self.checkpoints = root, checkpoints
        settings = Settings(
            data_dir=root / "data",
            database_url=url,
            model_roots=(root / "models",),
            source_roots=(root / "incoming",),
            engine=ENGINE,
            pool_bytes=2**20,
            poll_s=0.02,
            drain_s=5.0,
            unit_max_samples=2,
            units_in_flight=1,
            units_in_proof=1,
            min_free_bytes=0,
        )
        self.service = Service(settings)
        self.store = self.service.store
        # No slot comes at the very moment of a start by hand.
        self.service.clock.advance(1000.5)
        self.jobs: list[JobRecord] = []
        self.schedules: list[ScheduleRecord] = []
        self.removal_was_cut_off = False
        self.models: dict[str, int] = {}
        self.files: dict[str, frozenset[tuple[int, ...]]] = {}
        self.engine_deaths = 0
        self.logged = LoggedErrors()
        logging.getLogger("service").addHandler(self.logged)
        FAULT.rows_left = None
        (root / "models").mkdir()
        for number, model in enumerate(MODELS):
            self.overwrite_model(model, number)
        for owner in OWNERS:
            self.overwrite_source(owner, range(3))
        self._issue_keys(settings)

    def _issue_keys(self, settings: Settings) -> None:
        reading = {"model_roots": settings.model_roots, "source_roots": settings.source_roots}
        roots = {name: tuple(map(str, paths)) for name, paths in reading.items()}
        store = self.service.store
        key_control.issue(store, settings, NewKey(name="admin", scopes=(Scope.ADMIN,)))
        for owner, limit in (("ann", None), ("bob", 1)):
            scopes = (Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.SCHEDULES)
            key_control.issue(store, settings, NewKey(name=owner, scopes=scopes, max_jobs=limit, **roots))

    def close(self) -> None:
        logging.getLogger("service").removeHandler(self.logged)
        self.service.close()

    def settings_of(self, owner: str | None) -> Settings:
        return self.service.settings.narrowed(self.store.read(keys.granted, owner))

    def model(self, name: str) -> Path:
        return self.root / "models" / name

    def source(self, owner: str | None) -> Path:
        return self.root / "incoming" / str(owner) / "rows.jsonl"

    # What is not of the service: models and sources.

    def overwrite_model(self, name: str, checkpoint: int, *, renamed: bool = True) -> None:
        self.checkpoints.write(checkpoint, self.model(name), renamed=renamed)
        if self.models.get(name) == checkpoint:
            return
        self.models[name] = checkpoint
        for record in self.jobs:
            if record.model == name and not record.completed:
                record.checkpoints.add(checkpoint)
                record.excuses.add("its model was overwritten")
        for schedule in self.schedules:
            if schedule.model == name:
                schedule.models.add(checkpoint)

    def overwrite_source(self, owner: str | None, numbers: Iterable[int]) -> None:
        path, chosen = self.source(owner), sorted(set(numbers))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(sample(owner, number)) + "\n" for number in chosen))
        rows = self.files[str(path)] = rows_of(owner, chosen)
        for record in self.jobs:
            if record.body["source"].get("path") == str(path) and not record.completed:
                record.sources.append(rows)
                record.excuses.add("its source was overwritten")

    # Jobs.

    def choose_key(self, choice: str, owner: str | None) -> tuple[str | None, str]:
        """Return an owner and a key that is new, or that of the newest job that is deleted or there."""
        for record in reversed(self.jobs):
            if record.key is not None and choice == ("deleted" if record.deleted else "taken"):
                return record.owner, record.key
        return owner, f"key {len(self.jobs)}"

    def submit_again(self, number: int) -> None:
        """Send a request again, as a client does that got no answer."""
        record = self.pick(number)
        if record is None or record.key is None:
            return
        samples = record.body["source"].get("samples", ())
        numbers = frozenset(one["token_ids"][1] - FIRST for one in samples)
        self.submit(record.owner, record.key, record.model, record.layers, numbers)

    def submit(
        self, owner: str | None, key: str, model: str, layers: tuple[int, ...], numbers: frozenset[int]
    ) -> None:
        """Submit a job of inline samples, or of the owner's file if no numbers are given."""
        if numbers:
            source: dict[str, Any] = {
                "kind": "inline",
                "samples": [sample(owner, number) for number in sorted(numbers)],
            }
            rows = rows_of(owner, numbers)
        else:
            path = str(self.source(owner))
            source, rows = {"kind": "file", "path": path}, self.files[path]
        body = self._body(model, layers, source)
        known = self._of_key(owner, key)
        same = known is not None and known.body == body
        try:
            row = submit(
                ExtractRequest.model_validate(body), key, self.store, self.settings_of(owner), owner=owner
            )
        except QuotaExceeded:
            assert owner == "bob" and not same
            return
        except Conflict:
            used = [job for job in self.jobs if (job.owner, job.key) == (owner, key)]
            assert used and not same, "a key that is new, or came with the same request, is refused"
            return
        if known is not None:
            assert same and row.id == known.id, "one key stands for two requests"
            return
        assert row.state is JobState.QUEUED, f"{key} was accepted for a job that is {row.state.value}"
        record = JobRecord(row.id, key, owner, model, layers, body, {self.models[model]}, [rows])
        self.jobs.append(record)

    def _body(self, model: str, layers: tuple[int, ...], source: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": str(self.model(model)),
            "layers": layers,
            "source": source,
            "loss": "all",
            "canary": "skip",
        }

    def _of_key(self, owner: str | None, key: str) -> JobRecord | None:
        for record in self.jobs:
            if (record.owner, record.key) == (owner, key) and not record.deleted:
                return record
        return None

    def pick(self, number: int) -> JobRecord | None:
        """Return one of the jobs that are there, the newest for 0."""
        alive = [record for record in self.jobs if not record.deleted]
        return alive[-1 - number % len(alive)] if alive else None

    def delete(self, number: int, *, with_dataset: bool, store: Store | None = None) -> None:
        record = self.pick(number)
        if record is None:
            return
        self.look(record)
        with suppress(*REFUSALS):
            delete_job(store or self.store, self.service.settings, record.id, with_dataset=with_dataset)
            self._deleted(record)

    @staticmethod
    def _deleted(record: JobRecord) -> None:
        record.deleted = True
        if record.schedule is not None and not record.completed:
            record.schedule.given_back = True

    def after_a_deletion(self) -> None:
        """Note which jobs a deletion that was cut off has taken."""
        alive = {job.id: job.state for job in self.service.jobs()}
        for record in self.jobs:
            if alive.get(record.id) in {None, JobState.DELETING}:
                self._deleted(record)

    def ask(self, number: int, verb: str) -> None:
        record = self.pick(number)
        if record is None:
            return
        with suppress(*REFUSALS):
            self.store.write(getattr(jobs, verb), record.id)

    def set_priority(self, number: int, priority: int) -> None:
        record = self.pick(number)
        if record is not None:
            with suppress(*REFUSALS):
                self.store.write(jobs.set_priority, record.id, priority)

    # Schedules.

    def add_schedule(
        self, owner: str | None, name: str, kind: str, model: str, *, takes_all: bool, overlap: str
    ) -> None:
        path = str(self.source(owner))
        source = {"kind": "posted"} if kind == "posted" else {"kind": "file", "path": path}
        schedule = NewSchedule.model_validate(
            {
                "name": name,
                "cron": "0 * * * *",
                "overlap": overlap,
                "samples": "all" if takes_all else "new",
                "request": self._body(model, (1,), source),
            }
        )
        there = self._of_name(name)
        try:
            scheduling.add(self.store, self.settings_of(owner), schedule, owner)
        except Conflict:
            assert there is not None
            return
        assert there is None
        record = ScheduleRecord(name, owner, kind, takes_all, model, (1,), None if kind == "posted" else path)
        record.models.add(self.models[model])
        self.schedules.append(record)

    def _of_name(self, name: str) -> ScheduleRecord | None:
        return next((one for one in self.schedules if one.name == name and not one.removed), None)

    def pick_schedule(self, number: int) -> ScheduleRecord | None:
        self.after_a_removal()
        there = [one for one in self.schedules if not one.removed]
        return there[-1 - number % len(there)] if there else None

    def change_schedule(self, number: int, change: dict[str, Any]) -> None:
        if (schedule := self.pick_schedule(number)) is not None:
            scheduling.change(self.store, schedule.name, ScheduleChange.model_validate(change))

    def remove_schedule(self, number: int) -> None:
        schedule = self.pick_schedule(number)
        if schedule is None:
            return
        self.notice_slots()
        scheduling.remove(self.store, self.service.settings, schedule.name)
        self._removed(schedule)

    def after_a_removal(self) -> None:
        """Note which schedules a removal that was cut off has taken, which a server may commit later."""
        there = {view.name for view in self.store.read(schedules.page)}
        for schedule in self.schedules:
            if self.removal_was_cut_off and not schedule.removed and schedule.name not in there:
                self._removed(schedule)

    def _removed(self, schedule: ScheduleRecord) -> None:
        schedule.removed = True
        for record in self.jobs:
            if record.schedule is schedule and not record.completed:
                record.must = frozenset()
                record.excuses.add("its schedule was removed")

    def post(self, number: int, numbers: Iterable[int]) -> None:
        """Post samples; where a schedule takes all, each of them once."""
        schedule = self.pick_schedule(number)
        if schedule is None or schedule.kind != "posted":
            return
        rows = {one: tokens_of(schedule.owner, one) for one in sorted(set(numbers))}
        fresh = [
            one for one, tokens in rows.items() if not (schedule.takes_all and tokens in schedule.posted)
        ]
        if fresh:
            named = (sample(schedule.owner, one, named=one % 2 == 0) for one in fresh)
            number, _ = self.store.read(schedules.numbered, schedule.name)
            samples = list(map(Sample.model_validate, named))
            scheduling.post_samples(self.store, self.service.settings, number, samples)
            schedule.posted.update(rows[one] for one in fresh)

    def run_now(self, number: int) -> None:
        if (schedule := self.pick_schedule(number)) is not None:
            self.service.clock.advance(1.0)
            with suppress(*REFUSALS):
                scheduling.run_now(self.store, self.service.settings, schedule.name)
            self.notice_slots()

    def notice_slots(self) -> None:
        """Note the jobs that slots have made."""
        known = {record.id for record in self.jobs}
        for schedule in self.schedules:
            if schedule.removed:
                continue
            for run in reversed(self.store.read(schedules.past, schedule.name)):
                if run.job_id is None or run.job_id in known:
                    continue
                source = {} if schedule.source is None else {"path": schedule.source}
                rows = self.files[schedule.source] if schedule.source else frozenset(schedule.posted)
                record = JobRecord(
                    run.job_id,
                    None,
                    schedule.owner,
                    schedule.model,
                    schedule.layers,
                    {"source": source},
                    {self.models[schedule.model]},
                    [rows] if schedule.source else [],
                    schedule,
                    rows,
                )
                if len(schedule.models) > 1:
                    record.excuses.add("its recipe changed")
                if schedule.takes_all and not rows - {tokens for _, tokens in schedule.written}:
                    record.excuses.add("nothing was posted")
                self.jobs.append(record)

    # Fate.

    def excuse_all(self, why: str) -> None:
        for record in self.jobs:
            if not record.completed:
                record.excuses.add(why)

    def plan_fault(self, rows: int, *, dies: bool) -> None:
        FAULT.rows_left, FAULT.dies = rows, dies
        self.engine_deaths += dies
        if not dies or self.engine_deaths > 1:
            self.excuse_all("its engine failed")

    def notice_fault(self) -> None:
        """A fault that no row has met yet meets none later: a job made since has no excuse."""
        FAULT.rows_left = None

    # What must hold.

    def look(self, record: JobRecord) -> tuple[JobRow, Found | None] | None:
        """Hold one completed job against what is known; return it with its dataset."""
        with suppress(NotFound):
            job = self.store.read(jobs.job, record.id)
            if job.state is not JobState.COMPLETED:
                return job, None
            found = check_job(self.checkpoints, job, record, self.service.settings.dataset_dir(record.id))
            if record.schedule is not None:
                others = [one for one in self.jobs if one.schedule is record.schedule and not one.deleted]
                check_schedule(job, record, found, stopped=not all(one.completed for one in others))
            return job, found
        return None

    def check(self) -> None:
        """Hold everything against what is known, once all rests."""
        assert not self.logged.messages, self.logged.messages[0]
        self.after_a_deletion()
        rows = {job.id: job for job in self.service.jobs()}
        alive = {record.id: record for record in self.jobs if not record.deleted}
        assert rows.keys() == alive.keys(), "jobs came or went by themselves"
        for record in alive.values():
            looked = self.look(record)
            assert looked is not None
            check_state(looked[0], record)
        for owner in OWNERS[1:]:
            seen, _ = self.store.read(jobs.page, owner=owner, limit=200)
            assert {job.id for job in seen} == {id for id, one in alive.items() if one.owner == owner}
            listed = self.store.read(schedules.page, owner=owner)
            own = {one.name for one in self.schedules if one.owner == owner and not one.removed}
            assert {view.name for view in listed} == own

    def settle(self) -> None:
        self.service.settle(self.notice_slots)
        self.check()
